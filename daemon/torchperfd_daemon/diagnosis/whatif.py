"""Predicts a run's step time without one of its causes, by replaying recorded steps.

In synchronous training a step ends on all ranks when the last of them has arrived at the collectives and
these are complete. So a step is replayed as

    longest own work of any rank + exchange

where a rank's own work is its step less ``collective_wait``, and the exchange is the least
``collective_wait`` of any rank: even the last rank to arrive spends this time. With a cause removed from the
own work, the same formula gives the new step. The prediction is the difference of the two, so that effects
missing from the formula cancel.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork

Float64 = npt.NDArray[np.float64]

REMOVABLE: Final = ("data", "h2d", "checkpoint")
"""Phases that could be removed, or overlapped with others."""
LEAST_GAIN: Final = 0.005
"""A gain below this share of the step is left out."""

_CLOSED: Final = frozenset(
    {"data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad"}
    | {"collective_wait", "validate", "checkpoint", "other"}
)


class Removed(Enum):
    """The kind of time that is removed from the steps."""

    RANK_EXCESS = "rank excess"
    SLOW_RANKS = "slow ranks"
    PHASE = "phase"
    GARBAGE_COLLECTION = "garbage collection"
    EXCHANGE = "exchange"
    GROWTH = "growth"


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of one kind in a rank's training, such as collections of one generation.

    Attributes:
        per_step: The mean number of pauses per step; often far below 1.
        seconds: The mean length of a pause.
    """

    per_step: float
    seconds: float

    @classmethod
    def of(cls, calls: int, ns: int, steps: int) -> "Pauses":
        """Return the pauses of so many steps; ``calls`` may be 0, ``steps`` may not."""
        return cls(calls / steps, ns / calls / 1e9 if calls else 0.0)


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
class Replay:
    """A run's replayed steps, and predictions without each cause.

    Attributes:
        synchronous: Whether ranks wait for one another. If not, each rank is replayed alone, and the mean of
            the slowest rank is the run's.
        step_seconds: The measured mean step of the slowest rank.
        replayed_seconds: The mean step by the formula, with nothing removed.
        answers: The greatest gain first; only those of at least :data:`LEAST_GAIN`. An answer that is part of
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

    def with_growth_of(self, other: "Replay") -> "Replay":
        """Return this with the growth that another replay of the same run removes, if it removes any."""
        grown = next((each for each in other.answers if each.removed is Removed.GROWTH), None)
        if grown is None:
            return self
        grown = replace(grown, step_seconds=max(0.0, self.step_seconds - grown.gain_seconds))
        answers = [replace(each, is_part=False) for each in (*self.answers, grown)]
        return replace(self, answers=_nested(sorted(answers, key=lambda each: -each.gain_seconds)))


def replay(
    ranks: Sequence[RankWork],
    pauses: Mapping[int, Sequence[Pauses]] | None = None,
    past: Sequence[RankWork] = (),
    *,
    hidden: bool = False,
) -> Replay:
    """Predict the step time of a run without each cause.

    - A rank's excess: its own work gets the distribution of its peers' (:func:`as_peers`). If the rank's work
      is most of the growth since the past, the rest of the growth is removed too: a rank that computes more
      takes processors, memory and network from the others. Work that became shorter meanwhile gets its past
      length: a rank that sleeps leaves its processor to the others. No step becomes shorter than the past's
      steps without the same excess.
    - Slow ranks: the excess of all ranks; reported only if it is worth more than that of any single rank.
    - A phase: it takes no time on any rank. For ``data``, ``h2d``, ``checkpoint`` and the user's own phases.
    - Garbage collection: the pauses are removed from own work (:func:`without_pauses`).
    - Exchange: collectives take no time after the last rank has arrived.
    - Growth: own work of all ranks and the exchange get their distribution of the past (:func:`as_before`).
      This removes a lack of processors, which slows both, and a slow network.

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
    run = _Steps(ranks, hidden=hidden)
    growth = _Growth(run, _Steps(past, hidden=hidden)) if past else None
    candidates: list[tuple[Removed, int | None, str, float]] = []
    if run.synchronous:
        mapped = {rank.rank: as_peers(run.own[rank.rank], run.peers(rank.rank)) for rank in ranks}

        def without(less: Mapping[int, Float64]) -> float:
            return growth.without(less) if growth and growth.is_of(less) else run.mean(less)

        candidates += [
            (Removed.RANK_EXCESS, rank.rank, run.excess_phase(rank), without({rank.rank: mapped[rank.rank]}))
            for rank in ranks
        ]
        candidates.append((Removed.SLOW_RANKS, None, "", without(run.shortened(mapped))))
        candidates.append(
            (Removed.EXCHANGE, None, "collective_wait", run.mean({}, np.zeros_like(run.exchange)))
        )
    for phase in run.removable():
        less = {
            rank.rank: run.own[rank.rank] - rank.phase_seconds[phase]
            for rank in ranks
            if phase in rank.phase_seconds
        }
        candidates.append((Removed.PHASE, None, phase, run.mean(less)))
    if pauses:
        less = {
            rank.rank: without_pauses(run.own[rank.rank], pauses[rank.rank])
            for rank in ranks
            if rank.rank in pauses
        }
        candidates.append((Removed.GARBAGE_COLLECTION, None, "", run.mean(less)))
    if growth:
        candidates.append((Removed.GROWTH, None, "", growth.without({})))
    measured, before = run.measured(), run.mean({})
    answers = []
    for removed, number, phase, after in candidates:
        gain = min(before - after, measured)
        if gain >= LEAST_GAIN * measured > 0:
            answers.append(WhatIf(removed, number, phase, measured - gain, gain))
    answers.sort(key=lambda each: -each.gain_seconds)
    alone = max((each.gain_seconds for each in answers if each.removed is Removed.RANK_EXCESS), default=0.0)
    answers = [
        each
        for each in answers
        if each.removed is not Removed.SLOW_RANKS or each.gain_seconds - alone >= LEAST_GAIN * measured
    ]
    return Replay(len(ranks), lengths.pop(), run.synchronous, measured, before, _nested(answers))


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
    return kinds == {Removed.RANK_EXCESS, Removed.SLOW_RANKS}


