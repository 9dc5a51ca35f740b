"""The newest samples of one rank's counters, and the evidence that follows from them."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from torchperfd.model.totals import PhaseTotals
from torchperfd_daemon.diagnosis.detect.straggler import (
    MIN_STEPS,
    Doing,
    RankWork,
    Stall,
    StallDetector,
    StepTimes,
)
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.evidence import (
    MIN_WINDOW_SAMPLES,
    WARM_S,
    WARM_STEPS,
    WINDOW_SAMPLES,
    RankEvidence,
    blocked_seconds,
    strangers_seconds,
)
from torchperfd_daemon.observer.node_context import GpuState, GpuWatch, MemoryWatch, NodeContext
from torchperfd_daemon.observer.rank_window import (
    Float64,
    NewestRows,
    WindowEdge,
    count_saves,
    device_seconds,
    error_of_means,
    healthy_until,
    host_work,
    is_on_device,
    stage_of,
    window_facts,
)
from torchperfd_daemon.observer.step_changes import StepGrowth, StepsBesideSaves
from torchperfd_daemon.store.model import HISTORY_STEPS, State
from torchperfd_daemon.store.store import Rank

_KEPT: Final = 18
# Ranks with steps below 5 ms report every four seconds, and samples are a second apart.
_MAX_REPORT_DELAY_S: Final = 5.0
# The verdict on a hang is due at the limit: samples are a second apart, and reading stacks takes time.
_EARLY_S: Final = 1.5
_PHASES: Final = 32
_AT, _STEPS, _NS, _GC_NS, _SAVED_NS, _QUEUED_S, _THROTTLED_S, _DISK_S, _MEMORY_S, _GPU_S = range(10)
_COMPILED_NS, _SAVES, _RESIDENT, _EXCHANGE_S, _ENDED, _BESIDE_NS, _SYNC_NS, _BUSY_S = range(10, 18)
_RAN_S, _OTHERS_RAN_S, _FIXED = range(18, 21)

_NO_PHASE: Final = PhaseTotals()

_DOING: Final = {
    State.STARTING: Doing.IDLE,
    State.TRAINING: Doing.TRAINING,
    State.VALIDATING: Doing.ELSEWHERE,
    State.CHECKPOINTING: Doing.ELSEWHERE,
    State.FINISHED: Doing.IDLE,
}


class RankWatch:
    """Keeps a rank's counters at the newest 18 samples that contain a step, and follows its progress.

    All figures are differences of cumulative counters, so that every step counts.

    Args:
        times: The distribution of the run's step times.
        now: Monotonic seconds.
    """

    def __init__(self, rank: Rank, times: StepTimes, now: float) -> None:
        self.rank = rank
        self._stall = StallDetector(times)
        self._step_counts = (0, 0, 0, 0)
        self._ended = now
        self._created_at = now
        self._names: list[str] = []
        self._rows = NewestRows(_KEPT, _FIXED + 2 * _PHASES)
        self._first: Float64 | None = None
        self._first_switches: tuple[str, ...] = ()
        self._past_end: Float64 | None = None
        self._before: RankEvidence | None = None
        self._gpu = GpuWatch(now)
        self._edges: deque[WindowEdge] = deque(maxlen=_KEPT)
        self._growth = StepGrowth()
        self._window = self._regime = 0
        self._memory = MemoryWatch()
        self._beside_saves = StepsBesideSaves()

    def sample(
        self, now: float, wall: float, context: NodeContext, gpu: GpuState, ours: frozenset[int]
    ) -> None:
        """Record the steps since the last sample.

        Args:
            now: Monotonic seconds.
            wall: Unix seconds.
            gpu: The rank's own device.
            ours: The process ids of all ranks.
        """
        self._follow(now, wall)
        self._gpu.follow(now, gpu, self.rank.identity.pid, ours)
        key = self.rank.identity.run, self.rank.identity.rank
        resident = context.resident.get(key)
        if resident is not None:
            self._memory.observe(now, resident, context.room(key))
        train = self.rank.totals.train
        warm = train.steps >= WARM_STEPS or (train.steps > 1 and now - self._created_at >= WARM_S)
        if warm and (not self._rows or train.steps > self._rows[0][_STEPS]):
            self._record(now, context, gpu)

    @property
    def doing(self) -> Doing:
        """The rank's activity, as the stall detector distinguishes it."""
        return self._stall.doing

    @property
    def settled(self) -> bool:
        """Whether there are enough samples for evidence."""
        return len(self._rows) > MIN_WINDOW_SAMPLES

    @property
    def fills_window(self) -> bool:
        """Whether there have been enough samples for any cause to be seen."""
        return len(self._rows) > WINDOW_SAMPLES

    def excuse_wait(self, now: float) -> None:
        """Count the wait until now as progress: another rank validates or saves."""
        self._stall.progress(now)

    def stalled(self, now: float) -> Stall | None:
        """Return the present stall, early enough to read the stacks before its limit."""
        return self._stall.check(now, _EARLY_S) if self.rank.connected else None

    def evidence(self, since: float) -> RankEvidence | None:
        """Return the evidence of the newest steps; None while there are too few samples.

        Args:
            since: When the present regime began, in monotonic seconds; earlier samples are left out.
        """
        if self._rows.since(since, _AT, WINDOW_SAMPLES) < MIN_WINDOW_SAMPLES:
            return None
        # Reports arrive some seconds late: a sample after ``since`` may contain only steps from before it.
        self._window = max(1, self._rows.since(since, _ENDED, WINDOW_SAMPLES))
        self._regime = max(1, self._rows.since(since, _ENDED, _KEPT))
        first, last = self._rows[self._window], self._rows[0]
        # Memory grows whether steps are slow or not: all regimes count.
        rows = self._rows.newest(WINDOW_SAMPLES)
        grows_by, grows_for = self._memory.growth(rows[:, _AT], rows[:, _RESIDENT])
        free = self._memory.free_bytes
        return self._between(
            first,
            last,
            self._edges[-1 - self._window],
            before=self._before,
            grows_by=grows_by,
            grows_for_seconds=grows_for,
            full_in_seconds=None if free is None or not grows_by else free / grows_by,
            step_error_seconds=error_of_means(self._rows.newest(self._window + 1), _NS, _STEPS) / 1e9,
            blocked_by=self.rank.blocked_by,
            step_grows_seconds=self._growth.seconds,
            step_grown_seconds=self._growth.grown_seconds,
            step_grows_phase=self._names[self._growth.column] if self._growth.seconds else "",
        )

    def remember(self, until: float) -> None:
        """Use the steps so far as the rank's past for comparisons.

        Args:
            until: The end of the past, in monotonic seconds.
        """
        rows = [row for back in range(len(self._rows)) if (row := self._rows[back])[_AT] <= until]
        if self._first is not None and rows:
            end = healthy_until(self._first, rows, _STEPS, _NS)
            error = error_of_means(np.array(rows[::-1]), _NS, _STEPS) / 1e9
            past = self._between(self._first, end, step_error_seconds=error, switches=self._first_switches)
            self._before = past or self._before
            self._past_end = end.copy()

    def forget(self, since: float) -> None:
        """Drop the past, and begin a new one at ``since``, in monotonic seconds."""
        self._before = self._past_end = None
        later = [back for back in range(len(self._rows)) if self._rows[back][_ENDED] >= since]
        self._first = self._rows[max(later, default=0)].copy() if self._rows else None

    def work(self, usual: Mapping[str, float]) -> RankWork:
        """Return the single steps of the newest evidence, as far as the store still has them.

        Args:
            usual: Seconds by which each phase was always longer than the other ranks'; subtracted.
        """
        count = int(self._rows[0][_STEPS] - self._rows[self._window][_STEPS])
        return host_work(self.rank, min(HISTORY_STEPS, max(MIN_STEPS, count)), usual)

    def collections_in_regime(self) -> list[Pauses]:
        """Return the garbage collections of all this regime's samples by generation; none without a step."""
        if not self._regime:
            return []
        steps = int(self._rows[0][_STEPS] - self._rows[self._regime][_STEPS])
        now, before = self._edges[-1].gc, self._edges[-1 - self._regime].gc
        if steps <= 0 or len(now) != len(before):
            return []
        return [
            Pauses.of(max(0, each.calls - past.calls), max(0, each.ns - past.ns), steps)
            for each, past in zip(now, before, strict=True)
        ]

    def device_work(self, usual: Mapping[str, float]) -> RankWork:
        """Return mean steps on the device, of each of this regime's newest samples; else as :meth:`work`."""
        change = np.maximum(np.diff(self._rows.newest(self._regime + 1), axis=0), 0.0)
        change = change[change[:, _STEPS] > 0]
        spent = change[:, _FIXED + _PHASES : _FIXED + _PHASES + len(self._names)]
        whole = spent.sum(axis=1)
        timed = whole > 0
        step_seconds = change[timed, _NS] / change[timed, _STEPS] / 1e9
        work = (step_seconds / whole[timed])[:, None] * spent[timed]
        return RankWork(
            self.rank.identity.rank,
            {name: column - usual.get(name, 0.0) for name, column in zip(self._names, work.T, strict=True)},
            stage_of(self.rank.totals),
            are_means=True,
        )

    def _follow(self, now: float, wall: float) -> None:
        rank, totals = self.rank, self.rank.totals
        made = (rank.history.seen, totals.train.steps, totals.validate.steps, count_saves(totals))
        if made != self._step_counts:
            # The step ended before its report arrived. The wall clock may have been set in between.
            late = wall - rank.last_step_unix_seconds if made[0] != self._step_counts[0] else 0.0
            self._step_counts = made
            self._ended = now - late if 0 <= late <= _MAX_REPORT_DELAY_S else now
            self._stall.progress(now - min(_MAX_REPORT_DELAY_S, max(0.0, late)))
        self._stall.enter(_DOING[rank.state], now)

    def _record(self, now: float, context: NodeContext, gpu: GpuState) -> None:
        totals = self.rank.totals
        phases = totals.train.phases
        if len(phases) != len(self._names):
            fresh = [name for name in phases if name not in self._names]
            self._names += fresh[: _PHASES - len(self._names)]
        key = self.rank.identity.run, self.rank.identity.rank
        row = self._rows.add()
        row[:_FIXED] = (
            now,
            totals.train.steps,
            totals.train.ns,
            sum(generation.ns for generation in totals.gc),
            totals.checkpoint.ns if totals.checkpoint else 0,
            context.queued.get(key, 0.0),
            context.throttled.get(key, 0.0),
            context.storage.seconds.get(key, 0.0),
            context.memory_seconds,
            gpu.throttled_seconds,
            totals.compiled.ns,
            count_saves(totals),
            context.resident.get(key, 0.0),
            context.exchange_queued.get(key, 0.0),
            self._ended,
            totals.background_saves.ns,
            totals.sync_wait_ns,
            self._gpu.busy_seconds,
            context.ran.get(key, 0.0),
            context.others_ran.get(key, 0.0),
        )
        self._edges.append(WindowEdge.of(totals))
        spent = [phases.get(name, _NO_PHASE) for name in self._names]
        row[_FIXED : _FIXED + len(spent)] = [each.ns for each in spent]
        row[_FIXED + _PHASES : _FIXED + _PHASES + len(spent)] = [each.device_ns for each in spent]
        self._growth.observe(row[_STEPS], row[_NS], row[_FIXED : _FIXED + _PHASES])
        if self._first is None:
            self._first = row.copy()
            self._first_switches = totals.switches
        else:
            used = _FIXED + len(spent)
            whole = np.maximum(row[:used] - self._first[:used], 0.0).tolist()
            waits = self._of_threads(whole)[2:] if whole[_STEPS] > 0 else (0.0, 0.0)
            self.rank.queued_seconds, self.rank.blocked_seconds = waits
            change = np.maximum(row[:_FIXED] - self._rows[1][:_FIXED], 0.0).tolist()
            self._beside_saves.add(_saving(change), int(change[_STEPS]), change[_NS] / 1e9)

    def _between(
        self, first: Float64, last: Float64, edge: WindowEdge | None = None, **others: Any
    ) -> RankEvidence | None:
        """Return the means per step between two samples; None without a step in between.

        Args:
            edge: The totals at the first sample, if the last is the newest; adds what follows from both.
            others: More fields. In one piece: to replace some of so many takes as long as finding the rest.
        """
        # A counter that decreased was reset.
        changes = np.maximum(last - first, 0.0)
        change = changes[: _FIXED + len(self._names)].tolist()
        steps = change[_STEPS]
        if steps <= 0:
            return None
        span = max(1e-9, change[_AT])
        step_seconds = change[_NS] / steps / 1e9
        phases, per_step = self._phase_means(change), _within_steps(change)
        identity, totals = self.rank.identity, self.rank.totals
        ran, others_ran, queued, blocked = self._of_threads(change)
        collected = change[_GC_NS] / steps / 1e9
        facts = window_facts(edge, totals, phases, collected) if edge is not None else {}
        return RankEvidence(
            rank=identity.rank,
            node=identity.node,
            step_seconds=step_seconds,
            phase_seconds=phases,
            device_phase_seconds=device_seconds(self._names, changes[_FIXED + _PHASES :], step_seconds),
            collected_seconds=collected,
            queued_seconds=queued,
            exchange_queued_seconds=change[_EXCHANGE_S] * per_step,
            blocked_seconds=blocked,
            ran_seconds=ran,
            other_threads_seconds=strangers_seconds(ran=ran, others_ran=others_ran, threads=totals.threads),
            throttled_seconds=change[_THROTTLED_S] * per_step,
            disk_seconds=min(change[_DISK_S] * per_step, phases.get("data", 0.0)),
            reclaim_seconds=change[_MEMORY_S] * per_step,
            compiled_seconds=change[_COMPILED_NS] / steps / 1e9,
            checkpoint_seconds=self._saved_per_step(first, last),
            background_save_seconds=_saving(change) * self._beside_saves.extra_seconds,
            on_device=is_on_device(totals),
            hides_script_code=totals.hides_script_code,
            forward_unseen=totals.forward_unseen,
            sync_seconds=change[_SYNC_NS] / steps / 1e9,
            device_busy=min(1.0, change[_BUSY_S] / span) if self._gpu.is_known else None,
            device_throttled=min(1.0, change[_GPU_S] / span),
            device_slowdown=self._gpu.slowdown,
            window_seconds=span,
            loader=totals.loader,
            threads=totals.threads,
            cpus=totals.cpus,
            binding=totals.binding,
            world_size=identity.world_size,
            stage=stage_of(totals),
            **facts,
            **others,
        )

    def _phase_means(self, change: Sequence[float]) -> dict[str, float]:
        steps = change[_STEPS]
        return {name: ns / steps / 1e9 for name, ns in zip(self._names, change[_FIXED:], strict=False)}

    def _of_threads(self, change: Sequence[float]) -> tuple[float, float, float, float]:
        """Return the CPU time of the training thread and of the others, its wait for a CPU, and for these."""
        per_step, totals, phases = _within_steps(change), self.rank.totals, self._phase_means(change)
        ran, others_ran, queued = (change[each] * per_step for each in (_RAN_S, _OTHERS_RAN_S, _QUEUED_S))
        threads, on_device = totals.threads, is_on_device(totals)
        blocked = blocked_seconds(
            phases, ran=ran, queued=queued, others_ran=others_ran, threads=threads, on_device=on_device
        )
        return ran, others_ran, queued, blocked

    def _saved_per_step(self, first: Float64, last: Float64) -> float:
        """Return the time of checkpoints per step between two samples.

        A window contains few checkpoints, and by chance one more or less. So their frequency is taken from
        the whole regime. Their mean length is taken from the window, or from the regime if the window has
        none.
        """
        if not last[_SAVES]:
            return 0.0
        whole = self._first if self._past_end is None or last[_AT] <= self._past_end[_AT] else self._past_end
        if whole is None or last[_SAVES] <= whole[_SAVES] or last[_STEPS] <= whole[_STEPS]:
            return 0.0
        since = first if last[_SAVES] > first[_SAVES] else whole
        saved = last[_SAVED_NS] - since[_SAVED_NS]
        if "checkpoint" in self._names:
            column = _FIXED + self._names.index("checkpoint")
            saved += last[column] - since[column]
        each = max(0.0, saved) / (last[_SAVES] - since[_SAVES])
        return float(each * (last[_SAVES] - whole[_SAVES]) / (last[_STEPS] - whole[_STEPS]) / 1e9)

    def with_sharing(self, seen: RankEvidence) -> RankEvidence:
        """Return a late rank's evidence; other processes on its device, if any, account for the lateness."""
        work = seen.step_seconds * (seen.device_busy or 0.0)
        if not self._gpu.foreign or work <= 0:
            return seen
        return replace(seen, device_shared=min(1.0, seen.late_seconds / work))


def _within_steps(change: Sequence[float]) -> float:
    """Return what makes a mean per step of a kernel's counter, which includes the time between steps."""
    return min(1.0, change[_NS] / 1e9 / max(1e-9, change[_AT])) / change[_STEPS]


def _saving(change: Sequence[float]) -> float:
    """Return for which part of the time between two samples a checkpoint was saved in the background."""
    return min(1.0, change[_BESIDE_NS] / 1e9 / max(1e-9, change[_AT]))
