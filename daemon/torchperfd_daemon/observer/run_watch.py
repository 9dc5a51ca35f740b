"""The state of one run that diagnosis keeps: its ranks, its slowdown and the verdicts on it."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd.model.step_account import Account
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.diagnosis.claims import limit_claim
from torchperfd_daemon.diagnosis.detect.straggler import MIN_SHARE, Doing, RankWork, Stall, StepTimes
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.evidence import WARM_STEPS, RankEvidence, by_means
from torchperfd_daemon.diagnosis.remedies import advised_remedy, is_usual
from torchperfd_daemon.diagnosis.verdict import Cause, RunFindings, Verdict
from torchperfd_daemon.diagnosis.verdicts import rank_causes
from torchperfd_daemon.observer.loader_adviser import LoaderAdviser, LoaderSample
from torchperfd_daemon.observer.mean_step import advice_on_mean_step
from torchperfd_daemon.observer.node_context import GpuState, NodeContext
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.observer.slowdown import CauseOnsets, SlowdownTracker
from torchperfd_daemon.observer.stragglers import Lateness, find_lateness, lasting, with_staggered
from torchperfd_daemon.observer.verdict_debouncer import VerdictDebouncer
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.worker_cost import THIS_MACHINE

GpuOf = Callable[[Rank], GpuState]


STEADY_SAMPLES: Final = 10
"""Causes that have stayed the same for so many samples are looked for at every second sample."""


class RunWatch:
    """Follows one run from sample to sample, in memory of fixed size per rank."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.stall: Stall | None = None
        """The longest stall of any rank now."""
        self.stalled_ranks: tuple[int, ...] = ()
        self.lateness = Lateness()
        """The ranks that the others wait for."""
        self.lost: dict[Cause, float] = {}
        """Seconds that each cause has cost the run so far."""
        self._watches: dict[Rank, RankWatch] = {}
        self._times = StepTimes()
        self._speed = SlowdownTracker(self._times)
        self._step_seconds = 0.0
        self._regime = self._speed.since
        self._names: list[tuple[Cause, int | None]] = []
        self._alike = 0
        self._skipped = False
        self._debouncer = VerdictDebouncer()
        self._onsets = CauseOnsets()
        self._adviser = LoaderAdviser(THIS_MACHINE.get)
        self._hang: Verdict | None = None
        self._worst: dict[Cause, Verdict] = {}

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The published verdicts, the most important first; a hang precedes all others."""
        return (self._hang, *self._debouncer.verdicts) if self._hang else self._debouncer.verdicts

    @property
    def findings(self) -> RunFindings:
        """The newest findings, on which triggers act."""
        first = self._debouncer.first
        slowdown = self._speed.slowdown
        return RunFindings(
            self._step_seconds,
            slowdown.normal_seconds if slowdown else self._speed.periodicity.past_step_seconds,
            first.rank if first else None,
            self.lateness.seconds,
            self.lateness.peer_seconds,
            self.stall,
            self.stalled_ranks,
        )

    @property
    def hang(self) -> Verdict | None:
        """The verdict on the present stall; None without a stall, or before its cause is known."""
        return self._hang

    def sample(
        self, ranks: Iterable[Rank], now: float, wall: float, context: NodeContext, gpu_of: GpuOf
    ) -> bool:
        """Record the progress of the ranks; return whether the first verdict has changed.

        Args:
            now: Monotonic seconds.
            wall: Unix seconds.
        """
        known, self._watches = self._watches, {}
        for rank in ranks:
            self._watches[rank] = known.get(rank) or RankWatch(rank, self._times, now)
        ours = frozenset(rank.identity.pid for rank in self._watches)
        for rank, watch in self._watches.items():
            watch.sample(now, wall, context, gpu_of(rank), ours)
        made = self._speed.follow(self._watches.values(), now, wall)
        self._find_stalls(now)
        # Without a new step the evidence is unchanged and must not count as another sample.
        found = self._find_causes(now) if made and self._is_due() else []
        changed = self._debouncer.update(found) if found else False
        if found:
            names = [(each.cause, each.rank) for each in found]
            self._alike = self._alike + 1 if names == self._names else 0
            self._names = names
        if made:
            self._add_costs(made)
        return changed and self._hang is None

    def device_work(self, rank: Rank) -> RankWork | None:
        """Return a rank's newest steps on its device, in means of a second; None without device times."""
        watch = self._watches.get(rank)
        work = watch.device_work({}) if watch else None
        return work if work and any(column.any() for column in work.phase_seconds.values()) else None

    def collections(self, rank: Rank) -> Sequence[Pauses]:
        """Return a rank's garbage collections since its steps last changed; none where that is not known."""
        watch = self._watches.get(rank)
        return watch.collections_in_regime() if watch else ()

    def settle_loader_advice(self) -> SettledAdvice | None:
        """Settle what the run is advised on its loaders, if it is not yet; None while too little was seen.

        Before there are samples, or where there never will be, the mean of all steps decides.
        """
        steps = max((rank.steady_steps for rank in self._watches), default=0)
        if self._adviser.settle() is None and (self.is_over or steps >= WARM_STEPS):
            self._adviser.published = advice_on_mean_step(self._watches)
        self._hand_out_advice()
        return self._adviser.published

    def _hand_out_advice(self) -> None:
        for rank in self._watches:
            rank.loader_advice = self._adviser.published

    def set_hang(self, verdict: Verdict) -> bool:
        """Set the verdict on the present stall; return whether it has changed."""
        before, self._hang = self._hang, verdict
        self._mark_stalled()
        return before is None or lasting(before, verdict.stalled_seconds) != verdict

    @property
    def growth(self) -> Verdict | None:
        """The published verdict on memory that grows; None without one."""
        found = (each for each in self._debouncer.verdicts if each.cause is Cause.MEMORY_PRESSURE)
        return next(found, None)

    @property
    def account(self) -> Account | None:
        """The account of the step at the newest sample; None before a verdict was published."""
        first = self._debouncer.first
        return first.account if first else None

    @property
    def is_over(self) -> bool:
        """Whether all ranks have finished or left."""
        return all(rank.has_ended for rank in self._watches)

    def final(self) -> Verdict | None:
        """Return the costliest verdict of a run; None if it cost less than :data:`MIN_SHARE` of the steps.

        Its evidence is from the last window in which it held, plus means over the whole run.
        """
        worst = max(self._worst, key=lambda cause: self.lost[cause], default=None)
        trained = max((rank.totals.train.ns / 1e9 for rank in self._watches), default=0.0)
        if worst is None or self.lost[worst] < MIN_SHARE * trained:
            return None
        found, last = self._worst[worst], [*map(self._debouncer.newest, self._debouncer.verdicts)]
        if found.cause is Cause.CPU_CONTENTION:
            # A switch is the owner's to change, and the state of the machine is not.
            found = next((each for each in last if each.cause is Cause.DEBUG_SWITCH), found)
        first = self._with_advice(found)
        if first.cause is Cause.HANG:
            return first
        # Costs add up only if they are from the same window.
        others = tuple(each for each in last if each is not found) if found in last else ()
        when = f"in its last {first.window_seconds:.0f} s " if first.window_seconds else ""
        words = f"{when}{first.evidence}{self._whole_run_text(first)}{why_first(first, others)}"
        return replace(first, evidence=words, window_seconds=0.0, others=others)

    def _with_advice(self, verdict: Verdict) -> Verdict:
        """Return the verdict on an ended run with the advice on its loader, settled now if not before."""
        settled = self.settle_loader_advice() if verdict.cause is Cause.INPUT_BOUND else None
        if settled is None or settled.advice is None or not is_usual(verdict.fix):
            return verdict
        remedy = advised_remedy(settled.advice, verdict.cost_seconds_per_step)
        return replace(verdict, fix=remedy.fix, saves_seconds=remedy.saves_seconds)

    def _whole_run_text(self, verdict: Verdict) -> str:
        """Return the mean time of a verdict's phase over all steps, in words; equals the report's table."""
        named = [rank for rank in self._watches if rank.identity.rank == verdict.rank]
        means = [rank.totals.steady_means() for rank in named or self._watches]
        steps, step_seconds, phases = max(means, key=lambda each: each[1])
        if not steps:
            return ""
        if verdict.phase not in phases:
            return f"; over the whole run a step takes {duration(step_seconds)}"
        spent = duration(phases[verdict.phase])
        return f"; over the whole run {verdict.phase} takes {spent} of each {duration(step_seconds)} step"

    def _is_due(self) -> bool:
        """Return whether to find causes: at every second sample while they and the regime stay the same."""
        regime, self._regime = self._regime, self._speed.since
        if regime != self._regime:
            self._alike = 0
        self._skipped = self._alike >= STEADY_SAMPLES and not self._skipped
        return not self._skipped

    def _find_stalls(self, now: float) -> None:
        here = [watch for watch in self._watches.values() if watch.rank.connected]
        # While a rank saves or validates, the others wait for it: this is not a stall.
        if any(watch.doing is Doing.ELSEWHERE and watch.stalled(now) is None for watch in here):
            for watch in here:
                if watch.doing is Doing.TRAINING:
                    watch.excuse_wait(now)
        stalls = {watch: stall for watch in here if (stall := watch.stalled(now)) is not None}
        self.stall = max(stalls.values(), key=lambda stall: stall.waited_seconds, default=None)
        self.stalled_ranks = tuple(sorted(watch.rank.identity.rank for watch in stalls))
        if self.stall is None:
            self._hang = None
        elif self._hang is not None:
            self._hang = lasting(self._hang, self.stall.waited_seconds)
        self._mark_stalled()

    def _mark_stalled(self) -> None:
        """Set for how long each rank has hung; 0 during a stall that is not a hang."""
        for rank in self._watches:
            hangs = self._hang is not None and self.stall is not None and rank.connected
            rank.stalled_seconds = self.stall.waited_seconds if hangs and self.stall is not None else 0.0
            rank.stopped = rank.stopped and hangs

    def _find_causes(self, now: float) -> list[Verdict]:
        """Return the causes that the newest steps show; empty while there are too few steps for a verdict."""
        seen = {
            watch: evidence
            for watch in self._watches.values()
            if watch.rank.connected
            and watch.doing is not Doing.IDLE
            and (evidence := watch.evidence(self._speed.since)) is not None
        }
        if not seen:
            return []
        window = max(each.window_seconds for each in seen.values())
        steps = {each.rank: each.step_seconds for each in seen.values()}
        usual = self._step_seconds = statistics.median(steps.values())
        periodic = self._speed.periodicity.seconds_per_step
        late = self._with_lateness(seen)
        if periodic:
            late = [replace(each, periodic_seconds=periodic) for each in late]
        ranks = with_staggered([*zip(seen, late, strict=True)])
        works = {} if by_means(ranks) else {watch.rank.identity.rank: watch.work({}) for watch in seen}
        self._adviser.observe([*_loader_samples(ranks)])
        self._hand_out_advice()
        verdicts = [
            replace(
                verdict,
                window_seconds=window,
                step_seconds=usual if verdict.rank is None else steps.get(verdict.rank, usual),
            )
            for verdict in rank_causes(self.run, ranks, self._adviser, works)
        ]
        if verdicts[0].cause is Cause.NONE:
            # A slowdown that is too gradual for the onset detector.
            slower = self._speed.periodicity.slower_than_ever(self.run)
            verdicts[0] = replace(slower, step_seconds=usual) if slower else verdicts[0]
        world = max(each.world_size for each in seen.values())
        slowest = max(seen, key=lambda watch: seen[watch].step_seconds)
        verdicts[0] = limit_claim(
            verdicts[0], ranks, world - len(seen), newest=slowest.rank.newest_step_seconds()
        )
        if self._speed.slowdown is not None:
            here = [watch.rank for watch in self._watches.values() if watch.rank.connected]
            verdicts = self._onsets.date(verdicts, self._speed.slowdown, here, now)
        remark = self._speed.periodicity.remark(verdicts[0])
        if remark:
            verdicts[0] = replace(verdicts[0], evidence=f"{verdicts[0].evidence}; {remark}")
        if verdicts[0].cause is Cause.NONE and not any(watch.fills_window for watch in seen):
            return []
        return verdicts

    def _with_lateness(self, seen: Mapping[RankWatch, RankEvidence]) -> Sequence[RankEvidence]:
        """Return the evidence, with the lateness of each rank that is late beyond chance."""
        known = self.lateness.seconds.keys()
        late = self.lateness = find_lateness([*seen.items()], known, self._speed.periodicity.period)
        return [
            watch.with_sharing(
                replace(
                    evidence,
                    late_seconds=late.seconds[evidence.rank],
                    late_phase=late.phases[evidence.rank],
                    late_ever_since=evidence.rank in late.ever_since,
                )
            )
            if evidence.rank in late.seconds
            else evidence
            for watch, evidence in seen.items()
        ]

    def _add_costs(self, steps: int) -> None:
        """Add the cost of the present verdicts over the given steps."""
        for verdict in self._debouncer.verdicts:
            if verdict.cause is not Cause.NONE:
                self._add_cost(verdict, verdict.cost_seconds_per_step * steps)

    def add_hang_cost(self, seconds: float) -> None:
        """Add seconds to the cost of the present hang, if there is one."""
        if self._hang is not None:
            self._add_cost(self._hang, seconds)

    def _add_cost(self, verdict: Verdict, seconds: float) -> None:
        self.lost[verdict.cause] = self.lost.get(verdict.cause, 0.0) + seconds
        # Live figures are held; an ended run's are of its last window, as its words say.
        self._worst[verdict.cause] = self._debouncer.newest(verdict)


def _loader_samples(ranks: Sequence[RankEvidence]) -> Iterator[LoaderSample]:
    """Yield how ranks wait for their loaders, of those that have any."""
    for rank in ranks:
        if rank.loader is not None:
            data, on_device = rank.phase_seconds.get("data", 0.0), rank.device_busy is not None
            yield LoaderSample(rank.rank, rank.loader, rank.step_seconds, data, on_device)


def why_first(verdict: Verdict, others: Sequence[Verdict]) -> str:
    """Return why an ended run's verdict is its first if another one has a larger share; else nothing."""
    has_larger = any(each.share > verdict.share for each in others)
    return "; of all causes it has cost the whole run most" if has_larger else ""
