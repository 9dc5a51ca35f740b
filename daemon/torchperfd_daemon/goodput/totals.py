"""The goodput totals of one rank, and their summary by rank and run. Pure, without I/O.

Every nanosecond of a rank's time is in exactly one bucket. Time is settled in order. Time before the
*frontier* is in its final bucket. Time from the frontier to the latest observation is open: it counts for the
bucket of the rank's present state until a report of the process moves the frontier. So the buckets always sum
to the covered time, and never shrink.

All times are nanoseconds of one clock that the caller chooses, and that should not go back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

import msgspec

from torchperfd_daemon.diagnosis.detect.straggler import limit_seconds
from torchperfd_daemon.store.model import State

# Bounded by the int32 fields of the messages that carry it.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Bucket(Enum):
    """A use of a rank's time."""

    START_UP = "start_up"
    PRODUCTIVE = "productive"
    DATA_WAIT = "data_wait"
    COMMUNICATION_WAIT = "communication_wait"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    STALL = "stall"
    RESTART_GAP = "restart_gap"
    SHUTDOWN = "shutdown"


_OPEN_BUCKETS: Final = {
    State.STARTING: Bucket.START_UP,
    State.TRAINING: Bucket.PRODUCTIVE,
    State.VALIDATING: Bucket.VALIDATION,
    State.CHECKPOINTING: Bucket.CHECKPOINT,
    State.FINISHED: Bucket.SHUTDOWN,
}


@dataclass(frozen=True, slots=True)
class Claims:
    """The time that a process reports since its loop began, in nanoseconds that do not overlap.

    Attributes:
        loop: An id that distinguishes the loops of one process.
        warmup_ns: The time of the first step.
    """

    loop: int = 0
    steps: int = 0
    step_ns: int = 0
    warmup_ns: int = 0
    productive: int = 0
    data_wait: int = 0
    communication_wait: int = 0
    validation: int = 0
    checkpoint: int = 0

    def amounts(self) -> dict[Bucket, int]:
        return {
            Bucket.PRODUCTIVE: self.productive,
            Bucket.DATA_WAIT: self.data_wait,
            Bucket.COMMUNICATION_WAIT: self.communication_wait,
            Bucket.VALIDATION: self.validation,
            Bucket.CHECKPOINT: self.checkpoint,
        }


@dataclass(slots=True)
class GoodputTotals:
    """One rank of one run, over all its processes.

    Attributes:
        process: The id of the newest process.
        first_ns: When the first process started.
        frontier_ns: All time before this is settled.
        seen_ns: When the newest process was last observed alive.
        progress_ns: When it last made progress, as far as reported.
        gpus: The number of GPUs that the rank uses; 0 if unknown.
        before: The state before the present one.
        claims: The newest claims of the process.
        longest_ns: The longest training step that was not a stall, without the first step of each process.
        stalled: Whether the time since the last progress is settled as a stall.
        settled: Nanoseconds by bucket, up to the frontier.
    """

    process: str
    first_ns: int
    frontier_ns: int
    seen_ns: int
    progress_ns: int
    starts: _Count = 1
    gpus: _Count = 0
    state: State = State.STARTING
    before: State = State.STARTING
    claims: Claims = field(default_factory=Claims)
    longest_ns: int = 0
    stalled: bool = False
    settled: dict[Bucket, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, process: str, started_ns: int) -> "GoodputTotals":
        """Return the totals of a rank whose first process started at ``started_ns``."""
        return cls(process, started_ns, started_ns, started_ns, started_ns)

    @property
    def present(self) -> Bucket:
        """The bucket of the open time."""
        return Bucket.STALL if self.stalled and self.state is State.TRAINING else _OPEN_BUCKETS[self.state]

    @property
    def until_ns(self) -> int:
        """The end of the covered time; :meth:`buckets` sum to the time from ``first_ns`` to this."""
        return max(self.frontier_ns, self.seen_ns)

    @property
    def limit_ns(self) -> int:
        """The longest time without progress during training that is not a stall."""
        # The process reports sums, not single steps: the longest mean replaces the usual step time.
        return int(limit_seconds((self.longest_ns or self.claims.warmup_ns) / 1e9) * 1e9)

    def buckets(self) -> dict[Bucket, int]:
        """Return all covered time by bucket, with the open time in the bucket of the present state."""
        found = {bucket: self.settled.get(bucket, 0) for bucket in Bucket}
        found[self.present] += self.until_ns - self.frontier_ns
        return found

    def start(self, process: str, started_ns: int, now_ns: int) -> None:
        """Record that a process connected as this rank: the known one again, or a new one.

        The time between two processes is the restart gap.
        """
        if process == self.process:
            # Its next report shows how it spent the time during which it was not connected.
            self.before = self.state
            self.progress_ns = max(self.frontier_ns, now_ns)
            self.stalled = False
            return
        self.end(min(self.seen_ns, max(started_ns, self.frontier_ns)))
        self._settle(Bucket.RESTART_GAP, min(started_ns, now_ns))
        self.process = process
        self.starts += 1
        self.state = self.before = State.STARTING
        self.claims = Claims()
        self.stalled = False
        self.progress_ns = self.seen_ns = self.frontier_ns

    def add_claims(self, now_ns: int, claims: Claims, began_ns: int, ended_ns: int) -> None:
        """Add the newest claims of the process.

        The time before its loop is start-up. The time between its steps and checkpoints is the script's own
        work: it is productive, or a stall if it is longer than :attr:`limit_ns`.

        Args:
            now_ns: When the claims arrived.
            claims: The sums since the loop began, not since the last call.
            began_ns: When its first step began.
            ended_ns: When its newest step ended.
        """
        claimed = claims.amounts()
        if not any(claimed.values()):
            return
        known = self.claims.amounts()
        if claims.loop != self.claims.loop or claims.steps < self.claims.steps or not any(known.values()):
            self._settle(Bucket.START_UP, min(began_ns, now_ns - sum(claimed.values())))
            self.claims = Claims()
            known = self.claims.amounts()
        new = {bucket: max(0, ns - known[bucket]) for bucket, ns in claimed.items()}
        if not any(new.values()):
            return
        limit_ns = self.limit_ns
        self._learn(claims)
        self.claims = claims
        for bucket, ns in _within(new, max(0, now_ns - self.frontier_ns)).items():
            self._settle(bucket, self.frontier_ns + ns)
        ended_ns = min(ended_ns, now_ns)
        gap_ns = ended_ns - self.frontier_ns
        self._settle(Bucket.STALL if gap_ns > limit_ns else Bucket.PRODUCTIVE, ended_ns)
        self.progress_ns = self.frontier_ns
        self.stalled = False

    def watch(self, now_ns: int, state: State, *, excused: bool = False) -> None:
        """Record that the process is alive and its state, and whether it has stalled.

        Args:
            now_ns: When this was observed.
            excused: Another rank validates or saves, so waiting until now is not a stall.
        """
        now_ns = max(now_ns, self.seen_ns)
        self.seen_ns = now_ns
        # A process that connects again reports its state a moment later; until then STARTING is wrong.
        if state is not self.state and state is not State.STARTING:
            self.before, self.state = self.state, state
            self.progress_ns = max(self.frontier_ns, now_ns)
            self.stalled = False
        if self.state is not State.TRAINING:
            return
        if excused and not self.stalled:
            self.progress_ns = max(self.progress_ns, now_ns)
        if now_ns - self.progress_ns > self.limit_ns:
            paused = self.before in (State.VALIDATING, State.CHECKPOINTING)
            self._settle(_OPEN_BUCKETS[self.before] if paused else Bucket.STALL, self.progress_ns)
            self.stalled = True
        if self.stalled:
            self._settle(Bucket.STALL, now_ns)

    def end(self, at_ns: int) -> None:
        """Settle the open time, since the process ended at ``at_ns``."""
        self._settle(self.present, at_ns)
        self.seen_ns = self.frontier_ns

    def _settle(self, bucket: Bucket, until_ns: int) -> None:
        """Move the frontier forward to ``until_ns``, and add the time in between to a bucket."""
        if until_ns > self.frontier_ns:
            self.settled[bucket] = self.settled.get(bucket, 0) + until_ns - self.frontier_ns
            self.frontier_ns = until_ns

    def _learn(self, claims: Claims) -> None:
        """Update the longest step; of several steps in one report only the mean is known."""
        steps, ns = claims.steps - self.claims.steps, claims.step_ns - self.claims.step_ns
        if not self.claims.steps:
            steps, ns = steps - 1, ns - claims.warmup_ns
        if steps > 0 and not self.stalled:
            self.longest_ns = max(self.longest_ns, ns // steps)


def _within(amounts: dict[Bucket, int], room_ns: int) -> dict[Bucket, int]:
    """Reduce amounts, the largest first, until their sum is at most ``room_ns``.

    Claims exceed the room if part of their time is settled already. The usual reason is a step that hung: the
    stall is known before the step ends. The phase that hung is the largest.
    """
    cut = dict(amounts)
    excess_ns = sum(cut.values()) - room_ns
    for bucket in sorted(cut, key=cut.__getitem__, reverse=True):
        if excess_ns <= 0:
            break
        taken_ns = min(excess_ns, cut[bucket])
        cut[bucket] -= taken_ns
        excess_ns -= taken_ns
    return cut


@dataclass(frozen=True, slots=True)
class RankGoodput:
    """One rank.

    Attributes:
        since_unix_seconds: When its first process started.
        until_unix_seconds: The end of the covered time.
        gpus: The number of its GPUs; 0 if none is known.
        seconds: By bucket; their sum is the time from ``since`` to ``until``.
    """

    rank: int
    since_unix_seconds: float
    until_unix_seconds: float
    starts: int
    gpus: int
    running: bool
    seconds: Mapping[Bucket, float]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The productive share of the time; 0 if there is no time."""
        return ratio_of(self.seconds)


@dataclass(frozen=True, slots=True)
class RunGoodput:
    """All ranks of one run that were on this node."""

    run: str
    ranks: Sequence[RankGoodput]

    @property
    def seconds(self) -> dict[Bucket, float]:
        return {bucket: sum(rank.seconds[bucket] for rank in self.ranks) for bucket in Bucket}

    @property
    def total_seconds(self) -> float:
        return sum(rank.total_seconds for rank in self.ranks)

    @property
    def ratio(self) -> float:
        """The goodput: the productive share of all rank-seconds; 0 if there are none."""
        return ratio_of(self.seconds)

    @property
    def gpu_hours(self) -> dict[Bucket, float] | None:
        """GPU hours by bucket; None if no rank is known to use a GPU."""
        if not any(rank.gpus for rank in self.ranks):
            return None
        return {
            bucket: sum(rank.gpus * rank.seconds[bucket] for rank in self.ranks) / 3600 for bucket in Bucket
        }

    @property
    def since_unix_seconds(self) -> float:
        """When its first rank started."""
        return min(rank.since_unix_seconds for rank in self.ranks)

    @property
    def until_unix_seconds(self) -> float:
        """The latest time that is covered for any rank."""
        return max(rank.until_unix_seconds for rank in self.ranks)

    @property
    def restarts(self) -> int:
        """The largest number of restarts of any rank."""
        return max(rank.starts for rank in self.ranks) - 1


def by_run(ranks: Iterable[tuple[str, RankGoodput]]) -> list[RunGoodput]:
    """Group ranks by run, in the order of rank, starting with the run that was active last."""
    runs: dict[str, list[RankGoodput]] = {}
    for run, rank in ranks:
        runs.setdefault(run, []).append(rank)
    found = [RunGoodput(run, sorted(each, key=lambda rank: rank.rank)) for run, each in runs.items()]
    return sorted(found, key=lambda run: (-run.until_unix_seconds, run.run))


def ratio_of(seconds: Mapping[Bucket, float]) -> float:
    """Return the productive share of rank-seconds; 0 if there are none."""
    total = sum(seconds.values())
    return seconds[Bucket.PRODUCTIVE] / total if total else 0.0
