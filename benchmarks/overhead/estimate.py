"""By which part steps became longer: an estimate that neighbours on the machine disturb little. Pure.

Units of four blocks of steps alternate: off, on, on, off, or the reverse, so that a linear drift cancels out.
What neighbours do to single steps, to single units and over the time is taken out in turn: the slowest steps
of each block are left out, then the half of the units in which others had most of the CPU, and of the rest
the mean is trimmed. What the instrumentation itself does rarely is left out with the slowest steps, and has
to be measured apart, by the CPU time of its threads.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SLOWEST: Final = 0.1
"""The share of a block's steps that is left out."""
TRIMMED: Final = 0.2
"""The share of the values at either end that a trimmed mean leaves out."""
MIN_UNITS: Final = 8
"""Of fewer, all are used."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps, all of them on or all of them off.

    Attributes:
        wall_ns: What each step took.
        cpu_ns: CPU time of the training thread for each step.
        others: The share of the rank's CPU that other processes had.
    """

    is_on: bool
    wall_ns: Sequence[int]
    cpu_ns: Sequence[int]
    others: float


Unit = Sequence[Block]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and its standard error."""

    mean: float
    error: float


def wall_change(units: Sequence[Unit]) -> Estimate:
    """Return by which part the wall time of a step is longer when on."""
    return trimmed(
        [on / off - 1 for unit in quiet(units) for on, off in [_on_and_off(unit, "wall_ns")]],
    )


def added_cpu_ns(units: Sequence[Unit]) -> Estimate:
    """Return by how much the CPU time of the training thread in a step is longer when on."""
    return trimmed([on - off for unit in quiet(units) for on, off in [_on_and_off(unit, "cpu_ns")]])


def quiet(units: Sequence[Unit]) -> list[Unit]:
    """Return the half of the units in which other processes had least of the CPU.

    The instrumentation's own CPU time is none of others, so that the choice favours neither on nor off.
    """
    ordered = sorted(units, key=lambda unit: max(block.others for block in unit))
    return list(ordered if len(ordered) < MIN_UNITS else ordered[: (len(ordered) + 1) // 2])


def trimmed(values: Sequence[float]) -> Estimate:
    """Return the trimmed mean, and its standard error by Tukey and McLaughlin from the winsorized values."""
    ordered = sorted(values)
    cut = int(TRIMMED * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [min(max(each, kept[0]), kept[-1]) for each in ordered]
    error = statistics.stdev(winsorized) / ((1 - 2 * TRIMMED) * math.sqrt(len(ordered)))
    return Estimate(statistics.fmean(kept), error)


def usual(values: Sequence[int]) -> float:
    """Return the mean without the slowest steps."""
    return statistics.fmean(sorted(values)[: math.ceil((1 - SLOWEST) * len(values))])


def _on_and_off(unit: Unit, column: str) -> tuple[float, float]:
    on, off = (
        statistics.fmean(usual(getattr(block, column)) for block in unit if block.is_on is wanted)
        for wanted in (True, False)
    )
    return on, off
