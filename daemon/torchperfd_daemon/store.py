"""The store: what every rank on this node has done, in fixed memory per rank.

Totals come from the clients' cumulative accounts, so a lost batch loses no time;
batches feed the recent history and the step-time histogram.
"""

import itertools
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import itemgetter
from typing import Final

import numpy as np

from torchperfd_daemon.loader_workers import LoaderFacts

HISTORY_STEPS: Final = 256
HISTOGRAM_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_BOUNDS: Final = np.array(HISTOGRAM_BOUNDS_S)
_MAX_PHASES: Final = 32


class State(Enum):
    """What a rank is doing."""

    STARTING = "starting"
    TRAINING = "training"
    VALIDATING = "validating"
    CHECKPOINTING = "checkpointing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Who a training process is; see the message of the same name."""

    run: str
    rank: int
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    job_name: str = ""
    node: str = ""
    pid_namespace: int = 0
    pid: int = 0
    process_start_ticks: int = 0
    script: str = ""
    torch_version: str = ""
    python_version: str = ""
    slurm_job_id: str = ""
    pod_uid: str = ""

    @property
    def is_simulated(self) -> bool:
        """Whether there is no such process, as with the ranks of ``torchperfd serve --demo``."""
        return self.pid == 0


@dataclass(frozen=True, slots=True)
class PhaseTotal:
    """One phase since attach: calls, exclusive nanoseconds, sum of their squares per call.

    ``device_ns`` is of the ``device_calls`` that were timed on the device.
    """

    calls: int = 0
    ns: int = 0
    squares: float = 0.0
    device_ns: int = 0
    device_calls: int = 0


@dataclass(frozen=True, slots=True)
class KindTotal:
    """All steps of one kind since attach; what is not known of them is 0."""

    steps: int = 0
    ns: int = 0
    samples: int = 0
    phases: dict[str, PhaseTotal] = field(default_factory=dict)
    squares: float = 0.0
    micro_batches: int = 0
    skipped: int = 0
    tokens: int = 0

    def mean_seconds(self, without: "KindTotal") -> tuple[int, float, dict[str, float]]:
        """Return how many steps there are, the mean step and the mean of each phase, without some of them."""
        steps = self.steps - without.steps
        if steps <= 0:
            return 0, 0.0, {}
        nothing = PhaseTotal()
        phases = {
            name: (total.ns - without.phases.get(name, nothing).ns) / steps / 1e9
            for name, total in self.phases.items()
        }
        return steps, (self.ns - without.ns) / steps / 1e9, phases


@dataclass(frozen=True, slots=True)
class GcTotal:
    """Collections of one generation of Python's garbage collector from the first step to the newest."""

    calls: int
    ns: int


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Bytes that the caching allocator of a rank's device holds."""

    allocated: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True)
class Totals:
    """A rank's cumulative account; see the message ``Account``.

    What an older client does not tell, or this one does not know, is None, empty or 0.
    """

    train: KindTotal = KindTotal()
    validate: KindTotal = KindTotal()
    recorded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    warmup: KindTotal = KindTotal()
    checkpoint: PhaseTotal | None = None
    gc: tuple[GcTotal, ...] = ()
    compiled: PhaseTotal | None = None
    loader_ready: int | None = None
    cuda: CudaMemory | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    overhead: float | None = None
    shed: int = 0
    epoch: PhaseTotal = PhaseTotal()
    train_pass: PhaseTotal = PhaseTotal()
    validate_pass: PhaseTotal = PhaseTotal()
    began_ns: int = 0
    ended_ns: int = 0
    loader: LoaderFacts | None = None

    def steady_means(self) -> tuple[int, float, dict[str, float]]:
        """Return how many training steps means are made of, the mean step and each phase's mean in seconds.

        These are the steps after the first, as in the client's report; the first while it is the only one.
        """
        return self.train.mean_seconds(self.warmup if self.train.steps > 1 else KindTotal())


