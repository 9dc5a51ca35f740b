"""Predicts a run's step time without one of its causes, by replaying the model of its steps. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork
from torchperfd_daemon.diagnosis.edits import (
    Edit,
    Pauses,
    as_before,
    as_peers,
    at_most,
    both,
    equal_work,
    own_work,
    phase_work,
    with_own,
    with_phase,
    without_pauses,
)
from torchperfd_daemon.diagnosis.step_model import ALONE, Float64, StepModel, replay
from torchperfd_daemon.diagnosis.step_records import RankRecord, fit
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

REMOVABLE: Final = ("data", "h2d", "checkpoint")
"""Phases that could be removed, or overlapped with others."""
MIN_GAIN: Final = 0.005
"""A gain below this share of the step is left out."""

_CLOSED: Final = frozenset(
    {"data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad"}
    | {"collective_wait", "validate", "checkpoint", "other"}
)


class Removed(Enum):
    """The kind of time that is removed from the steps."""

    RANK_EXCESS = "rank excess"
    SLOW_RANKS = "slow ranks"
    UNEVEN_WORK = "uneven work"
    PHASE = "phase"
    GARBAGE_COLLECTION = "garbage collection"
    EXCHANGE = "exchange"
    GROWTH = "growth"


_PAUSES: Final = {
    Cause.GARBAGE_COLLECTION: (Removed.GARBAGE_COLLECTION, ""),
    Cause.CHECKPOINT: (Removed.PHASE, "checkpoint"),
}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One prediction. Times are means per step in seconds.

    Attributes:
        removed: The kind of time that is removed.
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

    def with_pauses_of(self, verdicts: Iterable[Verdict]) -> "Predictions":
        """Return this with the costs of pauses that the verdicts on the run have.

        Means of steps on devices do not show pauses that a few of the steps have.
        """
        answers = [*self.answers]
        for verdict in verdicts:
            pause = _PAUSES.get(verdict.cause)
            if pause is None or verdict.cost_seconds_per_step <= 0:
                continue
            gain = min(self.step_seconds, verdict.share * self.step_seconds)
            answers = [each for each in answers if (each.removed, each.phase) != pause]
            answers.append(WhatIf(pause[0], None, pause[1], self.step_seconds - gain, gain))
        return self._with_answers(answers)

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
    """Predict the step time of a run without each cause.

    - A rank's excess: its own work gets the distribution of its peers' (:func:`~.edits.as_peers`). If the
      rank's work is most of the growth since the past, the rest of the growth is removed too: a rank that
      computes more takes processors, memory and network from the others. Work that became shorter meanwhile
      gets its past length: a rank that sleeps leaves its processor to the others. No step becomes shorter
      than the past's steps without the same excess.
    - Slow ranks: the excess of all ranks; reported only if it is worth more than that of any single rank.
    - Uneven work: all ranks work equally long in each step.
    - A phase: it takes no time on any rank. For ``data``, ``h2d``, ``checkpoint`` and the user's own phases.
    - Garbage collection: the pauses are removed from own work (:func:`~.edits.without_pauses`).
    - Exchange: collectives take no time after the last rank has arrived.
    - Growth: own work of all ranks and the exchange get their distribution of the past
      (:func:`~.edits.as_before`). This removes a lack of processors, which slows both, and a slow network.

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
    run = _Run(ranks, hidden=hidden)
    growth = _Growth(run, _Run(past, hidden=hidden)) if past else None
    candidates = [*run.candidates(growth)]
    if pauses:
        candidates.append((Removed.GARBAGE_COLLECTION, None, "", run.mean(run.without_pauses(pauses))))
    if growth:
        candidates.append((Removed.GROWTH, None, "", growth.without(())))
    measured = max(float(np.sum([*rank.phase_seconds.values()], axis=0).mean()) for rank in ranks)
    before = run.mean(_same)
    answers = []
    for removed, number, phase, after in candidates:
        gain = min(before - after, measured)
        if gain >= MIN_GAIN * measured > 0:
            answers.append(WhatIf(removed, number, phase, measured - gain, gain))
    answers.sort(key=lambda each: -each.gain_seconds)
    alone = max((each.gain_seconds for each in answers if each.removed is Removed.RANK_EXCESS), default=0.0)
    answers = [
        each
        for each in answers
        if each.removed is not Removed.SLOW_RANKS or each.gain_seconds - alone >= MIN_GAIN * measured
    ]
    return Predictions(len(ranks), lengths.pop(), run.synchronous, measured, before, _nested(answers))


def _same(model: StepModel) -> StepModel:
    return model


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


