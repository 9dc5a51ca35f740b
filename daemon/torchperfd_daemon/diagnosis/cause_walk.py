"""Walks the table of causes over a job, and keeps the job without what was found. Pure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis.cause_table import (
    BACKGROUND,
    COLLECTIVES_SHARE,
    CONTENTION,
    EXPLAINED,
    HOST_BOUND,
    LEAST_COLLECTIVES,
    LEAST_SHARE,
    MEASURED,
    MOST_OF,
    SMALL_BATCH,
    SMALL_BATCH_SHARE,
    SYNCHRONISATION,
    UNEVEN_SHARE,
    Row,
    device_idle,
    script_code,
    script_code_phase,
)
from torchperfd_daemon.diagnosis.edits import (
    DATA,
    Edit,
    as_before,
    both,
    equal_work,
    less_device,
    less_exchange,
    less_host,
    without_syncs,
)
from torchperfd_daemon.diagnosis.evidence import RankEvidence, hide_waits
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.memory_growth import full_first
from torchperfd_daemon.diagnosis.step_model import StepModel
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.waits import find_imbalance

_AS_LATE: Final = 0.9
"""Ranks whose lateness reaches this share of the longest one differ only by chance."""
_SHOWN_SHARE: Final = 0.25
"""Time that the device's work hides is mentioned from this share of the cost on."""
_MOST_NAMED: Final = 8
# Steps that have grown by this share of a rank's lateness differ from it only by chance.
_NOT_ABSORBED: Final = 0.9
_HALF: Final = 0.5
# So many standard errors; the means of successive samples depend on each other.
_CERTAIN: Final = 4.0
# The cause of a rank's lateness, by the phase that contains most of it; SLOW_RANK for other phases.
_OF_PHASE: Final[Mapping[str, Cause]] = {DATA: Cause.INPUT_BOUND, "checkpoint": Cause.CHECKPOINT}


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that was found.

    Attributes:
        where: The rank that is affected most.
        rank: The rank that causes it; None if all are alike.
        cost_seconds: The measured step less the replayed one without it.
        words: The evidence.
        edit: What removes it from the model.
        has_grown: Whether it has come with the run's slowdown.
        lasts: Whether it is reported beside a slowdown that it has not come with.
    """

    cause: Cause
    where: RankEvidence
    rank: int | None
    phase: str
    cost_seconds: float
    words: str
    edit: Edit
    has_grown: bool
    lasts: bool = False


class Walk:
    """The causes of a job's lost time, found one after the other.

    Args:
        job: The job as it was measured.
        past: The same ranks before the run became slower; None if it did not, or some rank has no past.
    """

    def __init__(self, job: Job, past: Job | None) -> None:
        self.job = job
        self.rest = job
        """The job without what was found; what is left of its phases has no cause yet."""
        self.found: list[Finding] = []
        self.usual: list[str] = []
        """Causes between :data:`LEAST_SHARE` and their own share, in words."""
        self.past = past
        self.step = job.step_seconds
        self.since_start = not any(rank.before for rank in job.ranks)
        self._computed = [0.0] * len(job.ranks)
        self._late = [rank.late_seconds for rank in job.ranks]
        self._with_growth = job

    def run(self) -> list[Finding]:
        """Return all causes, in the order of the table."""
        for row in MEASURED:
            in_background = row.cause is Cause.CHECKPOINT and any(map(_mostly_in_background, self.job.ranks))
            self.measure(BACKGROUND if in_background else row)
        self.find_script_collectives()
        self.find_memory_growth()
        self.find_synchronisation()
        self.find_lateness()
        self.find_imbalance()
        self.find_uneven_work()
        self.find_exchange()
        self.find_host_bound()
        self.find_script_code()
        self.find_small_batches()
        return self.found

    @property
    def growth(self) -> float:
        """The growth of the steps that no cause has explained so far, at least 0, in seconds."""
        grown = max(
            (each.step_seconds - each.before.step_seconds for each in self.job.ranks if each.before),
            default=0.0,
        )
        explained = self.job.replayed.mean - self._with_growth.replayed.mean
        return max(0.0, grown - explained)

    def measure(self, row: Row, least: float = 0.0) -> None:
        """Find one cause that is measured on each rank.

        Args:
            least: The least share of the step; 0 stands for the row's own.
        """
        ranks = self.job.ranks
        lost = [max(0.0, row.measure(rank, self._left(place))) for place, rank in enumerate(ranks)]
        pasts = [
            max(0.0, row.measure(rank.before, _phases(rank.before))) if rank.before else 0.0 for rank in ranks
        ]
        beyond = [max(0.0, now - then) for now, then in zip(lost, pasts, strict=True)]
        if row.of_machine:
            beyond = [each * self._unclaimed(place) for place, each in enumerate(beyond)]
            compared = _equal_work_waits(ranks, beyond) if self.job.together else beyond
        else:
            compared = beyond
        if max(compared, default=0.0) <= 0:
            return
        culprit = max(range(len(ranks)), key=lambda place: compared[place])
        usual = (
            statistics.median(compared[:culprit] + compared[culprit + 1 :])
            if len(ranks) > 1
            else compared[culprit]
        )
        alike = usual >= compared[culprit] * (0.5 if self.since_start else row.alike_from)
        if alike:
            self._add_alike(row, beyond, compared, culprit, least)
        else:
            excess = compared[culprit] - (usual if ranks[culprit].before is None else 0.0)
            self._add_of_rank(row, culprit, excess)
        if row.computes:
            for place, seconds in enumerate(beyond):
                self._computed[place] += seconds

    def _left(self, place: int) -> Callable[[str], float]:
        return lambda phase: self.rest.left(place, phase)

    def _unclaimed(self, place: int) -> float:
        """Return the part of a rank's runnable time that no cause has claimed which computes itself."""
        own = float(self.rest.own[place])
        runnable = own + self._computed[place]
        return own / runnable if self._computed[place] and runnable > 0 else 1.0

    def _add_alike(
        self,
        row: Row,
        lost: list[float],
        compared: list[float],
        culprit: int,
        least: float,
        most: float = math.inf,
    ) -> None:
        where = self.job.ranks[culprit]
        edit = self._edit(row, dict(enumerate(lost)))
        taken = lost[culprit]
        # How long the host waits and the device idles is measured; when it launches what is not.
        cost = taken if row.syncs else min(self.job.gain(edit), most)
        if row.peaks and self.job.model.has_device:
            # Means of steps spread a pause over all of them, as if the device's work could hide it.
            cost = max(cost, min(taken, self.job.idle(culprit)))
        if row.of_machine and not self.since_start and max(lost) >= EXPLAINED * self.growth > 0 and self.past:
            # A rank has more threads than the measured ones, and the ranks wait for each other.
            cost, edit = max(cost, self.growth), as_before(self.past.model)
        elif not self.since_start and row.in_part and cost >= MOST_OF * self.growth > 0:
            cost = self.growth
        elif not self.since_start and where.on_device:
            # Devices have worked through what was queued: steps have grown by less than the host lost.
            cost = min(cost, self.growth)
        least = least or (row.ever_since if self.since_start else LEAST_SHARE)
        if cost < least * self.step or cost <= 0:
            if cost >= LEAST_SHARE * self.step:
                self.usual.append(f"{duration(cost)} {row.words}, a cause from {least:.0%} on")
            elif taken >= least * self.step and row.phase:
                self.usual.append(f"{duration(taken)} {row.words} while the device works")
            return
        words = f"{duration(cost)} of each {duration(where.step_seconds)} step {row.words}"
        if taken - cost >= _SHOWN_SHARE * cost and not row.of_machine:
            words += f", {duration(taken - cost)} more while the device works"
        if row.of_machine:
            # A rank that waits longer for processors is late for that. One that has always had more work is
            # not late for it after a slowdown.
            usual = statistics.median(compared[:culprit] + compared[culprit + 1 :] or compared)
            waits = compared if self.since_start else lost
            self._late = [
                max(0.0, late - max(0.0, wait - usual)) for late, wait in zip(self._late, waits, strict=True)
            ]
        is_state = row.of_machine and self.since_start
        self._add(row, where, None, cost, words, edit, claims=not is_state)

    def _add_of_rank(self, row: Row, place: int, excess: float) -> None:
        """Add a loss of one rank, which costs what the others wait for it."""
        where = self.job.ranks[place]
        cost, edit = self._cost_of_rank(row, place, excess)
        idled = 0.0 if row.beside_steps else self._absorbed(where, cost)
        cost -= idled
        if cost < LEAST_SHARE * self.step:
            return
        words = f"{duration(cost)} of each {duration(where.step_seconds)} step {row.words}{_idled(idled)}"
        self._add(row, where, where.rank, cost, words, edit)
        self._late[place] = max(0.0, self._late[place] - max(cost + idled, excess))

    def _cost_of_rank(self, row: Row, place: int, excess: float) -> tuple[float, Edit]:
        """Return what a loss of one rank costs, and the edit without it."""
        if row.beside_steps or hide_waits(self.job.ranks):
            return excess, self._edit(row, {place: excess})
        late = self._lateness(place)
        if row.in_part and self.job.together and excess >= MOST_OF * late > 0:
            return late, both(self._edit(row, {place: late}), less_host({place: late}))
        edit = self._edit(row, {place: excess})
        if row.of_device:
            # A rank that is late for its device shows it in the host's times.
            edit = both(edit, less_host({place: excess}))
        cost = min(excess, self.job.gain(edit))
        if row.all_threads and cost < excess:
            # After the last rank has arrived, its threads that carry out collectives are slow as well.
            edit = both(edit, less_exchange(min(excess - cost, self.exchange_growth)))
            cost = min(excess, self.job.gain(edit))
        if row.of_machine and self.past is not None and excess >= EXPLAINED * self.growth > 0:
            # A rank has more threads than the measured ones, and the ranks wait for each other.
            return max(cost, self.growth), as_before(self.past.model)
        return cost, edit

    def _lateness(self, place: int) -> float:
        """Return a rank's unclaimed lateness, or the growth of its own work if that explains the lateness.

        A rank that computes more takes processors from the others. They become slower too, so the rank is
        late by less than its work has grown.
        """
        rank, late = self.job.ranks[place], self._late[place]
        if rank.before is None:
            return late
        grown = rank.own_seconds - rank.before.own_seconds - (rank.late_seconds - late)
        return grown if late >= MOST_OF * grown > MOST_OF * late else late

    def _absorbed(self, rank: RankEvidence, cost: float) -> float:
        """Return what of one rank's lateness costs nothing, because devices idled anyway, in seconds.

        Where hosts cannot keep their devices busy, all devices idle for some of each step. What one rank is
        late by falls into that time first: steps have then certainly grown by less.
        """
        past = rank.before
        if not rank.on_device or past is None or not self.job.together:
            return 0.0
        error = math.hypot(rank.step_error_seconds, past.step_error_seconds)
        if self.growth + _CERTAIN * error >= _NOT_ABSORBED * cost:
            return 0.0
        pasts = [each.before for each in self.job.ranks if each.before]
        known = all(each.device_busy is not None for each in pasts)
        idled = max(0.0, statistics.median(map(device_idle, pasts))) if known else math.inf
        return min(cost - self.growth, idled)

    @property
    def exchange_growth(self) -> float:
        """The growth of the time that even the last rank to arrive spends in collectives, in seconds.

        If own work has grown on all ranks, the exchange may grow in proportion, since it needs processors
        too. 0 without a past.
        """
        pasts = [rank.before for rank in self.job.ranks if rank.before]
        if len(pasts) < max(2, len(self.job.ranks)):
            return 0.0
        slower = [
            now.own_seconds / then.own_seconds
            for now, then in zip(self.job.ranks, pasts, strict=True)
            if then.own_seconds > 0
        ]
        before = min(past.wait_seconds for past in pasts) * max(1.0, statistics.median(slower or [1.0]))
        return max(0.0, float(self.rest.model.exchange.mean()) - before)

    def _edit(self, row: Row, seconds: Mapping[int, float]) -> Edit:
        if row.syncs and len(seconds) == len(self.job.ranks):
            return without_syncs
        if row.of_device:
            idle = {place: device_idle(rank) for place, rank in enumerate(self.job.ranks)}
            return less_device(seconds, idle)
        return less_host(seconds, row.phase, peaks=row.peaks)

    def _add(
        self,
        row: Row,
        where: RankEvidence,
        rank: int | None,
        cost: float,
        words: str,
        edit: Edit,
        *,
        claims: bool = True,
        ever_since: bool = False,
    ) -> None:
        has_grown = where.before is not None and not ever_since
        self.found.append(Finding(row.cause, where, rank, row.phase, cost, words, edit, has_grown, row.lasts))
        if claims:
            self.rest = self.rest.edited(edit)
        if has_grown:
            self._with_growth = self._with_growth.edited(edit)

    def find_script_collectives(self) -> None:
        """Find collectives that the script starts itself, several in each step.

        Their time on the rank that waits least is the exchange; the rest is the wait for the last rank, which
        they do not cause.
        """
        ranks = self.job.ranks
        if min(rank.script_collectives for rank in ranks) < LEAST_COLLECTIVES or not self.job.together:
            return
        seconds = min(rank.script_collective_seconds for rank in ranks)
        seconds = min(seconds, float(self.rest.model.exchange.mean()))
        edit = less_exchange(seconds)
        cost = min(seconds, self.job.gain(edit))
        if cost < COLLECTIVES_SHARE * self.step:
            return
        where = max(ranks, key=lambda rank: rank.script_collective_seconds)
        words = (
            f"{duration(cost)} of each {duration(self.step)} step in {where.script_collectives:.0f}"
            " collectives that the script starts itself"
        )
        words += f", most of them in {where.script_collective_line}" if where.script_collective_line else ""
        row = Row(Cause.SCRIPT_COLLECTIVES, "", lambda *_: 0.0, phase="collective_wait", lasts=True)
        self._add(row, where, None, cost, words, edit, ever_since=True)

    def find_memory_growth(self) -> None:
        """Find memory that will soon be full.

        Its cost is the unclaimed lateness of the one rank that grows: the kernel has to clear new pages.
        """
        ranks = self.job.ranks
        growing = [rank for rank in ranks if rank.full_in_seconds is not None]
        first = full_first(growing)
        if first is None or any(each.cause is Cause.MEMORY_PRESSURE for each in self.found):
            return
        rank, full_in = first
        words = f"memory grows by {rank.grows_by / 2**20:.3g} MiB/s and is full in {full_in / 60:.0f} min"
        alike = 2 * len(growing) > len(ranks) > 1
        place, cost = ranks.index(rank), 0.0
        edit: Edit = less_host({})
        if not alike and rank.late_phase not in _OF_PHASE and self._late[place] >= LEAST_SHARE * self.step:
            edit = less_host({place: self._late[place]})
            cost, self._late[place] = self.job.gain(edit), 0.0
            words += f"; {duration(cost)} of each {duration(rank.step_seconds)} step more than its peers need"
        row = Row(Cause.MEMORY_PRESSURE, "", lambda *_: 0.0)
        self._add(row, rank, None if alike else rank.rank, cost, words, edit, ever_since=True)

    def find_synchronisation(self) -> None:
        """Find devices that idle after the host has waited for them.

        Without that wait the host would have launched the next work meanwhile. A device that idles anyway,
        for the causes so far or because it waits for other ranks, as in the bubble of a pipeline, does not
        idle longer for this one.
        """
        ranks = self.job.ranks
        claimed = self.job.replayed.mean - self.rest.replayed.mean
        idle = [
            max(0.0, min(rank.sync_seconds, device_idle(rank) - claimed))
            if rank.device_busy is not None
            else 0.0
            for rank in ranks
        ]
        if not any(idle):
            return
        longest = ranks[max(range(len(ranks)), key=lambda place: idle[place])]
        where = f", most of it in {longest.sync_line}" if longest.sync_line else ""
        numbers = {id(rank): seconds for rank, seconds in zip(ranks, idle, strict=True)}
        row = Row(
            Cause.SYNCHRONISATION,
            f"{SYNCHRONISATION.words}{where}",
            lambda rank, _: numbers.get(id(rank), max(0.0, min(rank.sync_seconds, device_idle(rank)))),
            ever_since=SYNCHRONISATION.ever_since,
            syncs=True,
            in_part=True,
        )
        self.measure(row)

    def find_lateness(self) -> None:
        """Find the rank with the largest unclaimed lateness.

        If several ranks are about equally late, the one with the lowest number is named, at every sample.
        """
        ranks, late = self.job.ranks, self._late
        alike = [place for place in range(len(ranks)) if late[place] >= _AS_LATE * max(late)]
        place = min(alike, key=lambda each: ranks[each].rank)
        rank, excess = ranks[place], late[place]
        if excess < LEAST_SHARE * self.step:
            return
        edit = both(less_host({place: excess}, peaks=True), self._device_as_peers(place))
        cost = min(excess, self.job.gain(edit)) if self.job.together else excess
        idled = 0.0 if rank.late_ever_since else self._absorbed(rank, cost)
        cost -= idled
        others = [
            each.rank
            for number, each in enumerate(ranks)
            if number != place and late[number] >= LEAST_SHARE * self.step
        ]
        together = self._as_late_as(place)
        if len(together) > 1:
            # Each of several late ranks costs nothing alone, and all of them together what they are late by.
            edit = less_host(together, peaks=True)
            cost = max(cost, min(excess, self.job.gain(edit)))
        if cost < LEAST_SHARE * self.step:
            return
        words = f"{duration(cost)} of each {duration(rank.step_seconds)} step more than its peers need"
        words += f", most of it in {rank.late_phase}" if rank.late_phase else ""
        words += _idled(idled)
        if others:
            named = ", ".join(map(str, others[:_MOST_NAMED]))
            words += f"; so {'do' if len(others) > 1 else 'does'} rank {named}"
        cause = _OF_PHASE.get(rank.late_phase, Cause.SLOW_RANK)
        if all(each.cause is not cause for each in self.found):
            row = Row(cause, "", lambda *_: 0.0, phase=rank.late_phase)
            self._add(row, rank, rank.rank, cost, words, edit, ever_since=rank.late_ever_since)

    def _as_late_as(self, place: int) -> dict[int, float]:
        """Return the ranks of a group that work about as long as a late one, with what they are late by.

        Lateness that may be chance counts here, too: without it the late rank would cost nothing.
        """
        (group,) = (each for each in self.job.groups if place in each)
        own = {each: self.job.ranks[each].own_seconds for each in group}
        usual = own[place] - self._late[place]
        excess = {each: min(seconds - usual, self._late[place]) for each, seconds in own.items()}
        return {each: seconds for each, seconds in excess.items() if seconds >= _HALF * self._late[place]}

    def _device_as_peers(self, place: int) -> Edit:
        """Return the edit by which a rank's device works no longer than its peers'."""

        def edit(model: StepModel) -> StepModel:
            works = model.device.sum(axis=0).mean(axis=1)
            peers = [float(works[each]) for group in self.job.groups if place in group for each in group]
            usual = statistics.median_low(peers)
            if works[place] <= usual:
                return model
            device = model.device.copy()
            device[:, place] *= usual / works[place]
            return model.with_device(device)

        return edit

    def find_imbalance(self) -> None:
        """Find a pipeline whose stages work for different times."""
        # Less what causes have claimed of a rank's lateness.
        found = find_imbalance(
            (rank.stage, rank.own_seconds - (rank.late_seconds - late), rank.wait_seconds)
            for rank, late in zip(self.job.ranks, self._late, strict=True)
        )
        if not found or not self.job.together or found.cost_seconds < LEAST_SHARE * self.step:
            return
        where = next(rank for rank in self.job.ranks if rank.stage == found.stage)
        edit = equal_work([range(len(self.job.ranks))], means=True)
        row = Row(Cause.PIPELINE_IMBALANCE, "", lambda *_: 0.0)
        words = found.words(where.step_seconds)
        self._add(row, where, None, found.cost_seconds, words, edit, ever_since=True)

    def find_uneven_work(self) -> None:
        """Find work that differs from step to step, so that each step waits for another rank."""
        if not self.rest.has_steps or not self.job.together:
            return
        edit = equal_work(self.job.groups)
        cost = min(self.job.gain(edit), self.rest.gain(edit))
        queued = statistics.median(rank.queued_seconds for rank in self.job.ranks)
        if cost - queued < UNEVEN_SHARE * self.step:
            return
        where = max(self.job.ranks, key=lambda rank: rank.wait_seconds)
        words = (
            f"{duration(cost)} of each {duration(self.step)} step waiting for ranks whose work differs from"
            " step to step; no rank is slow by itself"
        )
        row = Row(Cause.UNEVEN_WORK, "", lambda *_: 0.0, lasts=True)
        self._add(row, where, None, cost, words, edit, ever_since=self.growth < EXPLAINED * cost)

    def find_exchange(self) -> None:
        """Find a growth of the time that even the last rank to arrive spends in collectives.

        If main threads wait longer for processors than before, the threads that carry out collectives may as
        well. Twice the wait is subtracted, since they first collect and then distribute.
        """
        ranks, cost = self.job.ranks, self.exchange_growth
        starved = [
            max(0.0, rank.queued_seconds - rank.before.queued_seconds) for rank in ranks if rank.before
        ]
        if cost <= 0 or cost - 2 * statistics.median(starved) < LEAST_SHARE * self.step:
            return
        words = (
            f"{duration(cost)} of each {duration(self.step)} step in collectives after the last rank has"
            " arrived, more than before"
        )
        row = Row(Cause.COLLECTIVE, "", lambda *_: 0.0, phase="collective_wait")
        self._add(row, ranks[0], None, cost, words, less_exchange(cost))

    def find_host_bound(self) -> None:
        """Find devices that idle while their hosts work, and always have."""
        if self.since_start:
            self.measure(HOST_BOUND)

    def find_script_code(self) -> None:
        """Find what the script does between the phases, or as its loss, on most ranks alike.

        What one rank does there more than the others makes it a slow rank. If a device works meanwhile, this
        code need not cost anything.
        """
        ranks = self.job.ranks
        pasts = [rank.before for rank in ranks if rank.before]
        if any(
            each.hides_script_code or each.on_device or each.device_busy is not None
            for each in (*ranks, *pasts)
        ):
            return
        phase = script_code_phase([(rank.phase_seconds, rank.step_seconds) for rank in ranks])
        row = script_code(phase)
        shares = [rank.phase_seconds.get(phase, 0.0) / rank.step_seconds for rank in ranks]
        if pasts and statistics.median_low(shares) < row.ever_since:
            return
        spent = statistics.median_low(self.rest.left(place, phase) for place in range(len(ranks)))
        before = statistics.median_low(past.phase_seconds.get(phase, 0.0) for past in pasts) if pasts else 0.0
        beyond = max(0.0, spent - before)
        if beyond > 0:
            alike = [beyond] * len(ranks)
            least = row.ever_since if is_state_hidden(self) else 0.0
            # What differs between ranks and steps is uneven work.
            self._add_alike(row, alike, alike, 0, least, most=beyond)

    def find_small_batches(self) -> None:
        """Find steps of a few samples that mostly do what every step does, whatever the size of its batch.

        The optimizer's work is of the parameters, not of the samples: a batch of twice the size would need
        half of it for a sample.
        """
        ranks, loader = self.job.ranks, self.job.ranks[0].loader
        size = loader.batch_size if loader is not None else 0
        if not 0 < size <= SMALL_BATCH or self.job.model.has_device or not self.since_start:
            return
        saved = {
            place: (self.rest.left(place, "optimizer") + self.rest.left(place, "zero_grad")) / 2
            for place in range(len(ranks))
        }
        edit = less_host(saved, "optimizer")
        cost = self.job.gain(edit)
        if cost < SMALL_BATCH_SHARE * self.step:
            return
        words = (
            f"{duration(cost)} of each {duration(self.step)} step for a batch of {size}, which one of"
            " twice the size would save: the optimizer takes as long whatever the size of the batch"
        )
        row = Row(Cause.SMALL_BATCHES, "", lambda *_: 0.0, phase="optimizer")
        self._add(row, ranks[0], None, cost, words, edit, ever_since=True)