@dataclass(frozen=True, slots=True)
class ArrivalColumns:
    """Training steps that had a collective: index, and when the rank came to the first and to the last."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    first_unix_ns: "array[int]" = field(default_factory=lambda: array("q"))
    last_unix_ns: "array[int]" = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Consecutive training steps: one array per column, nanoseconds, all of one length.

    ``arrivals`` has a length of its own: that of the steps with a collective.
    """

    end_unix_ns: "array[int]"
    duration_ns: "array[int]"
    phases: dict[str, "array[int]"]
    arrivals: ArrivalColumns = field(default_factory=ArrivalColumns)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a rank came to a step's first and last collective: Unix nanoseconds, by its node's clock."""

    first_unix_ns: int
    last_unix_ns: int


def _filled(count: int, value: int = 0) -> "array[int]":
    """Return an array that holds a value so many times, and has no room for more: made of bytes it would."""
    return array("q", (value,)) * count


class ArrivalHistory:
    """Of the newest steps of one rank that had a collective, when it came there."""

    def __init__(self, capacity: int = HISTORY_STEPS) -> None:
        self._capacity = capacity
        # Step, first, last; made with the first arrival, since many a rank has none.
        self._rings: tuple[array[int], array[int], array[int]] | None = None
        self.newest = -1
        """Index of the newest step there is; -1 for none."""

    def append(self, columns: ArrivalColumns) -> None:
        """Add steps; each takes the place of the one so many steps before it."""
        if not columns.step:
            return
        if self._rings is None:
            self._rings = (
                _filled(self._capacity, -1),
                _filled(self._capacity, -1),
                _filled(self._capacity, -1),
            )
        given = (columns.step, columns.first_unix_ns, columns.last_unix_ns)
        newest = columns.step[-self._capacity :]
        if newest.tolist() == [*range(newest[0], newest[0] + self._capacity)]:
            # So many, one after the other, leave nothing of those before.
            turn = -newest[0] % self._capacity
            for ring, column in zip(self._rings, given, strict=True):
                latest = column[-self._capacity :]
                ring[:] = latest[turn:] + latest[:turn]
        else:
            for row in zip(*given, strict=True):
                for ring, value in zip(self._rings, row, strict=True):
                    ring[row[0] % self._capacity] = value
        self.newest = max(self.newest, columns.step[-1])

    def at(self, step: int) -> Arrival | None:
        """Return when the rank came to the collectives of a step; None where that is not known."""
        if self._rings is None or step < 0:
            return None
        kept, first, last = (ring[step % self._capacity] for ring in self._rings)
        return Arrival(first, last) if kept == step else None


class History:
    """The newest steps of one rank, as rings of equal length."""

    def __init__(self, capacity: int = HISTORY_STEPS) -> None:
        self._capacity = capacity
        self._seen = 0
        self._end = _filled(capacity)
        self._duration = _filled(capacity)
        self._phases: dict[str, array[int]] = {}

    def append(self, steps: StepColumns) -> None:
        """Add steps, forgetting the oldest."""
        for name in steps.phases:
            if name not in self._phases and len(self._phases) < _MAX_PHASES:
                self._phases[name] = _filled(self._capacity)
        count = len(steps.duration_ns)
        skipped = max(0, count - self._capacity)
        first = (self._seen + skipped) % self._capacity
        # Up to the ring's end, and on from its beginning.
        turn = min(count, skipped + self._capacity - first)
        for ring, column in (
            (self._end, steps.end_unix_ns),
            (self._duration, steps.duration_ns),
            *((ring, steps.phases.get(name)) for name, ring in self._phases.items()),
        ):
            values = column if column is not None else _filled(count)
            ring[first : first + turn - skipped] = values[skipped:turn]
            ring[: count - turn] = values[turn:]
        self._seen += count

    def __len__(self) -> int:
        return min(self._seen, self._capacity)

    @property
    def seen(self) -> int:
        """How many steps there were, with those forgotten."""
        return self._seen

    def newest(self, count: int = HISTORY_STEPS) -> StepColumns:
        """Return copies of the newest steps, oldest first, as many as are wanted and held."""
        count = min(count, len(self))
        first = (self._seen - count) % self._capacity

        def turned(ring: "array[int]") -> "array[int]":
            return (ring[first:] + ring[:first])[:count]

        return StepColumns(
            turned(self._end),
            turned(self._duration),
            {name: turned(ring) for name, ring in self._phases.items()},
        )

    def mean_step_seconds(self, count: int = HISTORY_STEPS) -> float:
        """Return the mean duration of the newest steps held, 0 when there are none."""
        return self._mean_seconds(self._duration, count)

    def mean_phase_seconds(self, count: int = HISTORY_STEPS) -> dict[str, float]:
        """Return each phase's mean exclusive time per step, of the newest steps held."""
        return {name: self._mean_seconds(ring, count) for name, ring in self._phases.items()}

    def _mean_seconds(self, ring: "array[int]", count: int) -> float:
        count = min(count, len(self))
        if not count:
            return 0.0
        oldest = (self._seen - len(self)) % self._capacity
        left_out = sum(ring[(oldest + index) % self._capacity] for index in range(len(self) - count))
        # Slots never written hold zero, so a ring that is not full yet sums up right too.
        return (sum(ring) - left_out) / count / 1e9