def as_peers(own: Float64, peers: Sequence[Float64]) -> Float64:
    """Return a rank's own work with the distribution of its peers'.

    The rank's j-th longest step takes the median of the peers' j-th longest steps, unless it is shorter
    already. A rank that is late in some steps then loses these excesses, one that is always late becomes
    faster in all steps, and noise remains.

    Args:
        own: Seconds of own work by step; shape (steps,).
        peers: The same for each other rank. Without peers nothing changes.
    """
    if not peers:
        return own
    return _at_most(own, np.median([np.sort(each) for each in peers], axis=0))


def as_before(now: Float64, past: Float64) -> Float64:
    """Return times with the distribution of the past: each gets the same quantile, unless it is shorter.

    Args:
        now: Seconds by step; shape (steps,).
        past: Seconds by step; shape (earlier steps,), of any length.
    """
    return _at_most(now, np.quantile(past, (np.arange(len(now)) + 0.5) / len(now), method="hazen"))


def _at_most(times: Float64, usual: Float64) -> Float64:
    """Limit the j-th shortest time to the j-th value of ``usual``, which is sorted ascending."""
    order = np.argsort(times, kind="stable")
    mapped = np.empty_like(times)
    mapped[order] = np.minimum(times[order], usual)
    return mapped


def without_pauses(own: Float64, pauses: Sequence[Pauses]) -> Float64:
    """Return a rank's own work without pauses, of which only the number and mean length are known.

    If there is at least one per step, each step loses its share. Rarer pauses are removed from the longest
    steps, which lose at most their excess over the median.

    Args:
        own: Seconds of own work by step; shape (steps,).
        pauses: The pauses, one entry per kind.
    """
    left: Float64 = own.copy()
    for each in pauses:
        if each.per_step >= 1:
            left = np.maximum(0.0, left - each.per_step * each.seconds)
            continue
        count = round(each.per_step * len(left))
        longest = np.argsort(left, kind="stable")[len(left) - count :]
        excess = np.maximum(0.0, left[longest] - np.median(left))
        left[longest] -= np.minimum(each.seconds, excess)
    return left


