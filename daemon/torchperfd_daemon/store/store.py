"""All ranks that report to this daemon, in fixed memory per rank and for a bounded number of ranks.

Each has its identity, state, totals and newest steps.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.store.history import ArrivalHistory, Histogram, History, SecondHistory
from torchperfd_daemon.store.model import (
    MIN_PRESENT_STEPS,
    PRESENT_S,
    ProcessKey,
    RankIdentity,
    State,
    StepColumns,
    Totals,
)


def p50_and_p95(times: npt.ArrayLike) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return both percentiles, of a matrix those of each row; there must be times.

    They are interpolated linearly between the two nearest times.
    """
    ordered = np.sort(np.asarray(times, dtype=np.float64), axis=-1)
    p50, p95 = (_quantile_of_sorted(ordered, share) for share in (0.5, 0.95))
    return p50, p95


def _quantile_of_sorted(ordered: npt.NDArray[np.float64], share: float) -> npt.NDArray[Any]:
    position = share * (ordered.shape[-1] - 1)
    below = int(position)
    low, high = ordered[..., below], ordered[..., min(below + 1, ordered.shape[-1] - 1)]
    return np.asarray(low + (high - low) * (position - below))


class Rank:
    """One rank of one run on this node.

    Args:
        identity: Its identity, with the run's name on this node.
        now: Monotonic seconds.
        process: The key of its process; by default that of the identity, of an unknown user.
    """

    def __init__(self, identity: RankIdentity, now: float, process: ProcessKey | None = None) -> None:
        self.identity = identity
        self.process = process or ProcessKey.of(identity, None, 0)
        self.is_process_known = True
        """Whether the process id of the identity is verified; otherwise no data of that process is read."""
        self.gid: int | None = None
        """The group of its session, from the kernel; None if unknown."""
        self.state = State.STARTING
        self.framework = ""
        self.hooks = ""
        """The implementation of its client's hooks, ``native`` or ``reference``; empty if not reported."""
        self.client_version = ""
        """The version of its client; empty if not reported."""
        self.failure = ""
        """The exception that has ended its script, in one line; empty if none has."""
        self.failed_unix_seconds = 0.0
        """When this daemon received that; 0 without one."""
        self.outcome = ""
        """What its run made of the promise of an earlier run, in one line; empty without one."""
        self.connected = True
        self.joined_at = now
        self.left_at: float | None = None
        self.totals = Totals()
        self.history = History()
        self.seconds = SecondHistory()
        self.arrivals = ArrivalHistory()
        self.last_step_unix_seconds = 0.0
        self.stalled_seconds = 0.0
        """The time without a step during a hang of its run; 0 without a hang."""
        self.blocked_seconds = 0.0
        """The part of a step in which other threads may have kept its training thread from running."""
        self.blocked_by = ""
        """Where these threads are most often, such as ``spin() at train.py:20``; empty if not sampled."""
        self.queued_seconds = 0.0
        """The part of a step in which its training thread was ready to run without a CPU."""
        self.loader_advice: SettledAdvice | None = None
        """What its run is advised on its loaders; None before that is settled."""
        self.stopped = False
        """Whether its process was found stopped, for example by SIGSTOP, during the present hang."""

    @property
    def next_step(self) -> int:
        """The number of the newest step held, plus one.

        From the steps themselves: with a live page open they come more often than the totals.
        """
        return self.history.next_step or self.totals.train.steps

    @property
    def steady_steps(self) -> int:
        """The number of newest steps for means: those held, without the run's first step.

        The first step includes all lazy initialisation. The client's report also leaves it out.
        """
        held = len(self.history)
        first_is_held = bool(self.totals.warmup.steps) and self.next_step <= held
        return held - 1 if first_is_held and held > 1 else held

    @property
    def present_steps(self) -> int:
        """The number of newest steps that every view of the present is about.

        Those that ended in the :data:`PRESENT_S` before the newest one, and at least
        :data:`MIN_PRESENT_STEPS`, out of the steady steps; all of these once the rank has left.
        """
        if not self.connected:
            return self.steady_steps
        return min(self.steady_steps, max(self.history.ended_within(PRESENT_S), MIN_PRESENT_STEPS))

    @property
    def has_ended(self) -> bool:
        """Whether it has finished or left, so that no further step of it comes."""
        return not self.connected or self.state is State.FINISHED

    def mean_step_seconds(self) -> float:
        """Return the mean duration of the present steps; 0 without any."""
        return self.history.mean_step_seconds(self.present_steps)

    def mean_phase_seconds(self) -> dict[str, float]:
        """Return each phase's mean exclusive time per present step."""
        return self.history.mean_phase_seconds(self.present_steps)

    def newest_step_seconds(self) -> npt.NDArray[np.float64]:
        """Return the durations of recent steps after the first, oldest first; shape (steps,)."""
        durations = self.history.newest_durations(self.steady_steps)
        return np.asarray(durations, dtype=np.int64) / 1e9

    def p95_step_seconds(self) -> float:
        """Return the 95th percentile of recent steps after the first; 0 without any."""
        durations = self.history.newest_durations(self.steady_steps)
        return float(p50_and_p95(durations)[1]) / 1e9 if durations else 0.0

    def mean_own_seconds(self) -> float:
        """Return the mean own work of the present steps: their duration less the wait for other ranks."""
        return self.mean_step_seconds() - self.mean_phase_seconds().get("collective_wait", 0.0)


