"""Pace: what a rank's accounts say of its steps, from one look to the next, in fixed memory."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from torchperfd_daemon.store import Rank, State

KEPT: Final = 600
"""Looks that had a step in them: ten minutes of a job with a step a second or more."""

RECENT: Final = 10
"""How many of them are the present; the median of ten is not moved by a save or a collection."""

_SCALE: Final = 1.4826  # of a MAD, to be a standard deviation where noise is normal


@dataclass(frozen=True, slots=True)
class Looked:
    """The training steps between two looks: how many, seconds per step, and of them not spent waiting."""

    steps: int
    step_seconds: float
    own_seconds: float


class Pace:
    """The recent past of one rank.

    Args:
        rank: Whose.
        now: Monotonic seconds.
    """

    def __init__(self, rank: Rank, now: float) -> None:
        self.rank = rank
        self.looked: deque[Looked] = deque(maxlen=KEPT)
        self.moved_at = now
        """When it last made a step, or did something else than training; monotonic seconds."""
        self._steps, self._ns, self._wait_ns = _totals(rank)
        self._progress = self._made()

    def look(self, now: float) -> None:
        """Take note of the steps since the last look."""
        steps, ns, wait_ns = _totals(self.rank)
        made = steps - self._steps
        if made > 0:
            spent = ns - self._ns
            own = spent - (wait_ns - self._wait_ns)
            self.looked.append(Looked(made, spent / made / 1e9, own / made / 1e9))
        self._steps, self._ns, self._wait_ns = steps, ns, wait_ns
        progress = self._made()
        if progress != self._progress or self.rank.state is not State.TRAINING:
            self.moved_at = now
        self._progress = progress

    def step_seconds(self) -> list[float]:
        """Return the seconds per step of each look kept, oldest first."""
        return [look.step_seconds for look in self.looked]

    def own_seconds(self) -> list[float]:
        """Return the same without waiting for other ranks."""
        return [look.own_seconds for look in self.looked]

    def usual_step_seconds(self) -> float:
        """Return the median of the looks kept, 0 when there are none."""
        return median(self.step_seconds()) if self.looked else 0.0

    def _made(self) -> tuple[int, int]:
        totals = self.rank.totals
        return totals.train.steps, totals.validate.steps


class Paces:
    """The paces of all ranks that are connected."""

    def __init__(self) -> None:
        self._paces: dict[Rank, Pace] = {}

    def look(self, ranks: Iterable[Rank], now: float) -> None:
        """Take note of all ranks, and forget those that are not among them."""
        before, self._paces = self._paces, {}
        for rank in ranks:
            pace = self._paces[rank] = before.get(rank) or Pace(rank, now)
            pace.look(now)

    def of(self, rank: Rank) -> Pace:
        """Return the pace of a rank that was looked at."""
        return self._paces[rank]

    def runs(self) -> dict[str, list[Pace]]:
        """Return the paces of each run, by rank."""
        runs: dict[str, list[Pace]] = {}
        for rank, pace in sorted(self._paces.items(), key=lambda item: item[0].identity.rank):
            runs.setdefault(rank.identity.run, []).append(pace)
        return runs


def spread(values: Sequence[float]) -> float:
    """Return a robust standard deviation: the median distance from the median, scaled."""
    middle = median(values)
    return _SCALE * median(abs(value - middle) for value in values)


def _totals(rank: Rank) -> tuple[int, int, int]:
    train = rank.totals.train
    wait = train.phases.get("collective_wait")
    return train.steps, train.ns, wait.ns if wait else 0
