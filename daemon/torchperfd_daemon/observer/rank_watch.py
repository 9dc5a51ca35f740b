"""One rank, watched: what its counters were at the newest looks, and what that makes of its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis import RankEvidence
from torchperfd_daemon.diagnosis.attribution import FULL_SOON_S
from torchperfd_daemon.diagnosis.detect import (
    Doing,
    GrowthDetector,
    RankWork,
    Stall,
    StallDetector,
    StepTimes,
)
from torchperfd_daemon.diagnosis.detect.growth import LEAST_SHARE, theil_sen
from torchperfd_daemon.diagnosis.detect.straggler import LEAST_STEPS
from torchperfd_daemon.observer.node_context import GpuState, NodeContext
from torchperfd_daemon.store import HISTORY_STEPS, Rank, State, Totals

Float64 = npt.NDArray[np.float64]

WINDOW_LOOKS: Final = 10
"""The present: so many looks that had a step in them."""
LEAST_LOOKS: Final = 3
WARM_STEPS: Final = 20
"""The first steps are not like the others: so many, or those of ten seconds, are left out."""

_WARM_S: Final = 10.0
_KEPT: Final = 18
_READINGS: Final = 64
_GROWTH_EVERY: Final = 10
# Ranks with steps below 5 ms report every four seconds, and looks are a second apart.
_LATEST_NEWS_S: Final = 5.0
# A hang is to be named by the limit: looks are a second apart, and the ranks' answers take their time.
_EARLY_S: Final = 1.5
_LEAST_PAST: Final = 0.5
_ALIKE: Final = 1.02
_PHASES: Final = 32
_AT, _STEPS, _NS, _GC_NS, _SAVED_NS, _QUEUED_S, _THROTTLED_S, _DISK_S, _MEMORY_S, _GPU_S = range(10)
_COMPILED_NS, _SAVES, _RESIDENT, _EXCHANGE_S, _ENDED, _FIXED = range(10, 16)

_DOING: Final = {
    State.STARTING: Doing.IDLE,
    State.TRAINING: Doing.TRAINING,
    State.VALIDATING: Doing.ELSEWHERE,
    State.CHECKPOINTING: Doing.ELSEWHERE,
    State.FINISHED: Doing.IDLE,
}


class RankWatch:
    """Keeps a rank's counters of the newest 18 looks that had a step in them, and follows its progress.

    All figures are differences of cumulative counters, so that no step is missed however many there are.

    Args:
        rank: Whose.
        times: How long the run's steps take.
        now: Monotonic seconds.
    """

    def __init__(self, rank: Rank, times: StepTimes, now: float) -> None:
        self.rank = rank
        self._stall = StallDetector(times)
        self._made = (0, 0, 0, 0)
        self._ended = now
        self._born = now
        self._names: list[str] = []
        self._rows: Float64 = np.zeros((_KEPT, _FIXED))
        self._count = 0
        self._first: Float64 | None = None
        self._turned: Float64 | None = None
        self._before: RankEvidence | None = None
        self._gpu = GpuState()
        self._top_clock = 0.0
        self._foreign = 0
        self._window = 0
        self._memory = GrowthDetector(readings=_READINGS)
        self._measured = 0
        self._grows_by = self._grows_for = 0.0
        self._room: float | None = None

    def look(self, now: float, wall: float, around: NodeContext, gpu: GpuState, ours: frozenset[int]) -> None:
        """Take note of the steps since the last look.

        Args:
            now: Monotonic seconds.
            wall: Unix seconds.
            around: What the collectors say.
            gpu: The rank's own device.
            ours: The process ids of all ranks.
        """
        self._follow(now, wall)
        self._gpu = gpu
        self._top_clock = max(self._top_clock, gpu.clock_hertz)
        # In a container of its own a rank has another id than the driver sees: then all look foreign.
        known = self.rank.identity.pid in gpu.processes
        self._foreign = len(gpu.processes - ours) if known else 0
        self._follow_memory(now, around)
        train = self.rank.totals.train
        warm = train.steps >= WARM_STEPS or (train.steps > 1 and now - self._born >= _WARM_S)
        if warm and (not self._count or train.steps > self._row(0)[_STEPS]):
            self._note(now, around, gpu)

    @property
    def doing(self) -> Doing:
        """What the rank does, as far as stalls are concerned."""
        return self._stall.doing

    @property
    def settled(self) -> bool:
        """Whether there are looks enough to judge."""
        return self._count > LEAST_LOOKS

    def hold(self, now: float) -> None:
        """Take note that the rank has to wait for one that is elsewhere for good reason."""
        self._stall.progress(now)

    def stalled(self, now: float) -> Stall | None:
        """Return the stall that there is now, in time to ask the ranks for their stacks before its limit."""
        return self._stall.check(now, _EARLY_S) if self.rank.connected else None

    def evidence(self, since: float) -> RankEvidence | None:
        """Return what the newest steps were like; None while there are too few.

        Args:
            since: Monotonic seconds: what lies before is of another regime.
        """
        if self._looks_since(since, _AT) < LEAST_LOOKS:
            return None
        # Steps are heard of some seconds late: a look at the new regime may have counted old steps only.
        self._window = max(1, self._looks_since(since, _ENDED))
        first, last = self._row(self._window), self._row(0)
        return self._between(first, last, before=self._before, growth=self._growth())

    def remember(self, until: float) -> None:
        """Take the steps so far for the rank's healthy past.

        Args:
            until: Monotonic seconds: what came later is not part of it.
        """
        rows = [row for back in range(self._count) if (row := self._row(back))[_AT] <= until]
        if self._first is not None and rows:
            end = _healthy_until(self._first, rows)
            self._before = self._between(self._first, end) or self._before
            self._turned = end.copy()

    def forget(self, since: float) -> None:
        """Let the past begin anew, at a moment of monotonic seconds."""
        self._before = self._turned = None
        later = [back for back in range(self._count) if self._row(back)[_ENDED] >= since]
        self._first = self._row(max(later, default=0)).copy() if self._count else None

    def work(self, usual: Mapping[str, float]) -> RankWork:
        """Return the steps of the newest evidence one by one, as many of them as the store still has.

        Args:
            usual: Seconds by which the rank's phases were always longer than the others'; they are left out.
        """
        count = int(self._row(0)[_STEPS] - self._row(self._window)[_STEPS])
        columns = self.rank.history.newest(min(HISTORY_STEPS, max(LEAST_STEPS, count)))
        return RankWork(
            self.rank.identity.rank,
            {
                name: np.frombuffer(column, dtype=np.int64).astype(np.float64) / 1e9 - usual.get(name, 0.0)
                for name, column in columns.phases.items()
            },
        )

    def _follow(self, now: float, wall: float) -> None:
        rank = self.rank
        totals = rank.totals
        made = (rank.history.seen, totals.train.steps, totals.validate.steps, _saves(totals))
        if made != self._made:
            # The step ended before we heard of it; how long before, the node's clock may be wrong about.
            late = wall - rank.last_step_unix_seconds if made[0] != self._made[0] else 0.0
            self._made = made
            self._ended = now - late if 0 <= late <= _LATEST_NEWS_S else now
            self._stall.progress(now - min(_LATEST_NEWS_S, max(0.0, late)))
        self._stall.enter(_DOING[rank.state], now)

    def _follow_memory(self, now: float, around: NodeContext) -> None:
        key = self.rank.identity.run, self.rank.identity.rank
        resident = around.resident.get(key)
        if resident is None:
            return
        self._room = around.room(key)
        self._memory.observe(now, resident)
        self._measured += 1
        if self._measured % _GROWTH_EVERY == 0:
            growth = self._memory.find()
            grows = growth is not None and growth.grows
            self._grows_by = growth.slope.per_second if growth is not None and grows else 0.0
            self._grows_for = growth.seconds if growth is not None and grows else 0.0

    def _growth(self) -> tuple[float, float]:
        """Return the pace at which memory grows, and for how long it was seen to; zeros where it does not.

        The whole run tells slow growth, and the newest looks what is too fast to wait for.
        """
        if self._grows_by or self._room is None:
            return self._grows_by, self._grows_for
        # Memory grows whether steps are slow or not: all regimes count.
        rows = self._rows[max(0, self._count - WINDOW_LOOKS) : self._count]
        last, change = rows[-1], rows[-1] - rows[0]
        gained, level, seconds = change[_RESIDENT], last[_RESIDENT], float(change[_AT])
        if self._room * seconds > gained * FULL_SOON_S or gained < LEAST_SHARE * level:
            return 0.0, 0.0
        slope = theil_sen(rows[:, _AT], rows[:, _RESIDENT])
        return (slope.per_second, seconds) if slope.low > 0 else (0.0, 0.0)

    def _note(self, now: float, around: NodeContext, gpu: GpuState) -> None:
        totals = self.rank.totals
        phases = totals.train.phases
        if len(phases) != len(self._names):
            fresh = [name for name in phases if name not in self._names]
            self._names += fresh[: _PHASES - len(self._names)]
            missing = _FIXED + len(self._names) - self._rows.shape[1]
            # A phase that is new has had no time so far.
            self._rows = np.pad(self._rows, ((0, 0), (0, missing)))
            if self._first is not None:
                self._first = np.pad(self._first, (0, missing))
        key = self.rank.identity.run, self.rank.identity.rank
        row = self._rows[self._count] if self._count < _KEPT else self._turn()
        row[:] = (
            now,
            totals.train.steps,
            totals.train.ns,
            sum(generation.ns for generation in totals.gc),
            totals.checkpoint.ns if totals.checkpoint else 0,
            around.queued.get(key, 0.0),
            around.throttled.get(key, 0.0),
            around.storage.seconds.get(key, 0.0),
            around.memory_seconds,
            gpu.throttled_seconds,
            totals.compiled.ns if totals.compiled else 0,
            _saves(totals),
            around.resident.get(key, 0.0),
            around.exchange_queued.get(key, 0.0),
            self._ended,
            *[phases[name].ns if name in phases else 0 for name in self._names],
        )
        self._count = min(self._count + 1, _KEPT)
        if self._first is None:
            self._first = row.copy()

    def _turn(self) -> Float64:
        """Move all rows on by one, and return the last."""
        self._rows[:-1] = self._rows[1:]
        last: Float64 = self._rows[-1]
        return last

    def _looks_since(self, since: float, column: int) -> int:
        """Return how many looks of the window came after the first one whose column is not below a moment."""
        most = min(WINDOW_LOOKS, self._count - 1)
        while most > 0 and self._row(most)[column] < since:
            most -= 1
        return most

    def _row(self, back: int) -> Float64:
        row: Float64 = self._rows[self._count - 1 - back]
        return row

    def _between(
        self,
        first: Float64,
        last: Float64,
        *,
        before: RankEvidence | None = None,
        growth: tuple[float, float] = (0.0, 0.0),
    ) -> RankEvidence | None:
        """Return the means per step between two looks; None when there was no step in between.

        Args:
            first: The earlier look.
            last: The later one.
            before: The rank's past.
            growth: What :meth:`_growth` says.
        """
        # A counter that fell began anew.
        change = np.maximum(last - first, 0.0).tolist()
        steps = change[_STEPS]
        if steps <= 0:
            return None
        span = max(1e-9, change[_AT])
        step_seconds = change[_NS] / steps / 1e9
        phases = {name: ns / steps / 1e9 for name, ns in zip(self._names, change[_FIXED:], strict=True)}
        # What the kernel counts goes on between steps: only the steps' part of it is theirs.
        inside = min(1.0, change[_NS] / 1e9 / span)

        def per_step(column: int) -> float:
            return float(change[column] * inside / steps)

        identity = self.rank.identity
        slowdown = 1 - self._gpu.clock_hertz / self._top_clock if self._top_clock else 0.0
        grows_by, grows_for = growth
        return RankEvidence(
            rank=identity.rank,
            node=identity.node,
            step_seconds=step_seconds,
            phase_seconds=phases,
            collected_seconds=change[_GC_NS] / steps / 1e9,
            queued_seconds=per_step(_QUEUED_S),
            exchange_queued_seconds=per_step(_EXCHANGE_S),
            throttled_seconds=per_step(_THROTTLED_S),
            disk_seconds=min(per_step(_DISK_S), phases.get("data", 0.0)),
            reclaim_seconds=per_step(_MEMORY_S),
            compiled_seconds=change[_COMPILED_NS] / steps / 1e9,
            checkpoint_seconds=self._saved_per_step(first, last),
            device_busy=self._gpu.utilization,
            device_throttled=min(1.0, change[_GPU_S] / span),
            device_slowdown=max(0.0, slowdown),
            grows_by=grows_by,
            grows_for_seconds=grows_for,
            full_in_seconds=self._room / grows_by if grows_by and self._room is not None else None,
            before=before,
            window_seconds=span,
            loader=self.rank.totals.loader,
        )

    def _saved_per_step(self, first: Float64, last: Float64) -> float:
        """Return the time of checkpoints per step between two looks.

        A window holds few of them, and by chance one more or less: how often they come is taken from the
        whole regime, and how long one takes from the window, or where that has none from the regime, too.
        """
        if not last[_SAVES]:
            return 0.0
        whole = self._first if self._turned is None or last[_AT] <= self._turned[_AT] else self._turned
        if whole is None or last[_SAVES] <= whole[_SAVES] or last[_STEPS] <= whole[_STEPS]:
            return 0.0
        since = first if last[_SAVES] > first[_SAVES] else whole
        saved = last[_SAVED_NS] - since[_SAVED_NS]
        if "checkpoint" in self._names:
            column = _FIXED + self._names.index("checkpoint")
            saved += last[column] - since[column]
        each = max(0.0, saved) / (last[_SAVES] - since[_SAVES])
        return float(each * (last[_SAVES] - whole[_SAVES]) / (last[_STEPS] - whole[_STEPS]) / 1e9)

    def shared(self, seen: RankEvidence) -> RankEvidence:
        """Return a late rank's evidence with its lateness laid to other processes on its device, if any."""
        work = seen.step_seconds * (seen.device_busy or 0.0)
        if not self._foreign or work <= 0:
            return seen
        return replace(seen, device_shared=min(1.0, seen.late_seconds / work))


def _healthy_until(first: Float64, rows: Sequence[Float64]) -> Float64:
    """Return the newest look up to which steps were about as short as up to any; ``rows`` descend in time.

    A slowdown of every tenth step is noticed late, and is not to have been usual before.
    """
    steps = rows[0][_STEPS] - first[_STEPS]
    means = [
        (row[_NS] - first[_NS]) / (row[_STEPS] - first[_STEPS])
        if row[_STEPS] - first[_STEPS] > steps * _LEAST_PAST
        else np.inf
        for row in rows
    ]
    least = min(means)
    return next(row for row, mean in zip(rows, means, strict=True) if mean <= least * _ALIKE)


def _saves(totals: Totals) -> int:
    """Return how many checkpoints there were, within steps and between them."""
    within = totals.train.phases.get("checkpoint")
    return (within.calls if within else 0) + (totals.checkpoint.calls if totals.checkpoint else 0)