class _Steps:
    """The steps of a run's ranks, split into own work and exchange."""

    def __init__(self, ranks: Sequence[RankWork], *, hidden: bool) -> None:
        self._ranks = ranks
        self._stages = {rank.rank: rank.stage for rank in ranks}
        totals = {rank.rank: np.sum(list(rank.phase_seconds.values()), axis=0) for rank in ranks}
        waits = {
            rank.rank: np.sum(
                [column for name, column in rank.phase_seconds.items() if name in WAITING]
                or [np.zeros_like(totals[rank.rank])],
                axis=0,
            )
            for rank in ranks
        }
        waiting = any(bool(wait.any()) for wait in waits.values())
        self.synchronous = len(ranks) > 1 and waiting and not hidden
        self.own: dict[int, Float64] = {
            number: totals[number] - waits[number] if self.synchronous else totals[number]
            for number in totals
        }
        self.exchange: Float64 = np.min(list(waits.values()), axis=0)
        self._totals = totals

    def peers(self, number: int) -> list[Float64]:
        """Return the own work of the other ranks in a rank's pipeline stage."""
        stage = self._stages[number]
        return [own for other, own in self.own.items() if other != number and self._stages[other] == stage]

    def measured(self) -> float:
        """Return the mean step of the slowest rank."""
        return max(float(total.mean()) for total in self._totals.values())

    def mean(self, changed: Mapping[int, Float64], exchange: Float64 | None = None) -> float:
        """Return the mean step after replacing some ranks' own work, and optionally the exchange."""
        return float(self.steps(changed, exchange).mean())

    def steps(self, changed: Mapping[int, Float64], exchange: Float64 | None = None) -> Float64:
        """Return the steps after these replacements; for unsynchronised ranks, those of the slowest."""
        own = [changed.get(number, work) for number, work in self.own.items()]
        if not self.synchronous:
            return max(own, key=lambda work: float(work.mean()))
        longest: Float64 = np.max(own, axis=0) + (self.exchange if exchange is None else exchange)
        return longest

    def shortened(self, changed: Mapping[int, Float64]) -> dict[int, Float64]:
        """Return those changes that shorten own work by at least :data:`LEAST_GAIN` of the step."""
        least = LEAST_GAIN * self.measured()
        return {
            number: work
            for number, work in changed.items()
            if float((self.own[number] - work).mean()) >= least
        }

    def removable(self) -> list[str]:
        """Return the phases that could be removed, including those that the user has named."""
        there = {name for rank in self._ranks for name in rank.phase_seconds}
        return sorted(name for name in there if name in REMOVABLE or name not in _CLOSED)

    def excess_phase(self, rank: RankWork) -> str:
        """Return the phase of a rank's own work that exceeds the peers' median mean most."""
        others = [each.phase_seconds for each in self._ranks if each is not rank and each.stage == rank.stage]
        if not others:
            return ""

        def excess(name: str) -> float:
            theirs = [float(phases[name].mean()) if name in phases else 0.0 for phases in others]
            return float(rank.phase_seconds[name].mean()) - float(np.median(theirs))

        return max((name for name in rank.phase_seconds if name not in WAITING), key=excess, default="")


class _Growth:
    """The growth of own work and exchange since the past."""

    def __init__(self, run: _Steps, past: _Steps) -> None:
        self._run = run
        self._past = past
        self._own = {number: as_before(work, past.own[number]) for number, work in run.own.items()}
        self._exchange = as_before(run.exchange, past.exchange)
        self._steps = run.steps({})
        self._now = float(self._steps.mean())
        self._half = (self._now - self.without({})) / 2

    def is_of(self, numbers: Iterable[int]) -> bool:
        """Return whether most of the growth is in the own work of the given ranks."""
        return self._now - self._run.mean({number: self._own[number] for number in numbers}) > self._half

    def without(self, changed: Mapping[int, Float64]) -> float:
        """Return the mean step without the growth, and with some ranks' own work at most as given.

        The result is at least the past's mean step with the same ranks working as their peers did. Steps of
        the past that were longer than every present step are limited to the present lengths.
        """
        shorter = {number: np.minimum(self._own[number], work) for number, work in changed.items()}
        past = {number: as_peers(self._past.own[number], self._past.peers(number)) for number in changed}
        least = as_before(self._past.steps(past), self._steps)
        return max(self._run.mean({**self._own, **shorter}, self._exchange), float(least.mean()))