class Histogram:
    """Counts of durations by upper bound, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS_S) + 1)
        self.sum_seconds = 0.0

    def observe_ns(self, durations: "array[int]") -> None:
        """Add durations."""
        for bucket in _BOUNDS.searchsorted(np.asarray(durations) / 1e9).tolist():
            self.counts[bucket] += 1
        self.sum_seconds += sum(durations) / 1e9


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """What tells two training processes apart.

    Attributes:
        run: The run's name, as the process gives it.
        rank: Likewise.
        node: Likewise, as are the two below.
        pid_namespace: Inode of its pid namespace.
        pid: In that namespace.
        start_ticks: When it started.
        uid: Its user, as the kernel says; None when that is not known.
        peer_pid: Its process id in the daemon's own pid namespace, as the kernel says; 0 when not known.
    """

    run: str
    rank: int
    node: str
    pid_namespace: int
    pid: int
    start_ticks: int
    uid: int | None = None
    peer_pid: int = 0

    @classmethod
    def of(cls, identity: RankIdentity, uid: int | None, peer_pid: int) -> "ProcessKey":
        """Return the key of a process that says who it is."""
        return cls(
            identity.run,
            identity.rank,
            identity.node,
            identity.pid_namespace,
            identity.pid,
            identity.process_start_ticks,
            uid,
            peer_pid,
        )


class Rank:
    """One rank of one run on this node.

    Args:
        identity: Who it is, its run by the name that it has here.
        now: Monotonic seconds.
        process: Which process it is; by default that of the identity, of an unknown user.
    """

    def __init__(self, identity: RankIdentity, now: float, process: ProcessKey | None = None) -> None:
        self.identity = identity
        self.process = process or ProcessKey.of(identity, None, 0)
        self.is_process_known = True
        """Whether the process id of the identity may be believed; else nothing is read of that process."""
        self.state = State.STARTING
        self.framework = ""
        self.hooks = ""
        """How its client's hooks are built, ``native`` or ``reference``; empty when it does not say."""
        self.connected = True
        self.joined_at = now
        self.left_at: float | None = None
        self.totals = Totals()
        self.history = History()
        self.arrivals = ArrivalHistory()
        self.last_step_unix_seconds = 0.0
        self.beats = 0
        """Optimizer steps that were seen without a report, where its process keeps a pulse."""
        self.beat_at = now
        """When the newest of these ended; monotonic seconds."""
        self.stalled_seconds = 0.0
        """For how long it has made no step while its run hangs; 0 while that does not."""
        self.stopped = False
        """Whether its process was found stopped, as by SIGSTOP, in the present hang."""

    @property
    def steady_steps(self) -> int:
        """How many of the newest steps means are made of: those held, less the run's first step.

        The first step pays for all that is initialised lazily. The client's report keeps it apart as well.
        """
        held = len(self.history)
        first_is_held = bool(self.totals.warmup.steps) and self.totals.train.steps <= held
        return held - 1 if first_is_held and held > 1 else held

    def mean_step_seconds(self) -> float:
        """Return the mean duration of recent steps after the first; 0 when there are none."""
        return self.history.mean_step_seconds(self.steady_steps)

    def mean_phase_seconds(self) -> dict[str, float]:
        """Return each phase's mean exclusive time per recent step after the first."""
        return self.history.mean_phase_seconds(self.steady_steps)


