"""The metrics of one daemon: those that its page shows, and those that triggers read."""

from functools import partial

from torchperfd_daemon.config.options import ESSENTIAL, ServeSettings
from torchperfd_daemon.metrics.comparison import ComparisonMetrics
from torchperfd_daemon.metrics.page import (
    DEFAULT_SERIES,
    MetricsPage,
    SeriesCap,
    Source,
    by_age,
    collector_metrics,
    node_metrics,
)
from torchperfd_daemon.metrics.training import DiagnosisMetrics, TrainingMetrics
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.server.workers import NodeSamplers
from torchperfd_daemon.store.store import Store


class Exports:
    """Collects the sources of the metrics page that the settings choose.

    Args:
        settings: Which collectors are exported, and how much of each rank.
    """

    def __init__(
        self, settings: ServeSettings, store: Store, samplers: NodeSamplers, observer: Observer
    ) -> None:
        self._settings = settings
        self._store = store
        self._samplers = samplers
        self._observer = observer
        self._cap = SeriesCap(DEFAULT_SERIES, lambda: by_age(store))
        self._sources: list[Source] = []
        self._add_measured()

    def add(self, collector: str, *sources: Source) -> None:
        """Show sources of a collector, after those that are there, unless it is switched off."""
        if collector in self._settings.collectors:
            self._sources += sources

    def page(self) -> MetricsPage:
        return MetricsPage(self._sources, self._cap, essential_only=self._is_essential)

    def of_triggers(self) -> MetricsPage:
        """Return all that is measured: for triggers, what a page leaves out still counts."""
        return MetricsPage(
            [
                TrainingMetrics(self._store, self._samplers.owners.of).families,
                DiagnosisMetrics(self._store, self._observer).families,
                ComparisonMetrics(self._store, self._observer).families,
                partial(node_metrics, self._samplers.samplers),
                partial(collector_metrics, self._samplers.samplers),
            ]
        )

    @property
    def _is_essential(self) -> bool:
        return self._settings.metrics_level == ESSENTIAL

    def _add_measured(self) -> None:
        samplers, store = self._samplers, self._store
        training = TrainingMetrics(
            store, samplers.owners.of, self._cap, samplers.users.of, essential_only=self._is_essential
        )
        self.add("steps", training.families)
        self.add("diagnosis", DiagnosisMetrics(store, self._observer, self._cap).families)
        self.add("diagnosis", ComparisonMetrics(store, self._observer, self._cap).families)
        # What is switched off has no sampler.
        self._sources.append(partial(node_metrics, samplers.samplers))
        self.add("self", partial(collector_metrics, samplers.samplers))
