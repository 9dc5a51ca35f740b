"""Conditions: what holds now, of what rules wait for. One class each; they keep what they need of the past.

Whatever compares with the past compares medians, and wants the difference to be larger than both the
rule's bound and five robust standard deviations of the past: noise alone fires nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

from torchperfd_daemon.store import HISTOGRAM_BOUNDS_S, Histogram, State
from torchperfd_daemon.triggers.pace import KEPT, RECENT, Pace, spread
from torchperfd_daemon.triggers.rules import Rule, When
from torchperfd_daemon.triggers.scene import Scene

_LEAST_PAST: Final = 30
_LEAST_OWN: Final = 5
_OWN_LOOKS: Final = 30
_SIGMAS: Final = 5.0
_STALL_FACTOR: Final = 8.0
_STALL_QUANTILE: Final = 0.999
_XID_SHOWN_S: Final = 60.0
_BUSY_GPU: Final = 0.2
_RATE_S: Final = 10.0
_MOST_SERIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """Something holds, of a run.

    Attributes:
        run: Empty when no run is concerned.
        ranks: The culprits; empty when there is none in particular.
        reason: One sentence for the log.
        key: Tells this finding from others of the same rule.
    """

    run: str
    ranks: tuple[int, ...]
    reason: str
    key: str


class Condition(Protocol):
    """Looks once a second."""

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield all that holds now."""


def condition_of(rule: Rule) -> Condition:
    """Return the condition that a rule waits for, with no past."""
    makers: dict[When, type[_RuleCondition]] = {
        When.STEP_TIME_REGRESSION: StepTimeRegression,
        When.STRAGGLER: Straggler,
        When.GPU_UTILISATION_DROP: GpuUtilisationDrop,
        When.STALL: Stall,
        When.XID: Xid,
        When.GPU_MEMORY_NEAR_FULL: GpuMemoryNearFull,
        When.METRIC: MetricBound,
    }
    return makers[rule.when](rule)


class _RuleCondition:
    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._above = rule.above or 0.0
        self._below = rule.below or 0.0

    def look(self, scene: Scene) -> Iterator[Finding]:
        raise NotImplementedError


class StepTimeRegression(_RuleCondition):
    """Most ranks of a run take longer for a step than they did. The culprit lost most in its own work."""

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield the runs that have become slow."""
        for run, paces in scene.runs().items():
            changes = [change for pace in paces if (change := _change(pace.step_seconds()))]
            slow = [change for change in changes if self._slow(change)]
            if not slow or 2 * len(slow) < len(paces):
                continue
            culprit = max(paces, key=_own_loss).rank.identity.rank
            before, recent = median(c.before for c in slow), median(c.recent for c in slow)
            yield Finding(
                run,
                (culprit,),
                f"a step of run {run} takes {recent:.3g} s, {recent / before - 1:.0%} more than before",
                run,
            )

    def _slow(self, change: "_Change") -> bool:
        bound = max(change.before * self._above, _SIGMAS * change.noise)
        return change.recent - change.before > bound


class Straggler(_RuleCondition):
    """One rank's own work takes longer than that of its peers on this node."""

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield each rank that is slower than the median of the others."""
        for run, paces in scene.runs().items():
            own = {
                pace.rank.identity.rank: median(pace.own_seconds()[-_OWN_LOOKS:])
                for pace in paces
                if len(pace.looked) >= _LEAST_OWN and pace.rank.state is State.TRAINING
            }
            for rank, seconds in own.items():
                peers = [other for peer, other in own.items() if peer != rank]
                if not peers:
                    continue
                usual = median(peers)
                bound = max(usual * self._above, _SIGMAS * spread(peers))
                if seconds - usual > bound:
                    reason = f"rank {rank} of run {run} works {seconds:.3g} s a step, its peers {usual:.3g} s"
                    yield Finding(run, (rank,), reason, f"{run} {rank}")


class GpuUtilisationDrop(_RuleCondition):
    """A GPU that was busy with training is so no more, although its rank does nothing else."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._past: dict[str, deque[float]] = {}

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield each rank whose GPU has become idle."""
        owners = scene.owners()
        known, self._past = self._past, {}
        for labels, value in scene.series("torchperfd_gpu_utilization_ratio"):
            uuid = labels["gpu_uuid"]
            past = self._past[uuid] = known.get(uuid) or deque(maxlen=KEPT)
            training = [owner for owner in owners.get(uuid, []) if scene.training(*owner)]
            if not training:
                continue
            past.append(value)
            change = _change(past)
            if change is None or change.before < _BUSY_GPU:
                continue
            if change.recent < change.before * self._below:
                for run, rank in training:
                    reason = (
                        f"GPU {labels['gpu']} of rank {rank}, run {run} is used {change.recent:.0%},"
                        f" it was {change.before:.0%}"
                    )
                    yield Finding(run, (rank,), reason, f"{run} {rank}")


class Stall(_RuleCondition):
    """A rank that should train makes no step, for longer than steps ever take."""

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield the runs that stand still."""
        for run, paces in scene.runs().items():
            histogram = scene.histograms.get(run)
            if histogram is None:
                continue
            limit = max(self._rule.hold_seconds, _STALL_FACTOR * longest_step_seconds(histogram))
            still = [pace for pace in paces if _trains(pace) and scene.now - pace.moved_at > limit]
            if still:
                silent = scene.now - min(pace.moved_at for pace in still)
                ranks = tuple(pace.rank.identity.rank for pace in still)
                yield Finding(run, ranks, f"run {run} has made no step for {silent:.0f} s", run)


