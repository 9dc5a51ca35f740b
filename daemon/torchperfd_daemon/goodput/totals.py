"""The ledger of one rank: every nanosecond of it in exactly one bucket. Pure: told what happened, it adds up.

Time is settled in order. Up to the *frontier* all of it is in buckets for good; from there on to the last
sign of life it is open, and belongs for now to what the rank says it is doing. A report of the process moves
the frontier on. So the buckets sum to the covered time whatever is reported, and never shrink.

All times are nanoseconds of one clock that the caller chooses, and that ought not to go back.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

import msgspec

from torchperfd_daemon.diagnosis.detect.stall import limit_seconds
from torchperfd_daemon.store import State

# Bounded, as the messages that show it are.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Bucket(Enum):
    """What a rank's time went to."""

    START_UP = "start_up"
    PRODUCTIVE = "productive"
    DATA_WAIT = "data_wait"
    COMMUNICATION_WAIT = "communication_wait"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    STALL = "stall"
    RESTART_GAP = "restart_gap"
    SHUTDOWN = "shutdown"


_OPEN: Final = {
    State.STARTING: Bucket.START_UP,
    State.TRAINING: Bucket.PRODUCTIVE,
    State.VALIDATING: Bucket.VALIDATION,
    State.CHECKPOINTING: Bucket.CHECKPOINT,
    State.FINISHED: Bucket.SHUTDOWN,
}


