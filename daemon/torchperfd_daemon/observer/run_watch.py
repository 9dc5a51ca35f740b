"""One run, watched: its ranks, since when it is slower, and the verdicts on it."""

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis import Cause, RankEvidence, Verdict, rank_causes
from torchperfd_daemon.diagnosis.detect import (
    Doing,
    Onset,
    OnsetDetector,
    Stall,
    StepTimes,
    find_stragglers,
)
from torchperfd_daemon.diagnosis.detect.straggler import (
    LEAST_SHARE,
    LEAST_STEPS,
    WAITING,
    RankWork,
    Straggler,
)
from torchperfd_daemon.diagnosis.unseen import limit_to_seen
from torchperfd_daemon.diagnosis.verdict import in_ms
from torchperfd_daemon.observer.hang import lasting
from torchperfd_daemon.observer.held import Held
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.observer.rhythm import Rhythm
from torchperfd_daemon.observer.surroundings import GpuState, Surroundings
from torchperfd_daemon.store import HISTORY_STEPS, Rank, State
from torchperfd_daemon.worker_cost import THIS_MACHINE

NEW_NORMAL_S: Final = 600.0
"""A run that has been slower for so long is as it is: its past begins anew."""

_RECOVERED: Final = 1.05
_NORMAL_STEPS: Final = 256
_MOST_SUSPECTS: Final = 8
_MOST_PEERS: Final = 56
_MARKS: Final = 256

GpuOf = Callable[[Rank], GpuState]

_TIMED: Final = (
    attrgetter("throttled_seconds"),
    attrgetter("collected_seconds"),
    attrgetter("compiled_seconds"),
)
"""What takes time within a rank's own work and measures it."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Since when a run is slower than it was.

    Attributes:
        step: Index of the first slower step.
        unix_seconds: When that step ended.
        normal_seconds: What a step took before.
        told_at: When it was certain; monotonic seconds.
    """

    step: int
    unix_seconds: float
    normal_seconds: float
    told_at: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """How many steps the onset detector had been given at a look, how many there were, and when."""

    fed: int
    seen: int
    unix_seconds: float


