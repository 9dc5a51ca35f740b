"""The inputs of conditions at one moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from torchperfd_daemon.diagnosis import RunFindings
from torchperfd_daemon.store import Rank, State

Series = list[tuple[Mapping[str, str], float]]
"""The series of one name: labels and value of each."""
FindingsOf = Callable[[str], RunFindings | None]
"""Returns the findings of diagnosis on a run; None if the run is unknown."""


@dataclass
class ConditionInputs:
    """Ranks, findings and metrics at one moment.

    Attributes:
        now: Monotonic seconds.
    """

    now: float
    runs: Mapping[str, Sequence[Rank]]
    found: FindingsOf
    page: Callable[[], Iterable[Metric]]
    _series: dict[str, Series] | None = field(default=None, init=False)

    def findings(self) -> Iterator[tuple[str, RunFindings]]:
        """Yield each run that has findings, with its findings."""
        for run in self.runs:
            found = self.found(run)
            if found is not None:
                yield run, found

    def series(self, name: str) -> Series:
        """Return the series of a name; the metrics are collected once, at the first call."""
        if self._series is None:
            self._series = {}
            for metric in self.page():
                for sample in metric.samples:
                    self._series.setdefault(sample.name, []).append((sample.labels, sample.value))
        return self._series.get(name, [])

    def owners(self) -> dict[str, list[tuple[str, int]]]:
        """Return the connected ranks on each GPU, as (run, rank), by the GPU's UUID."""
        here = {(run, rank.identity.rank) for run, ranks in self.runs.items() for rank in ranks}
        owners: dict[str, list[tuple[str, int]]] = {}
        for labels, _ in self.series("torchperfd_train_rank_info"):
            key = labels["run"], int(labels["rank"])
            if labels["gpu_uuid"] and key in here:
                owners.setdefault(labels["gpu_uuid"], []).append(key)
        return owners

    def training(self, run: str, rank: int) -> bool:
        """Return whether a rank is connected and trains, that is, neither validates nor saves."""
        return any(
            each.identity.rank == rank and each.state is State.TRAINING for each in self.runs.get(run, ())
        )