class Store:
    """All ranks that stream to this daemon.

    Args:
        grace_seconds: How long a rank stays after it has left.
        clock: Monotonic seconds.
        most_per_user: Ranks of one user that are kept; of those that have left, the oldest go first.
        most: Of all users.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        most_per_user: int = 512,
        most: int = 2048,
    ) -> None:
        self._grace = grace_seconds
        self._most_per_user = most_per_user
        self._most = most
        self._clock = clock
        self._ranks: dict[tuple[str, int], Rank] = {}
        self.histograms: dict[str, Histogram] = {}
        self.ingested_steps = 0
        self._departed_dropped: dict[str, int] = {}

    def join(
        self,
        identity: RankIdentity,
        uid: int | None = None,
        peer_pid: int = 0,
        has_ended: Callable[[Rank], bool] = lambda rank: not rank.connected,
    ) -> Rank:
        """Admit a process. The same process coming back keeps its record; another one starts afresh.

        A process takes over the place of an earlier one of its user that has ended. Where the place is
        taken, its run has another name here; see :func:`_names`.

        Args:
            identity: Who the process says it is.
            uid: Its user, as the kernel says; None when that is not known.
            peer_pid: Its process id here, as the kernel says; 0 when that is not known.
            has_ended: Returns whether the process of a record has ended.
        """
        self.forget_departed()
        process = ProcessKey.of(identity, uid, peer_pid)
        for known in self._ranks.values():
            # The first comparison is the quick one, and of thousands nearly all differ in it.
            if known.process.pid == process.pid and known.process == process:
                known.identity = replace(identity, run=known.identity.run)
                known.connected = True
                known.left_at = None
                return known
        self._make_room(uid)
        name = self._free_name(identity, uid, has_ended)
        key = (name, identity.rank)
        if key in self._ranks:
            self._keep_dropped(self._ranks[key])
        rank = Rank(replace(identity, run=name), self._clock(), process)
        self._ranks[key] = rank
        return rank

    def _make_room(self, uid: int | None) -> None:
        """Forget the ranks that left first while a user, or all, have as many as are kept."""
        self._forget_oldest(
            [key for key, rank in self._ranks.items() if rank.process.uid == uid], self._most_per_user
        )
        self._forget_oldest([*self._ranks], self._most)

    def _forget_oldest(self, keys: list[tuple[str, int]], most: int) -> None:
        """Forget as many of these ranks that have left as it takes to have room for one more."""
        if len(keys) < most:
            return
        departed = [key for key in keys if not self._ranks[key].connected]
        departed.sort(key=lambda key: self._ranks[key].left_at or 0.0)
        for key in departed[: len(keys) - most + 1]:
            self._keep_dropped(self._ranks.pop(key))

    def _free_name(self, identity: RankIdentity, uid: int | None, has_ended: Callable[[Rank], bool]) -> str:
        """Return the first name of the run under which this rank has no other user's or living process."""
        owners = {run: rank.process.uid for (run, _), rank in self._ranks.items()}
        for name in _names(identity.run, uid, owners.get(identity.run, uid)):
            known = self._ranks.get((name, identity.rank))
            if owners.get(name, uid) == uid and (known is None or has_ended(known)):
                return name
        raise AssertionError("names never end")

    def leave(self, rank: Rank) -> None:
        """Mark a rank as gone; its record stays for the grace time."""
        rank.connected = False
        rank.left_at = self._clock()

    def add_steps(self, rank: Rank, steps: StepColumns) -> None:
        """Add a batch of training steps."""
        if not steps.duration_ns:
            return
        rank.history.append(steps)
        rank.arrivals.append(steps.arrivals)
        rank.last_step_unix_seconds = steps.end_unix_ns[-1] / 1e9
        self.histograms.setdefault(rank.identity.run, Histogram()).observe_ns(steps.duration_ns)

    def forget_departed(self) -> None:
        """Drop the ranks whose grace is over, and what belongs to runs without ranks."""
        now = self._clock()
        for key, rank in list(self._ranks.items()):
            if rank.left_at is not None and now - rank.left_at > self._grace:
                self._keep_dropped(rank)
                del self._ranks[key]
        runs = {run for run, _ in self._ranks}
        for run in list(self.histograms):
            if run not in runs:
                del self.histograms[run]

    def ranks(self) -> Iterator[Rank]:
        """Yield all ranks that there are now, by run and rank; also for other threads than the store's."""
        for _, rank in sorted(self._ranks.items(), key=itemgetter(0)):
            yield rank

    def runs(self) -> dict[str, list[Rank]]:
        """Return the ranks of each run."""
        runs: dict[str, list[Rank]] = {}
        for rank in self.ranks():
            runs.setdefault(rank.identity.run, []).append(rank)
        return runs

    def connected(self) -> int:
        """Return how many ranks are connected."""
        return sum(rank.connected for rank in self._ranks.values())

    def dropped(self) -> dict[str, int]:
        """Return the steps that clients lost, by where, including those of ranks long gone."""
        total = dict(self._departed_dropped)
        for rank in self._ranks.values():
            for where, count in rank.totals.dropped.items():
                total[where] = total.get(where, 0) + count
        return total

    def _keep_dropped(self, rank: Rank) -> None:
        for where, count in rank.totals.dropped.items():
            self._departed_dropped[where] = self._departed_dropped.get(where, 0) + count


def _names(run: str, uid: int | None, owner: int | None) -> Iterator[str]:
    """Yield the names that a run may have here: ``run``, ``run#2``, ``run#3``, and so on.

    Args:
        run: As its process calls it.
        uid: Of the process.
        owner: Of the run that has this name. When it is another user's, the names are ``run@uid``,
            ``run@uid#2``, and so on.
    """
    name = run if uid == owner else f"{run}@{uid}"
    yield name
    for number in itertools.count(2):
        yield f"{name}#{number}"