class Xid(_RuleCondition):
    """The driver has reported an error of a GPU; it holds for a minute."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._seen: dict[tuple[str, str], float] = {}
        self._shown: dict[tuple[str, str], float] = {}

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield the ranks on GPUs with new errors."""
        wanted = {str(number) for number in self._rule.xids}
        for labels, value in scene.series("torchperfd_gpu_xid_errors_total"):
            key = labels["gpu_uuid"], labels["xid"]
            if labels["xid"] in wanted and value > self._seen.get(key, 0.0):
                self._shown[key] = scene.now
            self._seen[key] = value
        owners = scene.owners() if self._shown else {}
        for (uuid, xid), at in list(self._shown.items()):
            if scene.now - at > _XID_SHOWN_S:
                del self._shown[uuid, xid]
                continue
            for run, rank in owners.get(uuid, [("", -1)]):
                whose = f" of rank {rank}, run {run}" if run else ", on which no rank is"
                yield Finding(
                    run,
                    (rank,) if run else (),
                    f"the driver reports XID {xid} on GPU {uuid}{whose}",
                    f"{uuid} {xid} {run} {rank}",
                )


class GpuMemoryNearFull(_RuleCondition):
    """Nearly all memory of a GPU is taken."""

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield the ranks on GPUs that are nearly full."""
        totals = {
            labels["gpu_uuid"]: value for labels, value in scene.series("torchperfd_gpu_memory_total_bytes")
        }
        for labels, used in scene.series("torchperfd_gpu_memory_used_bytes"):
            total = totals.get(labels["gpu_uuid"], 0.0)
            if not total or used / total <= self._above:
                continue
            for run, rank in scene.owners().get(labels["gpu_uuid"], []):
                reason = f"GPU {labels['gpu']} of rank {rank}, run {run} is {used / total:.1%} full"
                yield Finding(run, (rank,), reason, f"{run} {rank}")


class MetricBound(_RuleCondition):
    """A series of the metrics page is beyond a bound; of a counter it is the rate per second."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self._counts: dict[tuple[tuple[str, str], ...], deque[tuple[float, float]]] = {}

    def look(self, scene: Scene) -> Iterator[Finding]:
        """Yield what each series beyond the bound is about."""
        rule = self._rule
        known, self._counts = self._counts, {}
        for labels, value in scene.series(rule.metric)[:_MOST_SERIES]:
            if any(labels.get(name) != text for name, text in rule.labels):
                continue
            number: float | None = value
            if rule.metric.endswith("_total"):
                key = tuple(sorted(labels.items()))
                self._counts[key] = known.get(key) or deque()
                number = _rate(self._counts[key], scene.now, value)
            if number is None or not self._beyond(number):
                continue
            told = ", ".join(f"{name}={text}" for name, text in sorted(labels.items()))
            reason = f"{rule.metric}{{{told}}} is {number:.4g}"
            for run, ranks in _concerned(labels, scene):
                yield Finding(run, ranks, reason, f"{told} {run} {ranks}")

    def _beyond(self, number: float) -> bool:
        rule = self._rule
        return (rule.above is not None and number > rule.above) or (
            rule.below is not None and number < rule.below
        )


def longest_step_seconds(histogram: Histogram) -> float:
    """Return the bound that 99.9 % of a run's steps keep to, in seconds; 0 when there were none.

    It is the upper bound of the bucket that holds the quantile, so it errs towards the longer side. Beyond
    the last bound it is one and a half times the mean of the steps there, or the least that this can be when
    every other step took all that its bucket allows.
    """
    total = sum(histogram.counts)
    if not total:
        return 0.0
    running, most_seconds = 0, 0.0
    for bound, count in zip(HISTOGRAM_BOUNDS_S, histogram.counts, strict=False):
        running += count
        most_seconds += count * bound
        if running >= _STALL_QUANTILE * total:
            return bound
    return 1.5 * max(HISTOGRAM_BOUNDS_S[-1], (histogram.sum_seconds - most_seconds) / (total - running))


@dataclass(frozen=True, slots=True)
class _Change:
    """A stream's median before, its noise then, and its median now."""

    before: float
    noise: float
    recent: float


def _change(values: "list[float] | deque[float]") -> _Change | None:
    """Return how the newest values differ from those before; None while there are too few."""
    if len(values) < RECENT + _LEAST_PAST:
        return None
    stream = list(values)
    past, recent = stream[:-RECENT], stream[-RECENT:]
    return _Change(median(past), spread(past), median(recent))


def _own_loss(pace: Pace) -> float:
    """Return by how many seconds a rank's own work of a step has grown."""
    change = _change(pace.own_seconds())
    return change.recent - change.before if change else 0.0


def _trains(pace: Pace) -> bool:
    return pace.rank.state is State.TRAINING and pace.rank.totals.train.steps > 0


def _rate(counts: deque[tuple[float, float]], now: float, value: float) -> float | None:
    """Return a counter's growth per second over the last ten; None while that is not known."""
    if counts and value < counts[-1][1]:
        counts.clear()
    counts.append((now, value))
    while len(counts) > 2 and now - counts[1][0] >= _RATE_S:
        counts.popleft()
    began, before = counts[0]
    return (value - before) / (now - began) if now - began >= _RATE_S else None


def _concerned(labels: Mapping[str, str], scene: Scene) -> list[tuple[str, tuple[int, ...]]]:
    """Return the runs and ranks that a series is about; a series of the node is about all runs."""
    if "run" in labels:
        return [(labels["run"], (int(labels["rank"]),) if "rank" in labels else ())]
    if "gpu_uuid" in labels:
        return [(run, (rank,)) for run, rank in scene.owners().get(labels["gpu_uuid"], [])]
    return [(run, ()) for run in scene.runs()]
