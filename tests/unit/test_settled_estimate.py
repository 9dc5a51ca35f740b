"""The estimate of how much longer settled steps are: right, and less disturbed than a plain mean."""

import math
import statistics

import numpy as np
import pytest
from benchmarks.overhead.estimate import Block, Unit, added_cpu_ns, quiet, trimmed, usual, wall_change

STEP_NS = 2e6
LONGER = 0.01
ADDED_NS = 20_000


def noisy_units(seed: int, count: int = 120) -> list[Unit]:
    """Return units on a machine whose speed wanders, and whose neighbours interrupt and delay steps."""
    chance = np.random.default_rng(seed)
    speed = 0.0
    units: list[Unit] = []
    for _ in range(count):
        busy = chance.random() < 0.4
        unit = []
        for is_on in (False, True, True, False):
            speed = 0.9 * speed + chance.normal(0, 0.3 if chance.random() < 0.1 else 0.01)
            steps = np.full(50, STEP_NS * (1 + LONGER * is_on)) * math.exp(speed)
            steps *= np.exp(chance.normal(0.15 * busy, 0.02 + 0.1 * busy))
            steps[chance.random(50) < 0.03] += 10e6
            cpu = np.full(50, STEP_NS + ADDED_NS * is_on) + chance.normal(0, 5e3, 50)
            unit.append(Block(is_on, steps.astype(int).tolist(), cpu.astype(int).tolist(), 0.5 * busy))
        units.append(unit)
    return units


def plain_change(units: list[Unit]) -> float:
    """Return the mean over units of what the mean steps of their blocks differ by."""
    return statistics.fmean(
        np.mean([block.wall_ns for block in unit if block.is_on])
        / np.mean([block.wall_ns for block in unit if not block.is_on])
        - 1
        for unit in units
    )


def test_change_varies_by_half_of_what_a_plain_mean_does() -> None:
    each = [noisy_units(seed) for seed in range(40)]
    changes = [wall_change(units) for units in each]
    spread = statistics.stdev(each.mean for each in changes)
    assert spread < statistics.stdev(map(plain_change, each)) / 2
    assert statistics.fmean(each.mean for each in changes) == pytest.approx(LONGER, abs=spread)
    assert statistics.median(each.error for each in changes) == pytest.approx(spread, rel=0.35)


def test_added_cpu_time_is_that_of_the_training_thread() -> None:
    found = added_cpu_ns(noisy_units(1))
    assert found.mean == pytest.approx(ADDED_NS, abs=4 * found.error)
    assert found.error < 500


def test_quiet_units_are_those_with_least_of_others_in_any_block() -> None:
    def unit(*others: float) -> Unit:
        return [Block(is_on, [1], [1], share) for is_on, share in zip((True, False), others, strict=True)]

    units = [unit(0.0, share / 10) for share in range(10)]
    assert quiet(units) == units[:5]
    assert quiet(units[:7]) == units[:7]


def test_slowest_steps_and_extreme_values_are_left_out() -> None:
    assert usual([*[10] * 9, 1000]) == 10
    assert trimmed([0.0, *[1.0, 2.0, 3.0], 100.0]).mean == 2.0
    assert trimmed([1.0] * 9).error == 0