@dataclass(frozen=True, slots=True)
class Claims:
    """What a process says its loop's time went to, since the loop began; nanoseconds that do not overlap.

    Attributes:
        loop: Tells the loops of one process apart.
        steps: Training steps.
        step_ns: Their time.
        warmup_ns: That of the first of them.
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
        """Return the time claimed, by bucket."""
        return {
            Bucket.PRODUCTIVE: self.productive,
            Bucket.DATA_WAIT: self.data_wait,
            Bucket.COMMUNICATION_WAIT: self.communication_wait,
            Bucket.VALIDATION: self.validation,
            Bucket.CHECKPOINT: self.checkpoint,
        }


@dataclass(slots=True)
class GoodputTotals:
    """One rank of one run, through all its processes.

    Attributes:
        process: The newest one.
        first_ns: When the first one started.
        frontier_ns: Up to here all time is settled.
        seen_ns: The newest process's last sign of life.
        progress_ns: Since when nothing has been heard of progress.
        starts: How many processes there were.
        gpus: That the rank uses, as far as is known.
        state: What the rank is doing.
        before: What it did before that.
        told: The newest claims.
        longest_ns: The longest training step that was no stall, the first of a process left out.
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
    told: Claims = field(default_factory=Claims)
    longest_ns: int = 0
    stalled: bool = False
    settled: dict[Bucket, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, process: str, started_ns: int) -> "GoodputTotals":
        """Open the ledger of a rank whose first process started then."""
        return cls(process, started_ns, started_ns, started_ns, started_ns)

    @property
    def present(self) -> Bucket:
        """The bucket that open time belongs to."""
        return Bucket.STALL if self.stalled and self.state is State.TRAINING else _OPEN[self.state]

    @property
    def until_ns(self) -> int:
        """Up to when time is covered; :meth:`buckets` sum to what lies between ``first_ns`` and this."""
        return max(self.frontier_ns, self.seen_ns)

    @property
    def limit_ns(self) -> int:
        """How long a rank that trains may make no progress before it counts as stalled."""
        # The totals of a process hold no single steps: the longest mean stands for what steps usually take.
        return int(limit_seconds((self.longest_ns or self.told.warmup_ns) / 1e9) * 1e9)

    def buckets(self) -> dict[Bucket, int]:
        """Return all covered time by bucket; what is open is in that of the present state."""
        found = {bucket: self.settled.get(bucket, 0) for bucket in Bucket}
        found[self.present] += self.until_ns - self.frontier_ns
        return found

    def start(self, process: str, started_ns: int, now_ns: int) -> None:
        """Take a process that has joined as this rank: the known one that is back, or the next.

        The time between two processes is the restart gap.
        """
        if process == self.process:
            # Of what it did while nobody listened nothing is known but what it will tell.
            self.before = self.state
            self.progress_ns = max(self.frontier_ns, now_ns)
            self.stalled = False
            return
        self.end(min(self.seen_ns, max(started_ns, self.frontier_ns)))
        self._settle(Bucket.RESTART_GAP, min(started_ns, now_ns))
        self.process = process
        self.starts += 1
        self.state = self.before = State.STARTING
        self.told = Claims()
        self.stalled = False
        self.progress_ns = self.seen_ns = self.frontier_ns

    def tell(self, now_ns: int, claims: Claims, began_ns: int, ended_ns: int) -> None:
        """Take the newest claims of the process.

        What lies before its loop is start-up. Between its steps and saves lies the script's own work, which
        counts as productive, or a stall where it is as long as one.

        Args:
            now_ns: The process had this to say no later.
            claims: All of them, not those since the last time.
            began_ns: When its first step began.
            ended_ns: When its newest step ended.
        """
        claimed = claims.amounts()
        if not any(claimed.values()):
            return
        known = self.told.amounts()
        if claims.loop != self.told.loop or claims.steps < self.told.steps or not any(known.values()):
            self._settle(Bucket.START_UP, min(began_ns, now_ns - sum(claimed.values())))
            self.told = Claims()
            known = self.told.amounts()
        new = {bucket: max(0, ns - known[bucket]) for bucket, ns in claimed.items()}
        if not any(new.values()):
            return
        limit_ns = self.limit_ns
        self._learn(claims)
        self.told = claims
        for bucket, ns in _within(new, max(0, now_ns - self.frontier_ns)).items():
            self._settle(bucket, self.frontier_ns + ns)
        ended_ns = min(ended_ns, now_ns)
        gap_ns = ended_ns - self.frontier_ns
        self._settle(Bucket.STALL if gap_ns > limit_ns else Bucket.PRODUCTIVE, ended_ns)
        self.progress_ns = self.frontier_ns
        self.stalled = False

    def watch(self, now_ns: int, state: State, *, excused: bool = False) -> None:
        """Take that the process lives and what it does; one that trains without a step for long has stalled.

        Args:
            now_ns: When that was so.
            state: What it does.
            excused: It may be waiting for another rank that validates or saves: no stall up to now.
        """
        now_ns = max(now_ns, self.seen_ns)
        self.seen_ns = now_ns
        # Whoever has connected again says a moment later what it does; nobody starts twice.
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
            self._settle(_OPEN[self.before] if paused else Bucket.STALL, self.progress_ns)
            self.stalled = True
        if self.stalled:
            self._settle(Bucket.STALL, now_ns)

    def end(self, at_ns: int) -> None:
        """Settle what is open: the process was gone by then."""
        self._settle(self.present, at_ns)
        self.seen_ns = self.frontier_ns

    def _settle(self, bucket: Bucket, until_ns: int) -> None:
        """Move the frontier on; never back."""
        if until_ns > self.frontier_ns:
            self.settled[bucket] = self.settled.get(bucket, 0) + until_ns - self.frontier_ns
            self.frontier_ns = until_ns

    def _learn(self, claims: Claims) -> None:
        """Keep the longest step; of several that were reported at once only the mean is known."""
        steps, ns = claims.steps - self.told.steps, claims.step_ns - self.told.step_ns
        if not self.told.steps:
            steps, ns = steps - 1, ns - claims.warmup_ns
        if steps > 0 and not self.stalled:
            self.longest_ns = max(self.longest_ns, ns // steps)


def _within(amounts: dict[Bucket, int], room_ns: int) -> dict[Bucket, int]:
    """Cut amounts, the largest first, so that they sum to no more than there is room for.

    Claims exceed it where part of their time is settled already: most often a step that hung, of which the
    stall is known before the step is. The phase that hung is the largest.
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
