"""Walks the table of causes over a job, and keeps the job without what was found. Pure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.cause_table import (
    BACKGROUND,
    CONTENTION,
    CROWDED_SHARE,
    EXPLAINED,
    MEASURED,
    MIN_CAUSE_SHARE,
    MOST_OF,
    Row,
    device_idle,
)
from torchperfd_daemon.diagnosis.edits import (
    Edit,
    as_before,
    both,
    less_device,
    less_exchange,
    less_host,
    without_syncs,
)
from torchperfd_daemon.diagnosis.evidence import RankEvidence, hide_waits
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.verdict import Cause

_SHOWN_SHARE: Final = 0.25
"""Time that the device's work hides is mentioned from this share of the cost on."""
# Steps that have grown by this share of a rank's lateness differ from it only by chance.
_NOT_ABSORBED: Final = 0.9
# So many standard errors; the means of successive samples depend on each other.
_CERTAIN: Final = 4.0


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
        """Causes between :data:`MIN_SHARE` and their own share, in words."""
        self.past = past
        self.step = job.step_seconds
        self.since_start = not any(rank.before for rank in job.ranks)
        self._computed = [0.0] * len(job.ranks)
        self.late = [rank.late_seconds for rank in job.ranks]
        """What each rank is late by, without what causes have claimed of that, in seconds."""
        self._with_growth = job
        # What found causes cost on devices beyond what the replay of mean steps shows.
        self._not_replayed = 0.0

    def measure_all(self) -> None:
        """Find all causes that are measured on each rank, in the order of the table."""
        for row in MEASURED:
            in_background = row.cause is Cause.CHECKPOINT and any(map(_mostly_in_background, self.job.ranks))
            least = (
                CROWDED_SHARE if row.of_machine and all(map(_has_too_many_threads, self.job.ranks)) else 0.0
            )
            self.measure(BACKGROUND if in_background else row, least)

    @property
    def is_state_hidden(self) -> bool:
        """Whether the machine's state is one of the findings."""
        return any(each.cause is CONTENTION.cause for each in self.found)

    @property
    def growth(self) -> float:
        """The growth of the steps that no cause has explained so far, at least 0, in seconds."""
        grown = max(
            (each.step_seconds - each.before.step_seconds for each in self.job.ranks if each.before),
            default=0.0,
        )
        explained = self.job.replayed.mean - self._with_growth.replayed.mean
        return max(0.0, grown - explained - self._not_replayed)

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
        if alike or self._is_shared(row, beyond, culprit):
            self.add_alike(row, beyond, compared, culprit, least)
        else:
            excess = compared[culprit] - (usual if ranks[culprit].before is None else 0.0)
            self._add_of_rank(row, culprit, excess)
        if row.computes:
            for place, seconds in enumerate(beyond):
                self._computed[place] += seconds

    def _is_shared(self, row: Row, lost: Sequence[float], culprit: int) -> bool:
        """Return whether most of a loss would stay without that of the rank which loses most.

        Ranks that lose time alternately wait for each other: each of them seems to lose less than it does.
        """
        if row.of_machine or row.beside_steps or not self.job.has_steps or not self.job.together:
            return False
        alone = self.job.gain(self.edit(row, {culprit: lost[culprit]}))
        return alone < MOST_OF * self.job.gain(self.edit(row, dict(enumerate(lost))))

    def _left(self, place: int) -> Callable[[str], float]:
        return lambda phase: self.rest.left(place, phase)

    def _unclaimed(self, place: int) -> float:
        """Return the part of a rank's runnable time that no cause has claimed which computes itself."""
        own = float(self.rest.own[place])
        runnable = own + self._computed[place]
        return own / runnable if self._computed[place] and runnable > 0 else 1.0

    def add_alike(
        self,
        row: Row,
        lost: list[float],
        compared: list[float],
        culprit: int,
        least: float,
        most: float = math.inf,
    ) -> None:
        """Add a loss of all ranks, if it is large enough.

        Args:
            lost: Of each rank, in seconds per step.
            compared: The same, by which ranks are compared.
            culprit: The place of the rank that loses most.
            least: The least share of the step; 0 stands for the row's own.
            most: The most that it may cost, in seconds.
        """
        where = self.job.ranks[culprit]
        edit = self.edit(row, dict(enumerate(lost)))
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
        elif row.peaks:
            cost, _ = self.less_absorbed(where, cost, row)
        least = least or (row.ever_since if self.since_start else MIN_CAUSE_SHARE)
        if cost < least * self.step or cost <= 0:
            if cost >= MIN_CAUSE_SHARE * self.step:
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
            self.late = [
                max(0.0, late - max(0.0, wait - usual)) for late, wait in zip(self.late, waits, strict=True)
            ]
        is_state = row.of_machine and self.since_start
        self.add(
            row.cause,
            where,
            None,
            cost,
            words,
            edit,
            phase=row.phase,
            lasts=row.lasts,
            claims=not is_state,
        )

    def _add_of_rank(self, row: Row, place: int, excess: float) -> None:
        """Add a loss of one rank, which costs what the others wait for it."""
        where = self.job.ranks[place]
        cost, edit = self._cost_of_rank(row, place, excess)
        cost, idled = self.less_absorbed(where, cost, row)
        if cost < MIN_CAUSE_SHARE * self.step:
            return
        words = f"{duration(cost)} of each {duration(where.step_seconds)} step {row.words}"
        words += idled_words(idled)
        self.add(row.cause, where, where.rank, cost, words, edit, phase=row.phase, lasts=row.lasts)
        self.late[place] = max(0.0, self.late[place] - max(cost + idled, excess))

    def _cost_of_rank(self, row: Row, place: int, excess: float) -> tuple[float, Edit]:
        """Return what a loss of one rank costs, and the edit without it."""
        if row.beside_steps or hide_waits(self.job.ranks):
            return excess, self.edit(row, {place: excess})
        late = self._lateness(place)
        if row.in_part and self.job.together and excess >= MOST_OF * late > 0:
            edit = both(self.edit(row, {place: late}), less_host({place: late}))
            if not row.all_threads:
                return late, edit
            edit = both(edit, less_exchange(self.exchange_growth))
            return max(late, self.job.gain(edit)), edit
        edit = self.edit(row, {place: excess})
        if row.of_device:
            # A rank that is late for its device shows it in the host's times.
            edit = both(edit, less_host({place: excess}))
        cost = min(excess, self.job.gain(edit))
        if row.peaks and self.job.model.has_device:
            # Means of steps spread a pause over all of them, as if the device's work could hide it.
            cost = max(cost, min(excess, max(late, self.growth)))
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
        rank, late = self.job.ranks[place], self.late[place]
        if rank.before is None:
            return late
        grown = rank.own_seconds - rank.before.own_seconds - (rank.late_seconds - late)
        return grown if late >= MOST_OF * grown > MOST_OF * late else late

    def less_absorbed(self, rank: RankEvidence, cost: float, row: Row | None = None) -> tuple[float, float]:
        """Return what a loss costs, and what of it costs nothing because devices idled anyway, in seconds.

        Where hosts cannot keep their devices busy, all devices idle for some of each step. What one rank is
        late by falls into that time first: steps have then certainly grown by less. While its host is
        delayed, a device works through what was queued: a delay costs no more than steps have grown or, if
        only some of the steps have it, than these take longer where they recur.

        Args:
            row: The cause that is measured; None for lateness.
        """
        past = rank.before
        if not rank.on_device:
            return cost, 0.0
        if past is None:
            recurs = row is not None and row.peaks and rank.periodic_seconds > 0
            return min(cost, rank.periodic_seconds) if recurs else cost, 0.0
        if row is not None and not row.of_device:
            return min(cost, self.growth), 0.0
        error = math.hypot(rank.step_error_seconds, past.step_error_seconds)
        if not self.job.together or self.growth + _CERTAIN * error >= _NOT_ABSORBED * cost:
            return cost, 0.0
        pasts = [each.before for each in self.job.ranks if each.before]
        known = all(each.device_busy is not None for each in pasts)
        idled = max(0.0, statistics.median(map(device_idle, pasts))) if known else math.inf
        absorbed = min(cost - self.growth, idled)
        return cost - absorbed, absorbed

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

    def edit(self, row: Row, seconds: Mapping[int, float]) -> Edit:
        """Return the edit that takes a row's time from ranks, by their places, in seconds per step."""
        if row.syncs and len(seconds) == len(self.job.ranks):
            return without_syncs
        if row.of_device:
            idle = {place: device_idle(rank) for place, rank in enumerate(self.job.ranks)}
            return less_device(seconds, idle)
        return less_host(seconds, row.phase, peaks=row.peaks)

    def add(
        self,
        cause: Cause,
        where: RankEvidence,
        rank: int | None,
        cost: float,
        words: str,
        edit: Edit,
        *,
        phase: str = "",
        lasts: bool = False,
        claims: bool = True,
        ever_since: bool = False,
    ) -> None:
        """Add a finding.

        Args:
            where: The rank that is affected most.
            rank: The rank that causes it; None if all are alike.
            cost: In seconds per step.
            phase: The phase that contains it; empty for all own work.
            lasts: Whether it is reported beside a slowdown that it has not come with.
            claims: Whether its time is not looked at for other causes.
            ever_since: Whether it has not come with the run's slowdown.
        """
        has_grown = where.before is not None and not ever_since
        self.found.append(Finding(cause, where, rank, phase, cost, words, edit, has_grown, lasts))
        if claims:
            self.rest = self.rest.edited(edit)
        if has_grown:
            grown = self._with_growth
            self._with_growth = grown.edited(edit)
            if where.on_device:
                gained = grown.replayed.mean - self._with_growth.replayed.mean
                self._not_replayed += max(0.0, cost - gained)


def _has_too_many_threads(rank: RankEvidence) -> bool:
    if not rank.threads or not rank.cpus:
        return False
    return rank.threads > max(1.0, rank.cpus)


def _mostly_in_background(rank: RankEvidence) -> bool:
    return rank.background_save_seconds > rank.checkpoint_seconds


def idled_words(seconds: float) -> str:
    """Return the time that devices absorb, for a finding's words; empty where there is none."""
    return f", {duration(seconds)} more in time for which devices idled before" if seconds else ""


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
    return max(rank.own_seconds - rank.queued_seconds, MIN_CAUSE_SHARE * rank.own_seconds)
