"""Holds all ranks that report to this daemon, in fixed memory per rank and for a bounded number of ranks."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter

from torchperfd_daemon.store.history import Histogram
from torchperfd_daemon.store.model import ProcessKey, RankIdentity, StepColumns
from torchperfd_daemon.store.rank import Rank


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
        """Return the ranks of each run."""
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
