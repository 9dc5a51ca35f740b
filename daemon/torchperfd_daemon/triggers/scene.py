"""The scene: all that conditions may look at, at one moment."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from torchperfd_daemon.store import Histogram, State
from torchperfd_daemon.triggers.pace import Pace, Paces

Series = list[tuple[Mapping[str, str], float]]
"""The series of one name: labels and value of each."""


@dataclass
class Scene:
    """One moment.

    Attributes:
        now: Monotonic seconds.
        paces: Of the connected ranks.
        histograms: Of step times, by run.
        page: Returns what the metrics page would show now.
    """

    now: float
    paces: Paces
    histograms: Mapping[str, Histogram]
    page: Callable[[], Iterable[Metric]]
    _series: dict[str, Series] | None = field(default=None, init=False)

    def runs(self) -> dict[str, list[Pace]]:
        """Return the paces of each run, by rank."""
        return self.paces.runs()

    def series(self, name: str) -> Series:
        """Return the series of a name; the page is made once, and only if asked for."""
        if self._series is None:
            self._series = {}
            for metric in self.page():
                for sample in metric.samples:
                    self._series.setdefault(sample.name, []).append((sample.labels, sample.value))
        return self._series.get(name, [])

    def owners(self) -> dict[str, list[tuple[str, int]]]:
        """Return the connected ranks on each GPU, as (run, rank), by the GPU's UUID."""
        here = {(run, pace.rank.identity.rank) for run, paces in self.runs().items() for pace in paces}
        owners: dict[str, list[tuple[str, int]]] = {}
        for labels, _ in self.series("torchperfd_train_rank_info"):
            key = labels["run"], int(labels["rank"])
            if labels["gpu_uuid"] and key in here:
                owners.setdefault(labels["gpu_uuid"], []).append(key)
        return owners

    def training(self, run: str, rank: int) -> bool:
        """Return whether a rank is here and makes training steps, rather than validating or saving."""
        return any(
            pace.rank.identity.rank == rank and pace.rank.state is State.TRAINING
            for pace in self.runs().get(run, [])
        )
