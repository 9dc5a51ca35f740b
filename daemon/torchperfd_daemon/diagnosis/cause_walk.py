"""Walks the table of causes over a job, and keeps the job without what was found. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    Left,
    Row,
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
from torchperfd_daemon.diagnosis.verdict import Cause, of_step

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
        edit: What removes it from the model.
        phase: The phase that contains it; empty for all own work.
        has_grown: Whether it has come with the run's slowdown.
        lasts: Whether it is reported beside a slowdown that it has not come with.
    """

    cause: Cause
    where: RankEvidence
    rank: int | None
    cost_seconds: float
    words: str
    edit: Edit
    phase: str = ""
    has_grown: bool = False
    lasts: bool = False


class Walk:
    """The causes of a job's lost time, found one after the other.

    Args:
        past: The same ranks before the run became slower; None if it did not, or some rank has no past.
    """

    def __init__(self, job: Job, past: Job | None) -> None:
        self.job = job
        self.ranks = job.ranks
        self.rest = job
        """The job without what was found; what is left of its phases has no cause yet."""
        self.found: list[Finding] = []
        self.usual: list[str] = []
        """Causes between :data:`MIN_CAUSE_SHARE` and their own share, in words."""
        self.past = past
        self.pasts = [rank.before for rank in job.ranks if rank.before]
        self.step = job.step_seconds
        self.least = MIN_CAUSE_SHARE * self.step
        self.since_start = not self.pasts
        self._computed = [0.0] * len(job.ranks)
        self.late = [rank.late_seconds for rank in job.ranks]
        """What each rank is late by, without what causes have claimed of that, in seconds."""
        self._with_growth = job
        # What found causes cost on devices beyond what the replay of mean steps shows.
        self._not_replayed = 0.0

    def measure_all(self) -> None:
        """Find all causes that are measured on each rank, in the order of the table."""
        in_background = any(rank.background_save_seconds > rank.checkpoint_seconds for rank in self.ranks)
        are_crowded = all(
            rank.threads and rank.cpus and rank.threads > max(1.0, rank.cpus) for rank in self.ranks
        )
        for row in MEASURED:
            is_background = row.cause is Cause.CHECKPOINT and in_background
            least = CROWDED_SHARE if row.of_machine and are_crowded else 0.0
            self.measure(BACKGROUND if is_background else row, least)

    @property
    def is_state_hidden(self) -> bool:
        """Whether the machine's state is one of the findings."""
        return any(each.cause is CONTENTION.cause for each in self.found)

    @property
    def growth(self) -> float:
        """The growth of the steps that no cause has explained so far, at least 0, in seconds."""
        grown = [each.step_seconds - each.before.step_seconds for each in self.ranks if each.before]
        explained = self.job.replayed.mean - self._with_growth.replayed.mean
        return max(0.0, max(grown, default=0.0) - explained - self._not_replayed)

    def measure(self, row: Row, least: float = 0.0) -> None:
        """Find one cause that is measured on each rank.

        Args:
            least: The least share of the step; 0 stands for the row's own.
        """
        beyond = [
            max(0.0, row.measure(rank, partial(self.rest.left, place)))
            - (max(0.0, row.measure(rank.before, _recorded(rank.before))) if rank.before else 0.0)
            for place, rank in enumerate(self.ranks)
        ]
        beyond = compared = [max(0.0, each) for each in beyond]
        if row.of_machine:
            beyond = compared = [each * self._unclaimed(place) for place, each in enumerate(beyond)]
            if self.job.together:
                compared = _equal_work_waits(self.ranks, beyond)
        if max(compared, default=0.0) <= 0:
            return
        culprit = max(range(len(compared)), key=lambda place: compared[place])
        usual = _usual(compared, culprit)
        alike = usual >= compared[culprit] * (0.5 if self.since_start else row.alike_from)
        if alike or self._is_shared(row, beyond, culprit):
            self.add_alike(row, beyond, compared, culprit, least)
        else:
            excess = compared[culprit] - (usual if self.ranks[culprit].before is None else 0.0)
            self._add_of_rank(row, culprit, excess)
        if row.computes:
            self._computed = [sum(each) for each in zip(self._computed, beyond, strict=True)]

    def _is_shared(self, row: Row, lost: Sequence[float], culprit: int) -> bool:
        """Return whether most of a loss would stay without that of the rank which loses most.

        Ranks that lose time alternately wait for each other: each of them seems to lose less than it does.
        """
        if row.of_machine or row.beside_steps or not self.job.has_steps or not self.job.together:
            return False
        alone = self.job.gain(self._edit(row, {culprit: lost[culprit]}))
        return alone < MOST_OF * self.job.gain(self._edit(row, dict(enumerate(lost))))

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
            compared: The same, by which ranks are compared; the one at ``culprit`` loses most.
            least: The least share of the step; 0 stands for the row's own.
            most: The most that it may cost, in seconds.
        """
        where, taken = self.ranks[culprit], lost[culprit]
        # From one collective to the next, the longest way takes a phase of one rank, or own work of two.
        # These may be other ranks in each step, unless all steps are equal.
        most_lost = (sum(lost) if self.job.has_steps else max(lost)) * (1 if row.phase else 2)
        if self.since_start and most_lost < self.least:
            return
        cost, edit = self._cost_of_all(row, lost, culprit, most)
        least = least or (row.ever_since if self.since_start else MIN_CAUSE_SHARE)
        if cost < least * self.step or cost <= 0:
            if cost >= self.least:
                self.usual.append(f"{duration(cost)} {row.words}, a cause from {least:.0%} on")
            elif taken >= least * self.step and row.phase:
                self.usual.append(f"{duration(taken)} {row.words} while the device works")
            return
        words = f"{of_step(cost, where.step_seconds)} {row.words}"
        if row.of_machine:
            # A rank that waits longer for processors is late for that. One that has always had more work is
            # not late for it after a slowdown.
            usual = _usual(compared, culprit)
            waits = compared if self.since_start else lost
            self.late = [
                max(0.0, late - max(0.0, wait - usual)) for late, wait in zip(self.late, waits, strict=True)
            ]
        elif taken - cost >= _SHOWN_SHARE * cost:
            words += f", {duration(taken - cost)} more while the device works"
        is_state = row.of_machine and self.since_start
        found = Finding(row.cause, where, None, cost, words, edit, row.phase, lasts=row.lasts)
        self.add(found, claims=not is_state)

    def _cost_of_all(self, row: Row, lost: Sequence[float], culprit: int, most: float) -> tuple[float, Edit]:
        """Return what a loss of all ranks costs, and the edit without it; the arguments are as above."""
        where, taken = self.ranks[culprit], lost[culprit]
        edit = self._edit(row, dict(enumerate(lost)))
        # How long the host waits and the device idles is measured; when it launches what is not.
        cost = taken if row.syncs else min(self.job.gain(edit), most)
        if row.peaks and self.job.model.has_device:
            # Means of steps spread a pause over all of them, as if the device's work could hide it.
            cost = max(cost, min(taken, max(0.0, where.idle_seconds)))
        if self.since_start:
            return (self.less_absorbed(where, cost, row)[0] if row.peaks else cost), edit
        if row.of_machine and max(lost) >= EXPLAINED * self.growth > 0 and self.past:
            # A rank has more threads than the measured ones, and the ranks wait for each other.
            return max(cost, self.growth), as_before(self.past.model)
        if row.in_part and cost >= MOST_OF * self.growth > 0:
            return self.growth, edit
        if where.on_device:
            # Devices have worked through what was queued: steps have grown by less than the host lost.
            return min(cost, self.growth), edit
        return cost, edit

    def _add_of_rank(self, row: Row, place: int, excess: float) -> None:
        """Add a loss of one rank, which costs what the others wait for it."""
        where = self.ranks[place]
        cost, edit = self._cost_of_rank(row, place, excess)
        cost, idled = self.less_absorbed(where, cost, row)
        if cost < self.least:
            return
        words = f"{of_step(cost, where.step_seconds)} {row.words}{idled_words(idled)}"
        self.add(Finding(row.cause, where, where.rank, cost, words, edit, row.phase, lasts=row.lasts))
        self.late[place] = max(0.0, self.late[place] - max(cost + idled, excess))

    def _cost_of_rank(self, row: Row, place: int, excess: float) -> tuple[float, Edit]:
        """Return what a loss of one rank costs, and the edit without it."""
        if row.beside_steps or hide_waits(self.ranks):
            return excess, self._edit(row, {place: excess})
        late = self._lateness(place)
        if row.in_part and self.job.together and excess >= MOST_OF * late > 0:
            edit = both(self._edit(row, {place: late}), less_host({place: late}))
            if not row.all_threads:
                return late, edit
            edit = both(edit, less_exchange(self.exchange_growth))
            return max(late, self.job.gain(edit)), edit
        edit = self._edit(row, {place: excess})
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
        rank, late = self.ranks[place], self.late[place]
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
        idle = [each.idle_seconds for each in self.pasts]
        idled = math.inf if math.inf in idle else max(0.0, statistics.median(idle))
        absorbed = min(cost - self.growth, idled)
        return cost - absorbed, absorbed

    @property
    def exchange_growth(self) -> float:
        """The growth of the time that even the last rank to arrive spends in collectives, in seconds.

        If own work has grown on all ranks, the exchange may grow in proportion, since it needs processors
        too. 0 without a past.
        """
        if len(self.pasts) < max(2, len(self.ranks)):
            return 0.0
        pairs = zip(self.ranks, self.pasts, strict=True)
        slower = [now.own_seconds / then.own_seconds for now, then in pairs if then.own_seconds > 0]
        before = min(past.wait_seconds for past in self.pasts) * max(1.0, statistics.median(slower or [1.0]))
        return max(0.0, float(self.rest.model.exchange.mean()) - before)

    def _edit(self, row: Row, seconds: Mapping[int, float]) -> Edit:
        """Return the edit that takes a row's time from ranks, by their places, in seconds per step."""
        if row.syncs and len(seconds) == len(self.ranks):
            return without_syncs
        if row.of_device:
            return less_device(seconds, {place: rank.idle_seconds for place, rank in enumerate(self.ranks)})
        return less_host(seconds, row.phase, peaks=row.peaks)

    def add(self, found: Finding, *, claims: bool = True, ever_since: bool = False) -> None:
        """Add a finding.

        Args:
            claims: Whether its time is not looked at for other causes.
            ever_since: Whether it has not come with the run's slowdown.
        """
        has_grown = found.where.before is not None and not ever_since
        self.found.append(replace(found, has_grown=has_grown))
        if claims:
            self.rest = self.rest.edited(found.edit)
        if has_grown:
            grown = self._with_growth
            self._with_growth = grown.edited(found.edit)
            if found.where.on_device:
                gained = grown.replayed.mean - self._with_growth.replayed.mean
                self._not_replayed += max(0.0, found.cost_seconds - gained)


