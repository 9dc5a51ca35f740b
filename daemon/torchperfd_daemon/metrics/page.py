"""The metrics page: one registry over all sources, rendered in the format a scraper asks for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.cap import SeriesCap

PREFIX: Final = "torchperfd_"
CONTENT_TYPES: Final = ("text/plain", "application/openmetrics-text")


Source = Callable[[], Iterable[Family | Metric]]
"""Returns what is true now; must be quick and must not block."""


class MetricsPage:
    """Renders ``/metrics``.

    Args:
        sources: What the page shows, in its order.
        cap: Bounds the number of series; all are shown without one.
    """

    def __init__(self, sources: Sequence[Source], cap: SeriesCap | None = None) -> None:
        self._sources = sources
        self._cap = cap
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every family, as prometheus_client asks for them."""
        if self._cap is None:
            yield from self._metrics()
            return
        yield from self._cap.keep(list(self._metrics()))
        overflow = Family("label_overflow", "Series left out of pages to keep to the cap.", "counter")
        overflow.add(self._cap.left_out)
        yield _to_metric(overflow)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, for the ``Accept`` header of a scraper."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _metrics(self) -> Iterator[Metric]:
        for source in self._sources:
            for family in source():
                metric = family if isinstance(family, Metric) else _to_metric(family)
                if metric.samples:
                    yield metric


def _to_metric(family: Family) -> Metric:
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(PREFIX + family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric
