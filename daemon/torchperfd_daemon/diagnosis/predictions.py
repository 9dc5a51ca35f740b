"""Predicts a run's step time without one of its causes, by replaying the model of its steps. Pure."""

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.robust_statistics import spaced_quantiles
from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork
from torchperfd_daemon.diagnosis.edits import (
    Edit,
    Pauses,
    as_before,
    as_peers,
    at_most,
    both,
    equal_work,
    less_exchange,
    less_host,
    own_work,
    with_own,
    without_pauses,
)
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.step_model import ALONE, Float64, StepModel
from torchperfd_daemon.diagnosis.step_records import RankRecord, fit
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

MIN_GAIN: Final = 0.005
"""A gain below this share of the step is left out."""
# Phases that could neither be removed nor overlapped with others.
_KEPT: Final = frozenset(
    {"forward", "loss", "backward", "optimizer", "zero_grad", "collective_wait", "validate", "other"}
)


class Removed(Enum):
    """The kind of time that is removed from the steps."""

    RANK_EXCESS = "rank excess"
    """One rank's own work gets the distribution of its peers' (:func:`~.edits.as_peers`)."""
    SLOW_RANKS = "slow ranks"
    """The excess of all ranks; only if it is worth more than that of any single one."""
    UNEVEN_WORK = "uneven work"
    """All ranks work equally long in each step."""
    PHASE = "phase"
    """A phase takes no time on any rank: ``data``, ``h2d``, ``checkpoint`` or one of the user's own."""
    GARBAGE_COLLECTION = "garbage collection"
    """The pauses are removed from own work (:func:`~.edits.without_pauses`)."""
    EXCHANGE = "exchange"
    """Collectives take no time after the last rank has arrived."""
    GROWTH = "growth"
    """Own work of all ranks and the exchange get their distribution of the past (:func:`~.edits.as_before`).
    This removes a lack of processors, which slows both, and a slow network."""


_PAUSES: Final = {
    Cause.GARBAGE_COLLECTION: (Removed.GARBAGE_COLLECTION, ""),
    Cause.CHECKPOINT: (Removed.PHASE, "checkpoint"),
}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One prediction. Times are means per step in seconds.

    Attributes:
        rank: The rank whose excess is removed; None if the time is removed from all ranks.
        phase: The phase; for a rank, the one that exceeds its peers' most. Empty without one.
        gain_seconds: The measured step less the predicted one; never negative.
        is_part: Whether this is part of the time that the last answer before it with ``is_part=False``
            removes.
    """

    removed: Removed
    rank: int | None
    phase: str
    step_seconds: float
    gain_seconds: float
    is_part: bool = False

    @property
    def speedup(self) -> float:
        """The measured step divided by the predicted one."""
        return (self.step_seconds + self.gain_seconds) / self.step_seconds if self.step_seconds else 1.0


@dataclass(frozen=True, slots=True)
class Predictions:
    """A run's replayed steps, and predictions without each cause.

    Attributes:
        synchronous: Whether ranks wait for one another. If not, each rank is replayed alone, and the mean of
            the slowest rank is the run's.
        step_seconds: The measured mean step of the slowest rank.
        replayed_seconds: The mean step by the model, with nothing removed.
        answers: The greatest gain first; only those of at least :data:`MIN_GAIN`. An answer that is part of
            another one follows it.
        on_device: Whether steps on the devices were replayed, each the mean of a second's.
    """

    ranks: int
    steps: int
    synchronous: bool
    step_seconds: float
    replayed_seconds: float
    answers: tuple[WhatIf, ...]
    on_device: bool = False

    def with_growth_of(self, other: "Predictions") -> "Predictions":
        """Return this with the growth that another replay of the same run removes, if it removes any."""
        grown = next((each for each in other.answers if each.removed is Removed.GROWTH), None)
        if grown is None:
            return self
        grown = replace(grown, step_seconds=max(0.0, self.step_seconds - grown.gain_seconds))
        return self._with_answers([*self.answers, grown])

    def as_judged(self, verdicts: Sequence[Verdict]) -> "Predictions":
        """Return these of devices for the step that the verdicts on the run have, with their costs of pauses.

        A device's steps are known by the means of single seconds. A second with a long step has fewer steps
        and counts as much, so that their mean is too short, and pauses that a few of the steps have do not
        show in it.

        Args:
            verdicts: The first one has the run's step.
        """
        step = verdicts[0].step_seconds if verdicts else 0.0
        judged = self._scaled(step / self.step_seconds) if step > 0 and self.step_seconds > 0 else self
        answers = [*judged.answers]
        for verdict in verdicts:
            pause = _PAUSES.get(verdict.cause)
            if pause is None or verdict.cost_seconds_per_step <= 0:
                continue
            gain = min(judged.step_seconds, verdict.share * judged.step_seconds)
            answers = [each for each in answers if (each.removed, each.phase) != pause]
            answers.append(WhatIf(pause[0], None, pause[1], judged.step_seconds - gain, gain))
        return judged._with_answers(answers)

    def _scaled(self, factor: float) -> "Predictions":
        """Return this with all times multiplied."""
        return replace(
            self,
            step_seconds=factor * self.step_seconds,
            replayed_seconds=factor * self.replayed_seconds,
            answers=tuple(
                replace(
                    each,
                    step_seconds=factor * each.step_seconds,
                    gain_seconds=factor * each.gain_seconds,
                )
                for each in self.answers
            ),
        )

    def _with_answers(self, answers: Iterable[WhatIf]) -> "Predictions":
        alone = [replace(each, is_part=False) for each in answers]
        return replace(self, answers=_nested(sorted(alone, key=lambda each: -each.gain_seconds)))


def predict(
    ranks: Sequence[RankWork],
    pauses: Mapping[int, Sequence[Pauses]] | None = None,
    past: Sequence[RankWork] = (),
    *,
    hidden: bool = False,
) -> Predictions:
    """Predict the step time of a run without each kind of time that can be removed.

    Args:
        ranks: The ranks' phases over the same steps; equal columns are the same step.
        pauses: For each rank, its garbage collections by generation.
        past: The same ranks' phases over steps from before the run became slower; empty if it did not.
        hidden: Whether ranks wait for each other in a way that these phases do not show; each rank is then
            replayed alone.

    Raises:
        ValueError: There is no rank, or ranks have different numbers of steps.
    """
    lengths = {len(column) for rank in ranks for column in rank.phase_seconds.values()}
    if len(lengths) != 1:
        raise ValueError("ranks must have the same steps, and at least one phase")
    job = _job_of(ranks, hidden=hidden)
    growth = _Growth(job, _job_of(past, hidden=hidden)) if past else None
    measured = max(rank.step_seconds for rank in job.ranks)
    answers = []
    for removed, rank, phase, after in _candidates(job, growth, pauses or {}):
        gain = min(job.replayed.mean - after, measured)
        if gain >= MIN_GAIN * measured > 0:
            answers.append(WhatIf(removed, rank, phase, measured - gain, gain))
    answers.sort(key=lambda each: -each.gain_seconds)
    alone = max((each.gain_seconds for each in answers if each.removed is Removed.RANK_EXCESS), default=0.0)
    answers = [
        each
        for each in answers
        if each.removed is not Removed.SLOW_RANKS or each.gain_seconds - alone >= MIN_GAIN * measured
    ]
    together = job.model.barrier != ALONE
    return Predictions(len(ranks), lengths.pop(), together, measured, job.replayed.mean, _nested(answers))


def _nested(answers: Sequence[WhatIf]) -> tuple[WhatIf, ...]:
    """Place each answer that is part of a greater one right after it; ``answers`` are sorted descending."""
    wholes: list[list[WhatIf]] = []
    for answer in answers:
        whole = next((each for each in wholes if _overlap(each[0], answer)), None)
        if whole is None:
            wholes.append([answer])
        else:
            whole.append(replace(answer, is_part=True))
    return tuple(answer for whole in wholes for answer in whole)


def _overlap(one: WhatIf, other: WhatIf) -> bool:
    """Return whether two answers remove the same time, as a phase and one rank's excess in it do."""
    kinds = {one.removed, other.removed}
    if kinds == {Removed.RANK_EXCESS, Removed.PHASE}:
        return one.phase == other.phase
    excess = {Removed.RANK_EXCESS, Removed.SLOW_RANKS, Removed.UNEVEN_WORK}
    return len(kinds) == 2 and kinds <= excess


def _job_of(works: Sequence[RankWork], *, hidden: bool) -> Job:
    """Return the job of ranks over the same steps; hidden waits are a rank's own work."""
    phases = [dict(work.phase_seconds) for work in works]
    model = fit(
        [RankRecord(work.rank, each) for work, each in zip(works, phases, strict=True)], least_wait=0.0
    )
    if hidden and model.barrier != ALONE:
        for each in phases:
            waits = [each.pop(name) for name in WAITING if name in each]
            each["other"] = np.sum([each.get("other", np.zeros_like(waits[0])), *waits], axis=0)
        model = fit([RankRecord(work.rank, each) for work, each in zip(works, phases, strict=True)])
    means = [{name: float(column.mean()) for name, column in work.phase_seconds.items()} for work in works]
    ranks = [
        RankEvidence(work.rank, "", sum(each.values()), each, stage=work.stage)
        for work, each in zip(works, means, strict=True)
    ]
    return Job(tuple(ranks), model, has_steps=True)