class _Run:
    """The model of a run's steps, and its ranks' places in it."""

    def __init__(self, ranks: Sequence[RankWork], *, hidden: bool) -> None:
        self._ranks = ranks
        records = [RankRecord(rank.rank, rank.phase_seconds) for rank in ranks]
        model = fit(records, least_wait=0.0)
        self.synchronous = model.barrier != ALONE and not hidden
        if hidden and model.barrier != ALONE:
            model = fit([RankRecord(0, _without_waits(rank)) for rank in ranks])
        self.model = model
        self.place = {rank.rank: place for place, rank in enumerate(ranks)}

    def mean(self, edit: Edit) -> float:
        """Return the mean step after an edit."""
        return replay(edit(self.model)).mean

    def peers(self, place: int) -> list[int]:
        """Return the places of the other ranks in a rank's pipeline stage."""
        stage = self._ranks[place].stage
        return [other for other, rank in enumerate(self._ranks) if other != place and rank.stage == stage]

    def candidates(self, growth: "_Growth | None") -> "Iterable[tuple[Removed, int | None, str, float]]":
        """Yield what can be removed: its kind, rank and phase, and the mean step without it."""
        if self.synchronous:
            places = range(len(self._ranks))

            def without(ranks: Sequence[int]) -> float:
                if growth and growth.is_of(ranks):
                    return growth.without(ranks)
                return self.mean(self.as_peers(ranks))

            for place, rank in enumerate(self._ranks):
                yield Removed.RANK_EXCESS, rank.rank, self._excess_phase(rank), without([place])
            yield Removed.SLOW_RANKS, None, "", without(self._shortened(places))
            groups = {rank.stage: [*self.peers(place), place] for place, rank in enumerate(self._ranks)}
            yield Removed.UNEVEN_WORK, None, "", self.mean(equal_work([*groups.values()]))
            none = replace(self.model, exchange=np.zeros_like(self.model.exchange))
            yield Removed.EXCHANGE, None, "collective_wait", replay(none).mean
        for phase in self._removable():
            gone = np.zeros_like(phase_work(self.model, phase))
            yield Removed.PHASE, None, phase, replay(with_phase(self.model, phase, gone)).mean

    def as_peers(self, places: Sequence[int]) -> Edit:
        """Return the edit by which these ranks work as long as their peers."""
        return as_peers({place: self.peers(place) for place in places})

    def without_pauses(self, pauses: Mapping[int, Sequence[Pauses]]) -> Edit:
        """Return the edit that removes garbage collections, by rank."""

        def edit(model: StepModel) -> StepModel:
            own = own_work(model).copy()
            for rank, kinds in pauses.items():
                if rank in self.place:
                    place = self.place[rank]
                    own[place] = without_pauses(own[place], kinds)
            return with_own(model, own)

        return edit

    def _shortened(self, places: Iterable[int]) -> list[int]:
        """Return the ranks that would work less by at least :data:`MIN_GAIN` of the step."""
        all_places = [*places]
        own, usual = own_work(self.model), own_work(self.as_peers(all_places)(self.model))
        least = MIN_GAIN * replay(self.model).mean
        return [place for place in all_places if float((own[place] - usual[place]).mean()) >= least]

    def _removable(self) -> list[str]:
        """Return the phases that could be removed, including those that the user has named."""
        there = {name for rank in self._ranks for name in rank.phase_seconds}
        return sorted(name for name in there if name in REMOVABLE or name not in _CLOSED)

    def _excess_phase(self, rank: RankWork) -> str:
        """Return the phase of a rank's own work that exceeds the peers' median mean most."""
        others = [each.phase_seconds for each in self._ranks if each is not rank and each.stage == rank.stage]
        if not others:
            return ""

        def excess(name: str) -> float:
            theirs = [float(phases[name].mean()) if name in phases else 0.0 for phases in others]
            return float(rank.phase_seconds[name].mean()) - float(np.median(theirs))

        return max((name for name in rank.phase_seconds if name not in WAITING), key=excess, default="")


def _without_waits(rank: RankWork) -> dict[str, Float64]:
    """Return a rank's phases, in which its wait for others counts as its own work."""
    phases = {name: column for name, column in rank.phase_seconds.items() if name not in WAITING}
    waits = [column for name, column in rank.phase_seconds.items() if name in WAITING]
    return {**phases, "other": np.sum([phases.get("other", np.zeros_like(waits[0])), *waits], axis=0)}


class _Growth:
    """The growth of own work and exchange since the past."""

    def __init__(self, run: _Run, past: _Run) -> None:
        self._run = run
        self._past = past
        self._before = as_before(past.model)
        self._steps = _barrier_steps(run.model)
        self._now = run.mean(_same)
        self._half = (self._now - self.without(())) / 2

    def is_of(self, places: Sequence[int]) -> bool:
        """Return whether most of the growth is in the own work of the ranks at these places."""
        kept: Callable[[StepModel], StepModel] = self._only(places)
        return self._now - self._run.mean(kept) > self._half

    def _only(self, places: Sequence[int]) -> Edit:
        def edit(model: StepModel) -> StepModel:
            own = own_work(model).copy()
            then = own_work(self._before(model))
            own[list(places)] = then[list(places)]
            return with_own(model, own)

        return edit

    def without(self, places: Sequence[int]) -> float:
        """Return the mean step without the growth, and with ranks working at most as their peers do.

        The result is at least the past's mean step with the same ranks working as their peers did. Steps of
        the past that were longer than every present step are limited to the present lengths.
        """
        now = self._run.mean(both(self._before, self._run.as_peers(places)))
        then = _barrier_steps(self._past.as_peers(places)(self._past.model))
        steps = np.quantile(self._steps, (np.arange(len(then)) + 0.5) / len(then), method="hazen")
        return max(now, float(at_most(then, np.sort(steps)).mean()))


def _barrier_steps(model: StepModel) -> Float64:
    """Return the replayed steps of the rank with the longest mean; shape (steps,)."""
    steps = replay(model).steps
    longest: Float64 = steps[int(steps.mean(axis=1).argmax())]
    return longest