class RunWatch:
    """Follows one run from look to look, in memory of fixed size per rank.

    Args:
        run: Its name.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.stall: Stall | None = None
        """The longest stall of any rank now."""
        self.stragglers: dict[int, float] = {}
        """Ranks that the others wait for, with the seconds per step that they are late by."""
        self.lost: dict[Cause, float] = {}
        """Seconds that each cause has cost the run so far."""
        self.slowdown: Slowdown | None = None
        self._watches: dict[Rank, RankWatch] = {}
        self._times = StepTimes()
        self._onsets = OnsetDetector()
        self._rhythm = Rhythm()
        self._leader: Rank | None = None
        self._seen = self._fed = 0
        self._marks: deque[_Mark] = deque(maxlen=_MARKS)
        self._since = -np.inf
        self._held = Held()
        self._hang: Verdict | None = None
        self._worst: dict[Cause, Verdict] = {}

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts that hold, the first one first; a hang comes before all."""
        return (self._hang, *self._held.verdicts) if self._hang else self._held.verdicts

    @property
    def hang(self) -> Verdict | None:
        """The verdict on the present stall; None without a stall, or before one is known."""
        return self._hang

    def look(
        self, ranks: Iterable[Rank], now: float, wall: float, around: Surroundings, gpu_of: GpuOf
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
        made = self._follow_steps(now, wall)
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
            return f"; over the whole run a step takes {in_ms(step_seconds)}"
        spent = in_ms(phases[verdict.phase])
        return f"; over the whole run {verdict.phase} takes {spent} of each {in_ms(step_seconds)} step"

    def _follow_steps(self, now: float, wall: float) -> int:
        """Feed one rank's new steps to the detectors that are the run's; return how many there were.

        In synchronous training all steps take the same time, so that the first rank speaks for all.
        """
        leader = min(
            (rank for rank in self._watches if rank.connected and rank.history.seen),
            key=lambda rank: rank.identity.rank,
            default=None,
        )
        if leader is None:
            return 0
        if leader is not self._leader:
            self._leader, self._seen = leader, leader.history.seen
            self._marks.clear()
            self._rhythm = Rhythm()
        made = leader.history.seen - self._seen
        self._seen += made
        if not made:
            return 0
        onset = None
        columns = leader.history.newest(min(made, HISTORY_STEPS))
        self._rhythm.observe(columns)
        for ns in columns.duration_ns:
            self._times.add(ns / 1e9)
            onset = self._onsets.observe(ns / 1e9) or onset
            self._fed += 1
        self._marks.append(_Mark(self._fed, self._seen, wall))
        if onset is not None:
            self._turn(onset, leader, now, wall)
        elif self.slowdown is not None:
            self._end(self.slowdown, leader, now, wall)
        return made

    def _turn(self, onset: Onset, leader: Rank, now: float, wall: float) -> None:
        """Begin another regime: slower than normal, or normal again."""
        step, unix_seconds = self._place(onset, leader)
        self._since = now - max(0.0, wall - unix_seconds)
        normal = self.slowdown.normal_seconds if self.slowdown else onset.before_seconds
        if onset.after_seconds <= normal * _RECOVERED:
            self._accept()
            return
        if self.slowdown is None:
            for watch in self._watches.values():
                watch.remember(self._since)
            self.slowdown = Slowdown(step, unix_seconds, normal, now)

    def _end(self, slowdown: Slowdown, leader: Rank, now: float, wall: float) -> None:
        """Forget a slowdown that is normal by now, or over though its end was too gradual for an onset."""
        if now - slowdown.told_at > NEW_NORMAL_S:
            self._accept()
            return
        newest = leader.history.newest(_NORMAL_STEPS)
        first_unix_seconds = newest.end_unix_ns[0] / 1e9
        if (
            len(newest.duration_ns) == _NORMAL_STEPS
            and first_unix_seconds > slowdown.unix_seconds
            and statistics.fmean(newest.duration_ns) / 1e9 <= slowdown.normal_seconds * _RECOVERED
        ):
            self._since = now - max(0.0, wall - first_unix_seconds)
            self._accept()

    def _accept(self) -> None:
        self.slowdown = None
        for watch in self._watches.values():
            watch.forget(self._since)

    def _place(self, onset: Onset, leader: Rank) -> tuple[int, float]:
        """Return the index of an onset's step since training began, and when it ended in Unix seconds."""
        # What was trained before this daemon came is in the account only.
        unheard = max(0, leader.totals.train.steps - self._seen)
        mark = next((mark for mark in self._marks if mark.fed > onset.step), self._marks[-1])
        step = max(0, mark.seen - (mark.fed - onset.step))
        ago = self._seen - step
        if 0 < ago <= len(leader.history):
            return step + unheard, leader.history.newest(ago).end_unix_ns[0] / 1e9
        return step + unheard, mark.unix_seconds

    def _look_for_stalls(self, now: float) -> None:
        here = [watch for watch in self._watches.values() if watch.rank.connected]
        # Who saves or validates has the others wait, and that is no stall of theirs.
        if any(watch.doing is Doing.ELSEWHERE and watch.stalled(now) is None for watch in here):
            for watch in here:
                if watch.doing is Doing.TRAINING:
                    watch.hold(now)
        stalls = [stall for watch in here if (stall := watch.stalled(now)) is not None]
        self.stall = max(stalls, key=lambda stall: stall.waited_seconds, default=None)
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
            and (evidence := watch.evidence(self._since)) is not None
        }
        if not seen:
            return []
        window = max(each.window_seconds for each in seen.values())
        steps = {each.rank: each.step_seconds for each in seen.values()}
        usual = statistics.median(steps.values())
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
            verdicts[0] = self._rhythm.slower_than_ever(self.run) or verdicts[0]
        here = [watch.rank for watch in self._watches.values() if watch.rank.connected]
        world = max((rank.identity.world_size for rank in here), default=0)
        verdicts[0] = limit_to_seen(verdicts[0], list(seen.values()), world - len(here))
        if self.slowdown is not None:
            verdicts = [self._dated(verdict, self.slowdown) for verdict in verdicts]
        remark = self._rhythm.remark(verdicts[0])
        if remark:
            verdicts[0] = replace(verdicts[0], evidence=f"{verdicts[0].evidence}; {remark}")
        return verdicts

    def _dated(self, verdict: Verdict, slowdown: Slowdown) -> Verdict:
        if not verdict.has_grown:
            return verdict
        return replace(
            verdict,
            evidence=f"{verdict.evidence}, since step {slowdown.step}",
            onset_step=slowdown.step,
            onset_unix_seconds=slowdown.unix_seconds,
        )

    def _with_lateness(self, seen: Mapping[RankWatch, RankEvidence]) -> Sequence[RankEvidence]:
        """Return the evidence with what each rank is late by, where that is beyond chance."""
        suspects = self.stragglers.keys() | _suspects(seen.values())
        self.stragglers = {}
        ranks = list(seen.items())
        if len(ranks) < 2 or not any(each.phase_seconds.get("collective_wait") for _, each in ranks):
            return list(seen.values())
        usual = _usual_lateness(list(seen.values()))
        # A rank that was always slow is late all the same, only not the reason for a slowdown.
        period = self._rhythm.period
        late = _late(ranks, usual, suspects, period) if usual else {}
        ever_since = not late and bool(usual)
        late = late or _late(ranks, {}, suspects, period)
        self.stragglers = {rank: seconds for rank, (seconds, _) in late.items()}
        told = []
        for watch, evidence in ranks:
            if evidence.rank in late:
                seconds, phase = late[evidence.rank]
                evidence = watch.shared(
                    replace(evidence, late_seconds=seconds, late_phase=phase, late_ever_since=ever_since)
                )
            told.append(evidence)
        return told

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