def idled_words(seconds: float) -> str:
    """Return the time that devices absorb, for a finding's words; empty where there is none."""
    return f", {duration(seconds)} more in time for which devices idled before" if seconds else ""


def _recorded(rank: RankEvidence) -> Left:
    return lambda phase: rank.phase_seconds.get(phase, 0.0)


def _usual(values: Sequence[float], place: int) -> float:
    """Return the median of the values at other places; of a single value, itself."""
    return statistics.median([*values[:place], *values[place + 1 :]] or values)


def _equal_work_waits(ranks: Sequence[RankEvidence], waits: Sequence[float]) -> list[float]:
    """Return how long each rank would wait for a processor if it had no more work than its peers.

    A rank with more work waits longer in proportion. That part of its wait belongs to the work: without it,
    the rank would not be late. It is at most the lateness. A past shows best how the work differs, since less
    of it is a wait then.

    Args:
        waits: Of each rank, in seconds per step.
    """
    # Some of the wait for a processor is in the wait for others.
    works = [
        max(each.own_seconds - each.queued_seconds, MIN_CAUSE_SHARE * each.own_seconds)
        for each in (rank.before or rank for rank in ranks)
    ]
    found = []
    for place, (rank, wait) in enumerate(zip(ranks, waits, strict=True)):
        peers = _usual(works, place)
        more = works[place] / peers if peers > 0 else 1.0
        found.append(max(0.0, wait - rank.late_seconds, wait / max(1.0, more)))
    return found
