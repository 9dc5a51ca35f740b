"""The conditions of rules, one class per kind, and their inputs at one moment.

Diagnosis decides whether a run is slower, which rank is late and which rank has stalled; rules only set a
bound. The other conditions compare series of the metrics page with a bound or with their own past.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from prometheus_client.core import Metric

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.verdict import RunFindings
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.triggers.plan import Rule, When

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


_KEPT_VALUES: Final = 600
_RECENT_VALUES: Final = 10
_MIN_PAST_VALUES: Final = 30
_XID_SHOWN_S: Final = 60.0
_BUSY_GPU: Final = 0.2
_RATE_S: Final = 10.0
_MAX_SERIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds now.

    Attributes:
        run: The affected run; empty if there is none.
        ranks: The culprits; empty if none is known.
        reason: One sentence for the log.
        key: Distinguishes this finding from others of the same rule.
    """

    run: str
    ranks: tuple[int, ...]
    reason: str
    key: str


def condition_of(rule: Rule) -> "Condition":
    """Return a new condition for a rule, without past values."""
    makers: dict[When, type[Condition]] = {
        When.STEP_TIME_REGRESSION: StepTimeRegression,
        When.STRAGGLER: Straggler,
        When.GPU_UTILISATION_DROP: GpuUtilisationDrop,
        When.STALL: Stall,
        When.XID: Xid,
        When.GPU_MEMORY_NEAR_FULL: GpuMemoryNearFull,
        When.METRIC: MetricBound,
    }
    return makers[rule.when](rule)


class Condition:
    """The condition of one rule, which is evaluated once a second."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._above = rule.above or 0.0
        self._below = rule.below or 0.0

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        """Yield all findings that hold now."""
        raise NotImplementedError


class StepTimeRegression(Condition):
    """Diagnosis finds a run slower than before, by more than the rule's bound."""

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        """Yield the runs that have become slow.

        The culprit is the rank that the verdict names, or else the rank with the most own work.
        """
        for run, found in inputs.findings():
            before, now = found.normal_seconds, found.step_seconds
            if before is None or now <= before * (1 + self._above):
                continue
            culprit = found.culprit
            if culprit is None:
                culprit = max(inputs.runs[run], key=Rank.mean_own_seconds).identity.rank
            reason = f"a step of run {run} takes {duration(now)}, {now / before - 1:.0%} more than before"
            yield Finding(run, (culprit,), reason, run)


class Straggler(Condition):
    """Diagnosis finds a straggler that is late by more than the rule's bound."""

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        for run, found in inputs.findings():
            usual = found.peer_seconds
            for rank, late in found.late_seconds.items():
                if late > usual * self._above:
                    reason = (
                        f"rank {rank} of run {run} works {duration(usual + late)} a step,"
                        f" its peers {duration(usual)}"
                    )
                    yield Finding(run, (rank,), reason, f"{run} {rank}")


class GpuUtilisationDrop(Condition):
    """The utilisation of a GPU has dropped, although its rank still trains."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._past: dict[str, deque[float]] = {}

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        """Yield each rank whose GPU has become idle."""
        owners = inputs.owners()
        known, self._past = self._past, {}
        for labels, value in inputs.series("torchperfd_gpu_utilization_ratio"):
            uuid = labels["gpu_uuid"]
            past = self._past[uuid] = known.get(uuid) or deque(maxlen=_KEPT_VALUES)
            training = [owner for owner in owners.get(uuid, []) if inputs.training(*owner)]
            if not training:
                continue
            past.append(value)
            before, recent = _change(past) or (0.0, 0.0)
            if before >= _BUSY_GPU and recent < before * self._below:
                for run, rank in training:
                    reason = (
                        f"GPU {labels['gpu']} of rank {rank}, run {run} is used {recent:.0%},"
                        f" it was {before:.0%}"
                    )
                    yield Finding(run, (rank,), reason, f"{run} {rank}")


class Stall(Condition):
    """Diagnosis finds a stall that has lasted for the time in the rule."""

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        for run, found in inputs.findings():
            stall = found.stall
            if stall and stall.waited_seconds > max(self._rule.hold_seconds, stall.limit_seconds):
                reason = f"run {run} has made no step for {stall.waited_seconds:.0f} s"
                yield Finding(run, found.stalled_ranks, reason, run)


class Xid(Condition):
    """The driver has reported an error of a GPU; the finding holds for a minute."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._seen: dict[tuple[str, str], float] = {}
        self._shown: dict[tuple[str, str], float] = {}

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        """Yield the ranks on GPUs with new errors."""
        wanted = {str(number) for number in self._rule.xids}
        for labels, value in inputs.series("torchperfd_gpu_xid_errors_total"):
            key = labels["gpu_uuid"], labels["xid"]
            if labels["xid"] in wanted and value > self._seen.get(key, 0.0):
                self._shown[key] = inputs.now
            self._seen[key] = value
        owners = inputs.owners() if self._shown else {}
        for (uuid, xid), at in list(self._shown.items()):
            if inputs.now - at > _XID_SHOWN_S:
                del self._shown[uuid, xid]
                continue
            for run, rank in owners.get(uuid, [("", -1)]):
                whose = f" of rank {rank}, run {run}" if run else ", which no rank uses"
                yield Finding(
                    run,
                    (rank,) if run else (),
                    f"the driver reports XID {xid} on GPU {uuid}{whose}",
                    f"{uuid} {xid} {run} {rank}",
                )