def _suspects(ranks: Collection[RankEvidence]) -> set[int]:
    """Return the ranks of which something that times itself takes more than of most.

    These strike in some steps and spare others, or partly while a rank waits for the others anyway: what is
    left of the lateness varies, and alone would long look like chance.
    """
    found = set()
    for lost in _TIMED:
        usual = statistics.median_low(map(lost, ranks))
        found |= {each.rank for each in ranks if lost(each) - usual >= LEAST_SHARE * each.step_seconds}
    return found


def _late(
    ranks: Sequence[tuple[RankWatch, RankEvidence]],
    usual: Mapping[int, Mapping[str, float]],
    suspects: Collection[int],
    period: int,
) -> dict[int, tuple[float, str]]:
    """Return the ranks that are late beyond chance: seconds per step, and the phase of most of them."""
    own = np.array([each.own_seconds - sum(usual.get(each.rank, {}).values()) for _, each in ranks])
    order = np.argsort(-own)
    middle = float(np.median(own[order[1:]]))
    least = LEAST_SHARE * middle
    if own[order[0]] - middle < least:
        return {}
    # The slowest, and of the others some from all over: a thousand peers tell no more than fifty.
    others = order[_MOST_SUSPECTS :: max(1, len(order) // _MOST_PEERS)]
    chosen = [ranks[index] for index in (*order[:_MOST_SUSPECTS].tolist(), *others.tolist())]
    works = [watch.work(usual.get(evidence.rank, {})) for watch, evidence in chosen]
    found = {each.rank: each.phase for each in _stragglers(works, len(ranks), suspects, period)}
    late = {each.rank: float(seconds) - middle for (_, each), seconds in zip(ranks, own, strict=True)}
    return {rank: (late[rank], phase) for rank, phase in found.items() if late[rank] >= least}


def _stragglers(works: list[RankWork], among: int, suspects: Collection[int], period: int) -> list[Straggler]:
    """Return who is late beyond chance in the whole window, or else in its newest half.

    Where only every so manyth step is slow, no onset soon shortens the window. Until most of it is slow, its
    steps then differ from each other by more than the rank does from its peers.
    """
    found = find_stragglers(works, among, suspects, period)
    if found:
        return found
    # The chance of blaming somebody without reason is shared by both questions.
    return find_stragglers([_newest_half(each) for each in works], 2 * among, suspects, period)


def _newest_half(work: RankWork) -> RankWork:
    """Return the steps of the newest half of a window's time: slow ones are fewer than those before them."""
    steps = LEAST_STEPS
    if work.phase_seconds:
        spent = np.cumsum(np.sum([*work.phase_seconds.values()], axis=0)[::-1])
        steps = max(steps, int(np.count_nonzero(spent <= spent[-1:] / 2)) + 1)
    return RankWork(work.rank, {name: column[-steps:] for name, column in work.phase_seconds.items()})


def _usual_lateness(ranks: Sequence[RankEvidence]) -> dict[int, dict[str, float]]:
    """Return by how much each phase of each rank was longer than the ranks' median before a slowdown.

    What ranks have always differed by is not what has made the run slower. Empty while there is no past.
    """
    before = {each.rank: each.before.phase_seconds for each in ranks if each.before}
    if len(before) < len(ranks):
        return {}
    names = {name for phases in before.values() for name in phases} - WAITING
    middle = {name: statistics.median(each.get(name, 0.0) for each in before.values()) for name in names}
    return {
        rank: {name: phases.get(name, 0.0) - middle[name] for name in names}
        for rank, phases in before.items()
    }