class Store:
    """All ranks that report to this daemon.

    Args:
        grace_seconds: How long a rank is kept after it has left.
        most_per_user: The largest number of ranks of one user. Ranks that left first are dropped first.
        most: The largest number of ranks of all users.
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
        self.on_steps: Callable[[], None] | None = None
        """Called after steps were added, on the thread that adds them."""

    def join(
        self,
        identity: RankIdentity,
        uid: int | None = None,
        peer_pid: int = 0,
        has_ended: Callable[[Rank], bool] = lambda rank: not rank.connected,
    ) -> Rank:
        """Add a process. A process that connects again keeps its record; a new process gets a new one.

        A process replaces an earlier one of its user that has ended. If another user or a living process has
        the same run and rank, the run gets another name on this node; see :func:`_names`.

        Args:
            uid: Its user, from the kernel; None if unknown.
            peer_pid: Its process id here, from the kernel; 0 if unknown.
            has_ended: Returns whether the process of a record has ended.
        """
        self.forget_departed()
        process = ProcessKey.of(identity, uid, peer_pid)
        for known in self._ranks.values():
            # The first comparison is cheap and sorts out nearly all of thousands of ranks.
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
        """Drop the ranks that left first while a user, or all users together, have reached the limit."""
        self._forget_oldest(
            [key for key, rank in self._ranks.items() if rank.process.uid == uid], self._most_per_user
        )
        self._forget_oldest([*self._ranks], self._most)

    def _forget_oldest(self, keys: list[tuple[str, int]], most: int) -> None:
        """Drop ranks that have left, the oldest first, until there is room for one more."""
        if len(keys) < most:
            return
        departed = [key for key in keys if not self._ranks[key].connected]
        departed.sort(key=lambda key: self._ranks[key].left_at or 0.0)
        for key in departed[: len(keys) - most + 1]:
            self.forget(self._ranks[key])

    def _free_name(self, identity: RankIdentity, uid: int | None, has_ended: Callable[[Rank], bool]) -> str:
        """Return the run's first name that no other user has and without a living process of this rank."""
        owners = {run: rank.process.uid for (run, _), rank in self._ranks.items()}
        for name in _names(identity.run, uid, owners.get(identity.run, uid)):
            known = self._ranks.get((name, identity.rank))
            if owners.get(name, uid) == uid and (known is None or has_ended(known)):
                return name
        raise AssertionError("names never end")

    def leave(self, rank: Rank) -> None:
        """Mark a rank as disconnected; its record is kept for the grace time."""
        rank.connected = False
        rank.left_at = self._clock()

    def add_steps(self, rank: Rank, steps: StepColumns) -> None:
        """Add a batch of training steps."""
        if not steps.duration_ns:
            return
        rank.history.append(steps)
        rank.seconds.append(steps)
        rank.arrivals.append(steps.arrivals)
        rank.last_step_unix_seconds = steps.end_unix_ns[-1] / 1e9
        self.histograms.setdefault(rank.identity.run, Histogram()).observe_ns(steps.duration_ns)
        if self.on_steps is not None:
            self.on_steps()

    def forget(self, rank: Rank) -> None:
        """Drop a rank's record at once."""
        self._keep_dropped(self._ranks.pop((rank.identity.run, rank.identity.rank)))

    def forget_departed(self) -> None:
        """Drop the ranks whose grace time is over, and the data of runs without ranks."""
        now = self._clock()
        for rank in list(self._ranks.values()):
            if rank.left_at is not None and now - rank.left_at > self._grace:
                self.forget(rank)
        runs = {run for run, _ in self._ranks}
        for run in list(self.histograms):
            if run not in runs:
                del self.histograms[run]

    def ranks(self) -> Iterator[Rank]:
        """Yield all present ranks, sorted by run and rank. Other threads may call it."""
        for _, rank in sorted(self._ranks.items(), key=itemgetter(0)):
            yield rank

    def runs(self) -> dict[str, list[Rank]]:
        runs: dict[str, list[Rank]] = {}
        for rank in self.ranks():
            runs.setdefault(rank.identity.run, []).append(rank)
        return runs

    def connected(self) -> int:
        """Return the number of connected ranks."""
        return sum(rank.connected for rank in self._ranks.values())

    def dropped(self) -> dict[str, int]:
        """Return the number of steps that clients dropped, by place, including those of departed ranks."""
        total = dict(self._departed_dropped)
        for rank in self._ranks.values():
            for where, count in rank.totals.dropped.items():
                total[where] = total.get(where, 0) + count
        return total

    def _keep_dropped(self, rank: Rank) -> None:
        for where, count in rank.totals.dropped.items():
            self._departed_dropped[where] = self._departed_dropped.get(where, 0) + count


def _names(run: str, uid: int | None, owner: int | None) -> Iterator[str]:
    """Yield the possible names of a run on this node: ``run``, ``run#2``, ``run#3``, and so on.

    Args:
        owner: The user of the run that has this name. If it is another user, the names are ``run@uid``,
            ``run@uid#2``, and so on.
    """
    name = run if uid == owner else f"{run}@{uid}"
    yield name
    for number in itertools.count(2):
        yield f"{name}#{number}"