def _candidates(
    job: Job, growth: "_Growth | None", pauses: Mapping[int, Sequence[Pauses]]
) -> Iterator[tuple[Removed, int | None, str, float]]:
    """Yield what can be removed: its kind, rank and phase, and the mean step without it.

    If a rank's work is most of the growth since the past, the rest of the growth is removed with its excess:
    a rank that computes more takes processors, memory and network from the others.
    """

    def without(places: Collection[int]) -> float:
        return (
            growth.without(places) if growth and growth.is_of(places) else _mean(job, _as_peers(job, places))
        )

    if job.model.barrier != ALONE:
        for place, rank in enumerate(job.ranks):
            yield Removed.RANK_EXCESS, rank.rank, _excess_phase(job, place), without([place])
        yield Removed.SLOW_RANKS, None, "", without(_shortened(job))
        yield Removed.UNEVEN_WORK, None, "", _mean(job, equal_work(job.groups))
        yield Removed.EXCHANGE, None, "collective_wait", _mean(job, less_exchange(math.inf))
    for phase in sorted({name for rank in job.ranks for name in rank.phase_seconds} - _KEPT):
        everywhere = dict.fromkeys(range(len(job.ranks)), math.inf)
        yield Removed.PHASE, None, phase, _mean(job, less_host(everywhere, phase))
    if pauses:
        yield Removed.GARBAGE_COLLECTION, None, "", _mean(job, _without_pauses(job, pauses))
    if growth:
        yield Removed.GROWTH, None, "", growth.without(())


def _mean(job: Job, edit: Edit) -> float:
    return job.edited(edit).replayed.mean


def _as_peers(job: Job, places: Iterable[int]) -> Edit:
    return as_peers({place: _peers(job, place) for place in places})


def _peers(job: Job, place: int) -> list[int]:
    return [other for other in job.stages[job.ranks[place].stage] if other != place]


def _shortened(job: Job) -> list[int]:
    """Return the places of ranks that would work less by at least :data:`MIN_GAIN` of the step."""
    own, usual = own_work(job.model), own_work(_as_peers(job, range(len(job.ranks)))(job.model))
    return np.flatnonzero((own - usual).mean(axis=1) >= MIN_GAIN * job.replayed.mean).tolist()


def _excess_phase(job: Job, place: int) -> str:
    """Return the phase of a rank's own work that exceeds the peers' median mean most."""
    own, peers = (
        job.ranks[place].phase_seconds,
        [job.ranks[each].phase_seconds for each in _peers(job, place)],
    )
    if not peers:
        return ""
    excess = {name: own[name] - statistics.median(each.get(name, 0.0) for each in peers) for name in own}
    return max((name for name in own if name not in WAITING), key=lambda name: excess[name], default="")


def _without_pauses(job: Job, pauses: Mapping[int, Sequence[Pauses]]) -> Edit:
    """Return the edit that removes garbage collections, by rank."""

    def edit(model: StepModel) -> StepModel:
        own = own_work(model).copy()
        for place, rank in enumerate(job.ranks):
            own[place] = without_pauses(own[place], pauses.get(rank.rank, ()))
        return with_own(model, own)

    return edit


class _Growth:
    """The growth of own work and exchange since the past."""

    def __init__(self, job: Job, past: Job) -> None:
        self._job = job
        self._past = past
        self._before = as_before(past.model)
        self._half = (job.replayed.mean - self.without(())) / 2

    def is_of(self, places: Collection[int]) -> bool:
        """Return whether most of the growth is in the own work of the ranks at these places."""

        def edit(model: StepModel) -> StepModel:
            own = own_work(model).copy()
            own[list(places)] = own_work(self._before(model))[list(places)]
            return with_own(model, own)

        return self._job.replayed.mean - _mean(self._job, edit) > self._half

    def without(self, places: Collection[int]) -> float:
        """Return the mean step without the growth, and with ranks working at most as their peers do.

        Work that became shorter gets its past length: a rank that sleeps leaves its processor to the others.
        The result is at least the past's mean step with the same ranks working as their peers did. Steps of
        the past that were longer than every present step are limited to the present lengths.
        """
        now = _mean(self._job, both(self._before, _as_peers(self._job, places)))
        then = _longest_steps(self._past.edited(_as_peers(self._past, places)))
        steps = spaced_quantiles(_longest_steps(self._job), len(then))
        return max(now, float(at_most(then, steps).mean()))


def _longest_steps(job: Job) -> Float64:
    """Return the replayed steps of the rank with the longest mean; shape (steps,)."""
    steps = job.replayed.steps
    longest: Float64 = steps[int(steps.mean(axis=1).argmax())]
    return longest
