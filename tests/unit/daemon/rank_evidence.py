"""Evidence of ranks for tests of causes, and what is expected of the verdicts."""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest

from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

STEP = 0.1


def rank(number: int) -> RankEvidence:
    """Return a healthy rank of 100 ms a step, its device busy for 90 of them."""
    phases = {"data": 0.002, "forward": 0.03, "backward": 0.058, "optimizer": 0.008, "collective_wait": 0.002}
    return RankEvidence(number, f"node-{number // 4}", STEP, phases, device_busy=0.9)


def ranks(count: int = 8, **fields: Any) -> list[RankEvidence]:
    """Return healthy ranks with other values of some fields."""
    return [replace(rank(number), **fields) for number in range(count)]


def changed(of: RankEvidence, **phases: float) -> RankEvidence:
    """Return the rank with other phases and the step that they sum to; its device works as long as before."""
    merged = {**of.phase_seconds, **phases}
    step = sum(merged.values())
    busy = None if of.device_busy is None else min(1.0, of.device_busy * of.step_seconds / step)
    return replace(of, phase_seconds=merged, step_seconds=step, device_busy=busy)


def all_changed(of: list[RankEvidence], **phases: float) -> list[RankEvidence]:
    """Return ranks with other phases, and their past."""
    return [since(each, changed(each, **phases)) for each in of]


def eight(*odd: RankEvidence) -> list[RankEvidence]:
    """Return eight ranks, some of them odd; the healthy ones wait for the longest step."""
    longest = max((each.step_seconds for each in odd), default=STEP)
    different = {each.rank: each for each in odd}
    waiting = 0.002 + longest - STEP
    return [different.get(number, changed(rank(number), collective_wait=waiting)) for number in range(8)]


def with_odd(odd: RankEvidence, others: list[RankEvidence]) -> list[RankEvidence]:
    """Return ranks with one of them replaced; it has the past of the one that it replaces."""
    return [since(each.before, odd) if each.rank == odd.rank and each.before else each for each in others]


def late(number: int, phase: str, seconds: float, **fields: Any) -> RankEvidence:
    """Return a rank with a phase that is longer by so much, which makes it late, and with other fields."""
    return later(rank(number), phase, seconds, **fields)


def later(of: RankEvidence, phase: str, seconds: float, **fields: Any) -> RankEvidence:
    """Return the rank with a phase that is longer by so much, which makes it late, and with other fields."""
    longer = changed(of, **{phase: of.phase_seconds[phase] + seconds})
    return replace(longer, late_seconds=seconds, late_phase=phase, **fields)


def since(before: RankEvidence, now: RankEvidence) -> RankEvidence:
    """Return the rank as it is now, with its past."""
    return replace(now, before=before)


class Containing:
    """Equals every text that has a part."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._part in other

    def __hash__(self) -> int:
        return hash(self._part)

    def __repr__(self) -> str:
        return f"Containing({self._part!r})"


class Expected(NamedTuple):
    """A verdict; what is left out may be anything."""

    cause: Cause
    rank: Any = ANY
    cost: Any = ANY
    phase: Any = ANY
    has_grown: Any = ANY
    evidence: Any = ANY


def seen(verdicts: list[Verdict]) -> list[Expected]:
    """Return what is compared with the expected verdicts."""
    return [
        Expected(
            each.cause,
            each.rank,
            pytest.approx(each.cost_seconds_per_step),
            each.phase,
            each.has_grown,
            each.evidence,
        )
        for each in verdicts
    ]
