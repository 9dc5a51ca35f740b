"""Slow trends: leaks of memory, gradual slowdowns, and steps that grow with each step."""

import itertools
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd_daemon.diagnosis.detect.robust_statistics import CAPACITY, Reservoir
from torchperfd_daemon.diagnosis.detect.trends import GrowthDetector, RegressionDetector, theil_sen
from torchperfd_daemon.observer.step_changes import StepGrowth

GB = 1e9


@given(st.integers(0, 3000))
def test_a_reservoir_holds_points_evenly_over_all_of_the_series(count: int) -> None:
    reservoir = Reservoir()
    for number in range(count):
        reservoir.add(number, -number)
    times, values = reservoir.points()
    assert len(times) == min(count, len(times)) <= CAPACITY
    assert (values == -times).all()
    if count > CAPACITY:
        gaps = set(np.diff(times).tolist())
        assert len(times) > CAPACITY // 2
        assert len(gaps) == 1
        assert times[0] == 0
        assert count - times[-1] <= gaps.pop()


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.floats(-1e6, 1e6)), min_size=2, max_size=20),
)
def test_the_slope_is_the_median_of_all_pairs(points: list[tuple[int, float]]) -> None:
    times = np.array([float(time) for time, _ in points])
    values = np.array([value for _, value in points])
    slope = theil_sen(times, values)
    slopes = [
        (values[j] - values[i]) / (times[j] - times[i])
        for i, j in itertools.combinations(range(len(points)), 2)
        if times[i] != times[j]
    ]
    assert slope.per_second == pytest.approx(statistics.median(slopes) if slopes else 0.0, rel=1e-9, abs=1e-9)
    assert slope.low <= slope.per_second <= slope.high


def test_the_interval_holds_the_true_slope() -> None:
    rng = np.random.default_rng(0)
    times = np.arange(60.0)
    missed = 0
    for _ in range(300):
        slope = theil_sen(times, 2 * times + rng.standard_t(2, 60))
        missed += not slope.low <= 2 <= slope.high
    assert missed <= 3


def watched(readings: "np.typing.NDArray[np.float64]") -> GrowthDetector:
    detector = GrowthDetector()
    for number, reading in enumerate(readings.tolist()):
        detector.observe(number * 10.0, reading)
    return detector


def test_leak_in_a_sawtooth_is_reported() -> None:
    rng = np.random.default_rng(1)
    number = np.arange(2000)
    readings = 10 * GB + 2e6 * number + 0.2 * GB * (number % 7 / 7) + 0.05 * GB * rng.standard_normal(2000)
    found = some(watched(readings).find())
    assert found.grows
    assert found.slope.per_second == pytest.approx(2e5, rel=0.1)


def test_growth_that_has_ended_is_no_leak() -> None:
    rng = np.random.default_rng(2)
    number = np.arange(2000)
    readings = 10 * GB + np.minimum(number, 800) * 5e6 + 0.01 * GB * rng.standard_normal(2000)
    found = some(watched(readings).find())
    assert not found.grows


def test_steady_memory_is_seldom_a_leak() -> None:
    wrong = 0
    for seed in range(200):
        readings = 10 * GB * (1 + 0.05 * np.random.default_rng(seed).standard_normal(300))
        found = some(watched(readings).find())
        wrong += found.grows
    assert wrong <= 2


def test_growth_is_reported_and_level_memory_is_not() -> None:
    found = some(watched(np.linspace(1 * GB, 2 * GB, 200)).find())
    assert found.grows
    assert watched(np.ones(20)).find() is None


@given(st.lists(st.tuples(st.floats(-1e12, 1e12), st.floats(-1e18, 1e18)), max_size=200))
def test_no_readings_break_growth(readings: list[tuple[float, float]]) -> None:
    detector = GrowthDetector()
    for seconds, value in readings:
        detector.observe(seconds, value)
    found = detector.find()
    assert found is None or found.slope.low <= found.slope.high


def throughput(step_seconds: "np.typing.NDArray[np.float64]") -> RegressionDetector:
    detector = RegressionDetector()
    for seconds in step_seconds.tolist():
        detector.observe(seconds)
    return detector


def test_gradual_slowdown_below_step_noise_is_reported() -> None:
    """From 100 ms to 120 ms over 40,000 steps."""
    noise = np.exp(0.05 * np.random.default_rng(3).standard_normal(40_000))
    found = some(throughput(np.linspace(0.1, 0.12, 40_000) * noise).find())
    assert found.now_per_second == pytest.approx(1 / 0.12, rel=0.02)
    assert found.past_per_second == pytest.approx(1 / 0.11, rel=0.02)
    assert found.change == pytest.approx(0.11 / 0.12 - 1, abs=0.02)


def test_a_lasting_loss_is_a_regression_and_noise_is_not() -> None:
    rng = np.random.default_rng(4)
    steady = 0.1 * np.exp(0.1 * rng.standard_normal(20_000))
    steady[::10] *= 5
    slower = steady.copy()
    slower[-300:] *= 1.15
    healthy, sick = throughput(steady).find(), throughput(slower).find()
    assert healthy is not None
    assert sick is not None
    assert (healthy.regressed, sick.regressed) == (False, True)
    assert sick.change == pytest.approx(1 / 1.15 - 1, abs=0.03)


def test_without_a_past_there_is_no_answer() -> None:
    assert throughput(np.full(500, 0.1)).find() is None


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_no_steps_break_regression(values: list[float]) -> None:
    detector = throughput(np.array(values * (1500 // len(values))))
    detector.find()


def watched_steps(step_ns: Callable[[int], float], *, samples: int = 60, noise: float = 0.0) -> StepGrowth:
    """Return the growth of steps by their number, ten a sample; ``backward`` has what exceeds the first."""
    growth, chance = StepGrowth(), np.random.default_rng(4)
    total, backward = 0.0, 0.0
    for step in range(10 * samples):
        took = step_ns(step) * (1 + noise * chance.standard_normal())
        total += took
        backward += took - step_ns(0) / 2
        if step % 10 == 9:
            growth.observe(step + 1, total, np.array([total - backward, backward, 0.0]))
    return growth


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("samples", [24, 60, 600])
def test_growth_of_a_kept_graph_is_found_with_its_phase(samples: int, noise: float) -> None:
    growth = watched_steps(lambda step: 10e6 + 0.25e6 * step, samples=samples, noise=noise)
    assert growth.seconds == pytest.approx(0.25e-3, rel=0.1)
    assert growth.column == 1


def step_change(step: int) -> float:
    return 10e6 if step < 300 else 20e6


def warm_up(step: int) -> float:
    return 10e6 + 100e6 * 0.9**step


def change_amid_drift(step: int) -> float:
    return step_change(step) + 10e3 * step


@pytest.mark.parametrize(
    "step_ns",
    [
        lambda _: 10e6,
        step_change,
        change_amid_drift,
        warm_up,
        lambda step: 10e6 - 5e3 * step,
        lambda step: 10e6 + 100 * step,
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_steps_that_do_not_grow_steadily_are_left_alone(
    step_ns: Callable[[int], float], noise: float
) -> None:
    assert watched_steps(step_ns, noise=noise).seconds == 0.0


def test_growth_that_has_just_begun_is_not_certain() -> None:
    assert watched_steps(lambda step: 10e6 + 1e6 * step, samples=12).seconds == 0.0


def test_growth_that_ends_is_withdrawn() -> None:
    grown = watched_steps(lambda step: 10e6 + 0.25e6 * min(step, 250), samples=200)
    assert grown.seconds == 0.0
