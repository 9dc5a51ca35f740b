"""One run, watched: its ranks, since when it is slower, and the verdicts on it."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis import Cause, RankEvidence, RunFindings, Verdict, rank_causes
from torchperfd_daemon.diagnosis.detect import Doing, Stall, StepTimes
from torchperfd_daemon.diagnosis.detect.straggler import LEAST_SHARE
from torchperfd_daemon.diagnosis.unseen import limit_to_seen
from torchperfd_daemon.observer.hang import lasting
from torchperfd_daemon.observer.lateness import Lateness, find_lateness
from torchperfd_daemon.observer.node_context import GpuState, NodeContext
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.observer.slowdown import Slowdown, SlowdownTracker
from torchperfd_daemon.observer.verdict_debouncer import VerdictDebouncer
from torchperfd_daemon.store import Rank, State
from torchperfd_daemon.worker_cost import THIS_MACHINE

GpuOf = Callable[[Rank], GpuState]


class RunWatch:
    """Follows one run from look to look, in memory of fixed size per rank.

    Args:
        run: Its name.
    """

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
        self._held = VerdictDebouncer()
        self._hang: Verdict | None = None
        self._worst: dict[Cause, Verdict] = {}

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts that hold, the first one first; a hang comes before all."""
        return (self._hang, *self._held.verdicts) if self._hang else self._held.verdicts

    @property
    def findings(self) -> RunFindings:
        """The newest findings, for what acts on them."""
        first = self._held.first
        slowdown = self._speed.slowdown
        return RunFindings(
            self._step_seconds,
            slowdown.normal_seconds if slowdown else self._speed.rhythm.past_step_seconds,
            first.rank if first else None,
            self.lateness.seconds,
            self.lateness.peer_seconds,
            self.stall,
            self.stalled_ranks,
        )

    @property
    def hang(self) -> Verdict | None:
        """The verdict on the present stall; None without a stall, or before one is known."""
        return self._hang

    def look(
        self, ranks: Iterable[Rank], now: float, wall: float, around: NodeContext, gpu_of: GpuOf
    ) -> bool:
        """Take note of what the ranks have done; return whether the first verdict is another one now.

        Args:
            ranks: All ranks of the run that the store has.
            now: Monotonic seconds.
            wall: Unix seconds.
            around: What the collectors say.
            gpu_of: Tells a rank's device.
        """
        known, self._watches = self._watches, {}
        for rank in ranks:
            self._watches[rank] = known.get(rank) or RankWatch(rank, self._times, now)
        ours = frozenset(rank.identity.pid for rank in self._watches)
        for rank, watch in self._watches.items():
            watch.look(now, wall, around, gpu_of(rank), ours)
        made = self._speed.follow(self._watches.values(), now, wall)
        self._look_for_stalls(now)
        # Without a step there is nothing new to judge, however often one looks.
        found = self._judge() if made else []
        changed = self._held.update(found) if found else False
        if made:
            self._charge(made)
        return changed and self._hang is None

    def tell_hang(self, verdict: Verdict) -> bool:
        """Take the verdict on the present stall; return whether it is another one now."""
        before, self._hang = self._hang, verdict
        self._mark_stalled()
        return before is None or lasting(before, verdict.stalled_seconds) != verdict

    @property
    def over(self) -> bool:
        """Whether all ranks have finished or left."""
        return all(not rank.connected or rank.state is State.FINISHED for rank in self._watches)

    def final(self) -> Verdict | None:
        """Return what has cost a run most; None where that is less than :data:`LEAST_SHARE` of its steps.

        Its evidence is of the seconds in which it held last. What the whole run was like is added.
        """
        worst = max(self._worst, key=lambda cause: self.lost[cause], default=None)
        trained = max((rank.totals.train.ns / 1e9 for rank in self._watches), default=0.0)
        if worst is None or self.lost[worst] < LEAST_SHARE * trained:
            return None
        first, last = self._worst[worst], self._held.verdicts
        if first.cause is Cause.HANG:
            return first
        # Costs add up where they are of the same seconds.
        others = tuple(each for each in last if each is not first) if first in last else ()
        when = f"in its last {first.window_seconds:.0f} s " if first.window_seconds else ""
        words = f"{when}{first.evidence}{self._over_the_run(first)}"
        return replace(first, evidence=words, window_seconds=0.0, others=others)

    def _over_the_run(self, verdict: Verdict) -> str:
        """Return what a verdict's phase takes in the mean of all steps, as the report's table has it."""
        named = [rank for rank in self._watches if rank.identity.rank == verdict.rank]
        means = [rank.totals.steady_means() for rank in named or self._watches]
        steps, step_seconds, phases = max(means, key=lambda each: each[1])
        if not steps:
            return ""
        if verdict.phase not in phases:
            return f"; over the whole run a step takes {duration(step_seconds)}"
        spent = duration(phases[verdict.phase])
        return f"; over the whole run {verdict.phase} takes {spent} of each {duration(step_seconds)} step"

    def _look_for_stalls(self, now: float) -> None:
        here = [watch for watch in self._watches.values() if watch.rank.connected]
        # Who saves or validates has the others wait, and that is no stall of theirs.
        if any(watch.doing is Doing.ELSEWHERE and watch.stalled(now) is None for watch in here):
            for watch in here:
                if watch.doing is Doing.TRAINING:
                    watch.hold(now)
        stalls = {watch: stall for watch in here if (stall := watch.stalled(now)) is not None}
        self.stall = max(stalls.values(), key=lambda stall: stall.waited_seconds, default=None)
        self.stalled_ranks = tuple(sorted(watch.rank.identity.rank for watch in stalls))
        if self.stall is None:
            self._hang = None
        elif self._hang is not None:
            self._hang = lasting(self._hang, self.stall.waited_seconds)
        self._mark_stalled()

    def _mark_stalled(self) -> None:
        """Note of each rank for how long it hangs. A pause that is no hang is no state of a rank."""
        for rank in self._watches:
            hangs = self._hang is not None and self.stall is not None and rank.connected
            rank.stalled_seconds = self.stall.waited_seconds if hangs and self.stall is not None else 0.0
            rank.stopped = rank.stopped and hangs

    def _judge(self) -> list[Verdict]:
        """Return what the newest steps point to; nothing while there are too few."""
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
        verdicts = [
            replace(
                verdict,
                window_seconds=window,
                step_seconds=usual if verdict.rank is None else steps.get(verdict.rank, usual),
            )
            for verdict in rank_causes(self.run, self._with_lateness(seen), THIS_MACHINE.get)
        ]
        if verdicts[0].cause is Cause.NONE:
            # What has become slower too slowly for an onset.
            verdicts[0] = self._speed.rhythm.slower_than_ever(self.run) or verdicts[0]
        here = [watch.rank for watch in self._watches.values() if watch.rank.connected]
        world = max((rank.identity.world_size for rank in here), default=0)
        verdicts[0] = limit_to_seen(verdicts[0], list(seen.values()), world - len(here))
        if self._speed.slowdown is not None:
            verdicts = [_dated(verdict, self._speed.slowdown) for verdict in verdicts]
        remark = self._speed.rhythm.remark(verdicts[0])
        if remark:
            verdicts[0] = replace(verdicts[0], evidence=f"{verdicts[0].evidence}; {remark}")
        return verdicts

    def _with_lateness(self, seen: Mapping[RankWatch, RankEvidence]) -> Sequence[RankEvidence]:
        """Return the evidence with what each rank is late by, where that is beyond chance."""
        known = self.lateness.seconds.keys()
        late = self.lateness = find_lateness([*seen.items()], known, self._speed.rhythm.period)
        return [
            watch.shared(
                replace(
                    evidence,
                    late_seconds=late.seconds[evidence.rank],
                    late_phase=late.phases[evidence.rank],
                    late_ever_since=late.ever_since,
                )
            )
            if evidence.rank in late.seconds
            else evidence
            for watch, evidence in seen.items()
        ]

    def _charge(self, steps: int) -> None:
        """Add up what the present verdicts cost."""
        for verdict in self._held.verdicts:
            if verdict.cause is not Cause.NONE:
                self._lose(verdict, verdict.cost_seconds_per_step * steps)

    def stand(self, seconds: float) -> None:
        """Add to what the present hang has cost."""
        if self._hang is not None:
            self._lose(self._hang, seconds)

    def _lose(self, verdict: Verdict, seconds: float) -> None:
        self.lost[verdict.cause] = self.lost.get(verdict.cause, 0.0) + seconds
        self._worst[verdict.cause] = verdict


def _dated(verdict: Verdict, slowdown: Slowdown) -> Verdict:
    if not verdict.has_grown:
        return verdict
    return replace(
        verdict,
        evidence=f"{verdict.evidence}, since step {slowdown.step}",
        onset_step=slowdown.step,
        onset_unix_seconds=slowdown.unix_seconds,
    )
