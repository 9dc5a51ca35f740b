"""Attributes a run's lost time to causes, one after the other, so that no time counts twice."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.evidence import RankEvidence, wait_for_each_other
from torchperfd_daemon.diagnosis.idle_devices import absorbed, absorbed_words, device_idle, device_work
from torchperfd_daemon.diagnosis.imbalance import find_imbalance
from torchperfd_daemon.diagnosis.memory_growth import full_first
from torchperfd_daemon.diagnosis.remedies import LoaderCounsel, Remedy, loader_remedy, stage_words
from torchperfd_daemon.diagnosis.unclaimed import Unclaimed, equal_work_waits, exchange_growth
from torchperfd_daemon.diagnosis.verdict import (
    INPUT_BOUND_SHARE,
    SCRIPT_CODE_SHARE,
    Cause,
    Verdict,
    next_command,
)

LEAST_SHARE: Final = 0.05
"""A cause that costs a smaller share of the step is not reported."""
EXPLAINED: Final = 0.5
"""A slowdown of which a smaller share has a cause gets the cause ``UNKNOWN``."""
EVER_SINCE: Final[Mapping[Cause, float]] = {
    Cause.INPUT_BOUND: INPUT_BOUND_SHARE,
    Cause.SLOW_IO: INPUT_BOUND_SHARE,
    Cause.CPU_CONTENTION: 0.3,
    Cause.HOST_BOUND: 0.3,
    Cause.SYNCHRONISATION: 0.1,
    Cause.SCRIPT_CODE: SCRIPT_CODE_SHARE,
}
"""Least shares of the step for causes that affect all ranks since the start. Every run has smaller ones."""
_IDLE_DEVICE: Final = 0.5
# The time that a device's work hides is mentioned from this share of the cost on.
_SHOWN_SHARE: Final = 0.25
_NOT_HOST: Final = WAITING | {"data"}
Measure = Callable[[RankEvidence], float]
# Checkpoints do not make the rank that writes them late for a collective: the others wait at another place.
_BESIDE_STEPS: Final = frozenset({Cause.CHECKPOINT})

# These slow all threads of a rank, including those that carry out collectives after the last rank arrives.
_ALL_THREADS: Final = frozenset({Cause.CGROUP_THROTTLING, Cause.CPU_CONTENTION})

# After a slowdown a rank is named unless the median of the others reaches this share of its loss, by default
# half. Ranks that use more processors leave fewer to the others, which then wait as well.
_ALIKE: Final[Mapping[Cause, float]] = {Cause.CPU_CONTENTION: 0.7}

# These come with work that is not measured: checking guards, running graphs for the first time. Or they are
# known from single moments: a device's clock is read once a second.
_TIMED_IN_PART: Final = frozenset({Cause.RECOMPILATION, Cause.GPU_THROTTLING, Cause.SYNCHRONISATION})

# These compute, so that their part of the wait for a processor is in their time.
_WITH_WAIT: Final = frozenset({Cause.GARBAGE_COLLECTION, Cause.RECOMPILATION})

# These are work of the device itself; all other causes delay the host, which the device may not notice.
_OF_DEVICE: Final = frozenset({Cause.GPU_THROTTLING, Cause.GPU_SHARED})

# A cause that explains this share of a rank's lateness gets all of it.
MOST_OF: Final = 0.75

# Ranks whose lateness reaches this share of the longest one differ only by chance.
_AS_LATE: Final = 0.9
# The cause of a rank's lateness, by the phase that contains most of it; SLOW_RANK for other phases.
_OF_PHASE: Final[Mapping[str, Cause]] = {"data": Cause.INPUT_BOUND, "checkpoint": Cause.CHECKPOINT}


class CauseAttribution:
    """Attributes the time of each rank's step to causes, and keeps the time that is left.

    Args:
        worker_cost: Returns the cost of a loader's worker on this machine.
    """

    def __init__(self, run: str, seen: Sequence[RankEvidence], worker_cost: LoaderCounsel) -> None:
        self._worker_cost = worker_cost
        self.verdicts: list[Verdict] = []
        self.usual: list[str] = []
        """Causes between :data:`LEAST_SHARE` and their share in :data:`EVER_SINCE`, in words."""
        self.step_seconds = statistics.median(rank.step_seconds for rank in seen)
        self._run = run
        self._seen = seen
        self._left = {id(rank): Unclaimed(dict(rank.phase_seconds), rank.late_seconds) for rank in seen}
        self.since_start = not any(rank.before for rank in seen)
        self._served_seconds = self.step_seconds
        self._exchange = exchange_growth(seen)
        self._together = wait_for_each_other(seen)

    def left(self, rank: RankEvidence, phase: str) -> float:
        """Return the unclaimed time of a phase; for a rank's past, all its time."""
        left = self._left.get(id(rank))
        return (left.phases if left else rank.phase_seconds).get(phase, 0.0)

    @property
    def lacks_processors(self) -> bool:
        """Whether all ranks have lacked processors since the start."""
        return self._served_seconds < self.step_seconds

    def served(self, measure: Measure) -> Measure:
        """Return a measure without its part of the claimed wait for processors; in a past, the same."""
        left = self._left
        return lambda each: measure(left[id(each)].without_queue(each) if id(each) in left else each)

    def host_seconds(self, rank: RankEvidence) -> float:
        """Return the time for which a rank's device idles during unclaimed work of the host."""
        if rank.device_busy is None or rank.device_busy >= _IDLE_DEVICE:
            return 0.0
        left = self._left.get(id(rank))
        phases = left.phases if left else rank.phase_seconds
        working = sum(seconds for name, seconds in phases.items() if name not in _NOT_HOST)
        return working - device_work(rank)

    def attribute_synchronisation(self) -> None:
        """Add a verdict on devices that idle after the host has waited for them.

        Without that wait the host would have launched the next work meanwhile. A device that idles anyway,
        for the causes so far or because it waits for other ranks, as in the bubble of a pipeline, does not
        idle longer for this one.
        """
        claimed = self._found_seconds

        def idle_after_waits(rank: RankEvidence) -> float:
            if rank.device_busy is None:
                return 0.0
            return min(rank.sync_seconds, device_idle(rank) - (claimed if id(rank) in self._left else 0.0))

        longest = max(self._seen, key=idle_after_waits)
        where = f", most of it in {longest.sync_line}" if longest.sync_line else ""
        words = f"with the device idle after the host has waited for it{where}"
        self.attribute(Cause.SYNCHRONISATION, "", words, idle_after_waits)

    def attribute(
        self,
        cause: Cause,
        phase: str,
        words: str,
        measure: Measure,
        least: float = 0.0,
        *,
        only_alike: bool = False,
    ) -> bool:
        """Determine a cause's cost, add a verdict if it is large enough, and claim its time.

        Args:
            least: The least share of the step; 0 stands for that in :data:`EVER_SINCE`.
            only_alike: Do nothing if one rank loses more than the others.

        Returns:
            Whether anything is lost, and was judged.
        """
        seen = self._seen
        lost = [max(0.0, measure(rank)) for rank in seen]
        if max(lost) <= 0:
            return False
        beyond = [
            max(0.0, seconds - (max(0.0, measure(rank.before)) if rank.before else 0.0))
            for rank, seconds in zip(seen, lost, strict=True)
        ]
        compared = beyond
        if cause is Cause.CPU_CONTENTION:
            beyond = [each * self._left[id(r)].queued_share for r, each in zip(seen, beyond, strict=True)]
            compared = equal_work_waits(seen, beyond) if self._together else beyond
        culprit = max(range(len(seen)), key=lambda index: compared[index])
        rank, cost = seen[culprit], compared[culprit]
        usual = statistics.median(compared[:culprit] + compared[culprit + 1 :]) if len(seen) > 1 else cost
        shares = {} if self.since_start else _ALIKE
        alike = usual >= cost * shares.get(cause, 0.5)
        if only_alike and not alike:
            return False
        if not alike:
            if rank.before is None:
                cost -= usual
            if self._together and cause not in _BESIDE_STEPS:
                late = self._left[id(rank)].late
                if cause in _TIMED_IN_PART:
                    late = self._lateness(rank)
                    cost = late if cost >= MOST_OF * late else cost
                cost = min(cost, late + (self._exchange if cause in _ALL_THREADS else 0.0))
        if cause is Cause.CPU_CONTENTION and not self.since_start:
            waited = max(beyond) if alike else beyond[culprit]
            cost = self._starved(waited, waited if alike else cost)
        elif cause is Cause.SYNCHRONISATION and alike and not self.since_start:
            growth = self._growth()
            cost = growth if cost >= MOST_OF * growth else cost
        hidden = idled = 0.0
        if alike and cause not in _OF_DEVICE:
            hidden = max(0.0, cost - self._most(rank))
            cost -= hidden
        elif not alike and cause not in _BESIDE_STEPS:
            idled = self._absorbed(rank, cost)
            cost -= idled
        cost = min(cost, self._room)
        least = least or (EVER_SINCE.get(cause, LEAST_SHARE) if alike and self.since_start else LEAST_SHARE)
        if cost <= 0 or cost < least * self._served_seconds:
            if cost > 0 and cost >= LEAST_SHARE * self._served_seconds:
                self.usual.append(f"{duration(cost)} {words}, a cause from {least:.0%} on")
            return True
        text = f"{duration(cost)} of each {duration(rank.step_seconds)} step {words}"
        if hidden >= _SHOWN_SHARE * cost:
            text += f", {duration(hidden)} more while the device works"
        text += absorbed_words(idled)
        if self.lacks_processors:
            text += f", {cost / self._served_seconds:.0%} of the time with a processor"
        if cause is Cause.INPUT_BOUND:
            text += stage_words(rank.loader)
        self._add_verdict(cause, rank, None if alike else rank.rank, phase, text, cost)
        if not alike:
            self._claim(rank, cause, cost + idled)
        elif cause in _ALL_THREADS:
            self._exchange = max(0.0, self._exchange - cost)
        if alike and cause is Cause.CPU_CONTENTION:
            self._served_seconds -= cost if self.since_start else 0.0
            # A rank that has always had more work is not late for it after a slowdown.
            waits = compared if self.since_start else beyond
            for each, wait, seconds in zip(seen, waits, beyond, strict=True):
                self._left[id(each)].take_queue(wait - usual, seconds if self.since_start else 0.0)
        # Time that the cause has always taken is in the past's phases too: only the growth is claimed.
        for each, seconds in zip(seen, beyond, strict=True):
            self._left[id(each)].take(phase, seconds)
            if cause in _WITH_WAIT:
                self._left[id(each)].computed += seconds
        return True

    def _remedy(self, cause: Cause, rank: RankEvidence, cost: float) -> Remedy:
        if cause is not Cause.INPUT_BOUND:
            return Remedy()
        return loader_remedy(
            rank.loader,
            rank.step_seconds,
            rank.phase_seconds.get("data", 0.0),
            self._worker_cost,
            most_seconds=cost,
            on_device=rank.device_busy is not None,
            ranks=max(len(self._seen), rank.world_size),
            binding=rank.binding,
        )

    def _absorbed(self, rank: RankEvidence, cost: float) -> float:
        """Return what of one rank's lateness costs nothing, because devices idled anyway."""
        if not rank.on_device or rank.before is None or not self._together:
            return 0.0
        return absorbed(rank, rank.before, cost, self._growth(), self._seen)

    def _most(self, rank: RankEvidence) -> float:
        """Return the most that a delay of all hosts can cost: devices work through what is queued.

        That is the growth of the steps, or the idle time of the device where nothing has grown.
        """
        if not rank.on_device:
            return math.inf
        if rank.before is not None:
            return self._growth()
        if rank.device_busy is None:
            return math.inf
        return max(0.0, rank.step_seconds - device_work(rank) - self._found_seconds)

    @property
    def _room(self) -> float:
        """What the causes so far leave of the step: all together cost no more than it takes."""
        return max(0.0, self.step_seconds - self._found_seconds)

    @property
    def _found_seconds(self) -> float:
        """The cost of all causes so far."""
        return sum(verdict.cost_seconds_per_step for verdict in self.verdicts)

    def _starved(self, waited: float, cost: float) -> float:
        """Return the cost of CPU contention: the whole growth of the steps if the wait is half of it.

        A rank has more threads than the measured ones, and the ranks wait for each other.

        Args:
            waited: The largest growth of any rank's measured wait.
            cost: The cost of that wait alone.
        """
        growth = self._growth()
        return growth if growth > 0 and waited >= EXPLAINED * growth else cost

    def _growth(self) -> float:
        """Return the growth of the steps that no cause has explained so far, at least 0."""
        growth = max(
            (each.step_seconds - each.before.step_seconds for each in self._seen if each.before), default=0.0
        )
        explained = sum(verdict.cost_seconds_per_step for verdict in self.verdicts if verdict.has_grown)
        return max(0.0, growth - explained)

    def _lateness(self, rank: RankEvidence) -> float:
        """Return a rank's unclaimed lateness, or the growth of its own work if that explains the lateness.

        A rank that computes more takes processors from the others. They become slower too, so the rank is
        late by less than its work has grown.
        """
        late = self._left[id(rank)].late
        if rank.before is None:
            return late
        grown = rank.own_seconds - rank.before.own_seconds - (rank.late_seconds - late)
        return grown if late >= MOST_OF * grown > MOST_OF * late else late

    def _claim(self, rank: RankEvidence, cause: Cause, cost: float) -> None:
        """Subtract the cost of a cause from the rank's lateness, and the rest from the exchange."""
        left = self._left[id(rank)]
        if cause in _ALL_THREADS:
            self._exchange -= max(0.0, cost - left.late)
        left.late = max(0.0, left.late - cost)

    def attribute_lateness(self) -> None:
        """Add a verdict on the rank with the largest unclaimed lateness.

        If several ranks are about equally late, the one with the lowest number is named, at every sample.
        """
        longest = max(self._left[id(each)].late for each in self._seen)
        alike = (each for each in self._seen if self._left[id(each)].late >= _AS_LATE * longest)
        rank = min(alike, key=lambda each: each.rank)
        cost, phase = self._left[id(rank)].late, rank.late_phase
        idled = 0.0 if rank.late_ever_since else self._absorbed(rank, cost)
        cost = min(cost - idled, self._room)
        if cost < LEAST_SHARE * self.step_seconds:
            return
        others = [
            each.rank
            for each in self._seen
            if each is not rank and self._left[id(each)].late >= LEAST_SHARE * self.step_seconds
        ]
        text = f"{duration(cost)} of each {duration(rank.step_seconds)} step more than its peers need"
        if phase:
            text += f", most of it in {phase}"
        text += absorbed_words(idled)
        if others:
            text += f"; so {'do' if len(others) > 1 else 'does'} rank {', '.join(map(str, others[:8]))}"
        cause = _OF_PHASE.get(phase, Cause.SLOW_RANK)
        if all(verdict.cause is not cause for verdict in self.verdicts):
            self._add_verdict(cause, rank, rank.rank, phase, text, cost, ever_since=rank.late_ever_since)

    def attribute_imbalance(self) -> None:
        """Add a verdict on a pipeline whose stages work for different times."""
        found = find_imbalance(
            (rank.stage, rank.own_seconds - self._claimed(rank), rank.wait_seconds) for rank in self._seen
        )
        cost = min(found.cost_seconds, self._room) if found and self._together else 0.0
        if found and cost >= LEAST_SHARE * self.step_seconds:
            rank = next(each for each in self._seen if each.stage == found.stage)
            text = found.words(rank.step_seconds)
            self._add_verdict(Cause.PIPELINE_IMBALANCE, rank, None, "", text, cost, ever_since=True)

    def _claimed(self, rank: RankEvidence) -> float:
        """Return how much of a rank's lateness causes have claimed."""
        return rank.late_seconds - self._left[id(rank)].late

    def attribute_exchange(self) -> None:
        """Add a verdict on the growth of the time that even the last rank spends in collectives.

        If main threads wait longer for processors than before, the threads that carry out collectives may as
        well. Twice the wait is subtracted, since they first collect and then distribute.
        """
        cost = min(self._exchange, self._room)
        starved = [max(0.0, r.queued_seconds - r.before.queued_seconds) for r in self._seen if r.before]
        if cost > 0 and cost - 2 * statistics.median(starved) >= LEAST_SHARE * self.step_seconds:
            words = "in collectives after the last rank has arrived, more than before"
            text = f"{duration(cost)} of each {duration(self.step_seconds)} step {words}"
            self._add_verdict(Cause.COLLECTIVE, self._seen[0], None, "collective_wait", text, cost)

    def attribute_growth(self) -> None:
        """Add a verdict on memory that will soon be full.

        Its cost is the unclaimed lateness of the one rank that grows: the kernel has to clear new pages.
        """
        growing = [rank for rank in self._seen if rank.full_in_seconds is not None]
        first = full_first(growing)
        if first is None or any(verdict.cause is Cause.MEMORY_PRESSURE for verdict in self.verdicts):
            return
        rank, full_in = first
        pace, minutes = rank.grows_by / 2**20, full_in / 60
        text = f"memory grows by {pace:.3g} MiB/s and is full in {minutes:.0f} min"
        alike = 2 * len(growing) > len(self._seen) > 1
        cost, left = 0.0, self._left[id(rank)]
        if not alike and rank.late_phase not in _OF_PHASE and left.late >= LEAST_SHARE * self.step_seconds:
            cost, left.late = min(left.late, self._room), 0.0
            text += f"; {duration(cost)} of each {duration(rank.step_seconds)} step more than its peers need"
        named = None if alike else rank.rank
        self._add_verdict(Cause.MEMORY_PRESSURE, rank, named, "", text, cost, ever_since=True)

    def _add_verdict(
        self,
        cause: Cause,
        where: RankEvidence,
        rank: int | None,
        phase: str,
        text: str,
        cost: float,
        *,
        ever_since: bool = False,
    ) -> None:
        has_grown = where.before is not None and not ever_since
        command, remedy = next_command(cause, self._run), self._remedy(cause, where, cost)
        found = Verdict(cause, self._run, where.node, rank, phase, text, cost, command, has_grown=has_grown)
        self.verdicts.append(replace(found, fix=remedy.fix, saves_seconds=remedy.saves_seconds))
