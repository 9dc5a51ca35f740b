"""Long steps at a period: found, costed and reported with their phase."""

import re
from array import array
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd_daemon.diagnosis.detect.trends import SpikeDetector, find_period
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.slowdown import PeriodicityTracker
from torchperfd_daemon.store.model import StepColumns


def feed(detector: SpikeDetector, steps: int, period: int, phase: str, seed: int = 0) -> SpikeDetector:
    """Steps of 100 ms, half of it backward; every ``period``-th is 80 ms longer in one phase."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        phases = {"data": 0.01, "backward": 0.05 * float(np.exp(0.05 * rng.standard_normal())), "other": 0.04}
        spike = step % period == 3
        if spike:
            phases[phase] = phases.get(phase, 0.0) + 0.08
        detector.observe(sum(phases.values()), phases)
    return detector


@pytest.mark.parametrize(
    ("period", "phase"), [(4, "data"), (6, "data"), (25, "backward"), (50, "checkpoint"), (97, "other")]
)
def test_the_period_and_its_phase(period: int, phase: str) -> None:
    found = some(feed(SpikeDetector(), 1500, period, phase).find())
    assert (found.period, found.phase) == (period, phase)
    assert found.excess_seconds == pytest.approx(0.08, rel=0.05)
    assert found.seconds_per_step == pytest.approx(0.08 / period, rel=0.05)


def test_two_periods_at_once_give_the_costlier() -> None:
    detector = SpikeDetector()
    for step in range(2000):
        phases = {"forward": 0.1, "data": 0.0, "checkpoint": 0.0}
        if step % 37 == 0:
            phases["data"] = 0.05
        if step % 100 == 11:
            phases["checkpoint"] = 1.0
        detector.observe(sum(phases.values()), phases)
    found = some(detector.find())
    assert (found.period, found.phase) == (100, "checkpoint")


def test_spikes_without_a_period() -> None:
    rng = np.random.default_rng(1)
    answers = []
    for _ in range(100):
        detector = SpikeDetector()
        for spike in (rng.random(1000) < 0.04).tolist():
            detector.observe(0.3 if spike else 0.1)
        answers.append(detector.find())
    assert answers == [None] * 100


def test_noise_has_no_spikes() -> None:
    detector = SpikeDetector()
    for seconds in 0.1 * np.exp(0.1 * np.random.default_rng(2).standard_normal(5000)):
        detector.observe(float(seconds))
    assert detector.find() is None


@given(st.integers(2, 400), st.integers(8, 64), st.integers(0, 10_000), st.integers(0, 2), st.randoms())
def test_period_is_found_though_repetitions_are_missing(
    period: int, count: int, first: int, missing: int, random: Random
) -> None:
    steps = [first + period * turn for turn in range(count)]
    for _ in range(missing):
        steps.remove(random.choice(steps[1:-1]))
    assert find_period(steps) == period


@given(st.sets(st.integers(0, 2**40), max_size=64))
def test_a_period_lies_among_the_gaps(steps: set[int]) -> None:
    period = find_period(sorted(steps))
    assert period is None or 2 <= period <= max(steps) - min(steps)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.integers(1, 10)
)
def test_no_input_breaks_it(values: list[float], times: int) -> None:
    detector = SpikeDetector()
    for seconds in values * times:
        detector.observe(seconds, {"data": seconds / 2})
    detector.find()


Float64 = npt.NDArray[np.float64]

NONE = Verdict(Cause.NONE, "r", "", None, "", "nothing stands out", 0.0, "")
IN_DATA = Verdict(Cause.INPUT_BOUND, "r", "", None, "data", "waiting for data", 0.01, "")


def columns(data: Float64, forward: Float64) -> StepColumns:
    total = array("q", (1e9 * (data + forward)).astype(int).tolist())
    phases = {
        name: array("q", (1e9 * each).astype(int).tolist())
        for name, each in (("data", data), ("forward", forward))
    }
    return StepColumns(total, total, phases)


def steps(count: int, period: int = 0, longer: float = 0.0, slower: float = 0.0) -> StepColumns:
    """Steps of which some are longer, and of which the newest thousand become slower bit by bit."""
    rng = np.random.default_rng(1)
    last = np.clip((np.arange(count) - (count - 1000)) / 600, 0, 1)
    forward = 0.05 * (1 + 0.02 * rng.standard_normal(count)) * (1 + slower * last)
    data = np.full(count, 0.002)
    if period:
        data[::period] += longer
    return columns(data, forward)


@pytest.mark.parametrize(
    ("period", "words"),
    [(4, "every 4th step"), (11, "every 11th step"), (3, "every 3rd step")],
)
def test_long_steps_at_a_period_are_reported_with_phase(period: int, words: str) -> None:
    periodicity = PeriodicityTracker()
    periodicity.observe(steps(400, period, 0.04))
    assert re.fullmatch(
        rf"{words} takes (39\.\d|40|40\.\d) ms longer, most of it in data", periodicity.remark(NONE)
    )
    # A verdict that has named the phase does not repeat it.
    assert periodicity.remark(IN_DATA).endswith(" longer")


def test_rare_long_steps_and_even_steps_are_not_reported() -> None:
    for made in (steps(400), steps(400, 100, 0.04)):
        periodicity = PeriodicityTracker()
        periodicity.observe(made)
        assert periodicity.remark(NONE) == ""


def test_run_that_slows_gradually_is_reported() -> None:
    periodicity = PeriodicityTracker()
    made = steps(6400, slower=0.12)
    periodicity.observe(made)
    verdict = some(periodicity.slower_than_ever("a run"))
    assert (verdict.cause, verdict.rank) == (Cause.UNKNOWN, None)
    assert verdict.cost_seconds_per_step == pytest.approx(0.12 * 0.05, rel=0.15)
    assert "of the run's past" in verdict.evidence
    assert verdict.next_command == "torchperfd capture --run 'a run' --steps 5"


@pytest.mark.parametrize("count", [64, 900, 6400])
def test_a_run_as_ever_is_not(count: int) -> None:
    periodicity = PeriodicityTracker()
    periodicity.observe(steps(count))
    assert periodicity.slower_than_ever("r") is None