def _mostly_in_background(rank: RankEvidence) -> bool:
    return rank.background_save_seconds > rank.checkpoint_seconds


def _idled(seconds: float) -> str:
    """Return the time that devices absorb, for a finding's words; empty where there is none."""
    return f", {duration(seconds)} more in time for which devices idled before" if seconds else ""


def is_state_hidden(walk: Walk) -> bool:
    """Return whether the machine's state is one of the findings."""
    return any(each.cause is CONTENTION.cause for each in walk.found)


def _phases(rank: RankEvidence) -> Callable[[str], float]:
    return lambda phase: rank.phase_seconds.get(phase, 0.0)


def _equal_work_waits(ranks: Sequence[RankEvidence], waits: Sequence[float]) -> list[float]:
    """Return how long each rank would wait for a processor if it had no more work than its peers.

    A rank with more work waits longer in proportion. That part of its wait belongs to the work: without it,
    the rank would not be late. It is at most the lateness. A past shows best how the work differs, since less
    of it is a wait then.

    Args:
        waits: Of each rank, in seconds per step.
    """
    works = [_work_seconds(rank.before or rank) for rank in ranks]
    found = []
    for number, (rank, wait) in enumerate(zip(ranks, waits, strict=True)):
        peers = statistics.median(works[:number] + works[number + 1 :]) if len(works) > 1 else 0.0
        more = works[number] / peers if peers > 0 else 1.0
        found.append(max(0.0, wait - rank.late_seconds, wait / max(1.0, more)))
    return found


def _work_seconds(rank: RankEvidence) -> float:
    """Return a rank's own work without its wait for a processor, some of which is in its wait for others."""
    return max(rank.own_seconds - rank.queued_seconds, LEAST_SHARE * rank.own_seconds)