class GpuMemoryNearFull(Condition):
    """Nearly all memory of a GPU is in use."""

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        """Yield the ranks on GPUs that are nearly full."""
        totals = {
            labels["gpu_uuid"]: value for labels, value in inputs.series("torchperfd_gpu_memory_total_bytes")
        }
        for labels, used in inputs.series("torchperfd_gpu_memory_used_bytes"):
            total = totals.get(labels["gpu_uuid"], 0.0)
            if not total or used / total <= self._above:
                continue
            for run, rank in inputs.owners().get(labels["gpu_uuid"], []):
                reason = f"GPU {labels['gpu']} of rank {rank}, run {run} is {used / total:.1%} full"
                yield Finding(run, (rank,), reason, f"{run} {rank}")


class MetricBound(Condition):
    """A series of the metrics page is beyond a bound; for a counter, its rate per second is compared."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._counts: dict[tuple[tuple[str, str], ...], deque[tuple[float, float]]] = {}

    def evaluate(self, inputs: ConditionInputs) -> Iterator[Finding]:
        """Yield the runs and ranks of each series beyond the bound."""
        rule = self._rule
        known, self._counts = self._counts, {}
        for labels, value in inputs.series(rule.metric)[:_MAX_SERIES]:
            if any(labels.get(name) != text for name, text in rule.labels):
                continue
            number: float | None = value
            if rule.metric.endswith("_total"):
                key = tuple(sorted(labels.items()))
                self._counts[key] = known.get(key) or deque()
                number = _rate(self._counts[key], inputs.now, value)
            if number is None or not self._beyond(number):
                continue
            labels_text = ", ".join(f"{name}={text}" for name, text in sorted(labels.items()))
            reason = f"{rule.metric}{{{labels_text}}} is {number:.4g}"
            for run, ranks in _concerned(labels, inputs):
                yield Finding(run, ranks, reason, f"{labels_text} {run} {ranks}")

    def _beyond(self, number: float) -> bool:
        rule = self._rule
        return (rule.above is not None and number > rule.above) or (
            rule.below is not None and number < rule.below
        )


def _change(values: deque[float]) -> tuple[float, float] | None:
    """Return the medians of the earlier and the newest values; None while there are too few."""
    if len(values) < _RECENT_VALUES + _MIN_PAST_VALUES:
        return None
    stream = list(values)
    past, recent = stream[:-_RECENT_VALUES], stream[-_RECENT_VALUES:]
    return median(past), median(recent)


def _rate(counts: deque[tuple[float, float]], now: float, value: float) -> float | None:
    """Return a counter's rate per second over the last ten seconds; None while that is unknown."""
    if counts and value < counts[-1][1]:
        counts.clear()
    counts.append((now, value))
    while len(counts) > 2 and now - counts[1][0] >= _RATE_S:
        counts.popleft()
    began, before = counts[0]
    return (value - before) / (now - began) if now - began >= _RATE_S else None


def _concerned(labels: Mapping[str, str], inputs: ConditionInputs) -> list[tuple[str, tuple[int, ...]]]:
    """Return the runs and ranks of a series; a series of the node belongs to all runs."""
    if "run" in labels:
        return [(labels["run"], (int(labels["rank"]),) if "rank" in labels else ())]
    if "gpu_uuid" in labels:
        return [(run, (rank,)) for run, rank in inputs.owners().get(labels["gpu_uuid"], [])]
    return [(run, ()) for run in inputs.runs]
