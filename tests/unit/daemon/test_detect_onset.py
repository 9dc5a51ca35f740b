"""Onsets: changes of the step time are reported with step and size, and detectors keep bounded memory."""

import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from torchperfd_daemon.diagnosis.detect.onset import (
    CONFIRM_STEPS,
    LONGEST_SECONDS,
    MEMORY_STEPS,
    MIN_SECONDS,
    DebounceWindow,
    Onset,
    OnsetDetector,
)
from torchperfd_daemon.diagnosis.detect.robust_statistics import LENGTHS, BlockNoise
from torchperfd_daemon.diagnosis.detect.straggler import Doing, StallDetector, StepTimes
from torchperfd_daemon.diagnosis.detect.trends import RegressionDetector, SpikeDetector

Float64 = npt.NDArray[np.float64]


def reported(series: Float64, detector: OnsetDetector | None = None) -> list[Onset]:
    detector = detector or OnsetDetector()
    return [onset for seconds in series.tolist() if (onset := detector.observe(seconds)) is not None]


def normal(steps: int, spread: float, seed: int) -> Float64:
    return 0.1 * (1 + spread * np.random.default_rng(seed).standard_normal(steps))


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1, 2.0, 0.3, 30.0])
@pytest.mark.parametrize("seed", range(5))
def test_change_is_reported_with_step_and_size(factor: float, seed: int) -> None:
    series = normal(800, 0.02, seed)
    series[500:] *= factor
    (onset,) = reported(series)
    assert abs(onset.step - 500) <= 3
    assert onset.detected_step - 500 < 30
    assert onset.change == pytest.approx(factor - 1, rel=0.15)
    assert onset.before_seconds == pytest.approx(0.1, rel=0.02)
    assert 0.99 < onset.confidence <= 1


@pytest.mark.parametrize("seed", range(10))
def test_drift_before_a_change_is_no_part_of_it(seed: int) -> None:
    """Some other program made 25 steps 6 % longer before the change of 50 %."""
    series = normal(300, 0.04, seed)
    series[200:] *= 1.06
    series[225:] *= 1.5 / 1.06
    (onset,) = reported(series)
    assert abs(onset.step - 225) <= 3
    assert onset.after_seconds == pytest.approx(0.15, rel=0.05)


def test_a_change_and_its_end_are_two() -> None:
    series = normal(1200, 0.02, 1)
    series[400:800] *= 1.3
    first, second = reported(series)
    assert (round(first.change, 1), round(second.change, 1)) == (0.3, -0.2)
    assert abs(second.step - 800) <= 2


@pytest.mark.parametrize(("length", "count"), [(1, 30), (5, 8), (10, 3)])
def test_hiccups_that_end_are_no_change(length: int, count: int) -> None:
    series = normal(3000, 0.03, 2)
    for each in range(count):
        first = 200 + each * 2500 // count
        series[first : first + length] *= 10
    assert reported(series) == []


def test_half_a_second_is_the_least() -> None:
    """Steps of a millisecond: 300 of them may be slow, 600 may not."""
    brief = normal(3000, 0.02, 3) / 100
    lasting = brief.copy()
    brief[1000:1300] *= 1.5
    lasting[1000:1600] *= 1.5
    assert reported(brief) == []
    assert [abs(onset.step - 1000) <= 2 for onset in reported(lasting)][:1] == [True]


def paces(*parts: tuple[int, float]) -> Float64:
    """Return steps of 0.1 s at one pace after another, each given by its length and its factor."""
    factors = np.concatenate([np.full(steps, factor) for steps, factor in parts])
    return factors * normal(len(factors), 0.02, 7)


def test_episodes_like_an_undone_one_are_not_reported() -> None:
    """Six seconds slower, and as before: reported once, with its end. Later ones like it are not."""
    episode = (60, 1.2)
    detector = OnsetDetector()
    first, end = reported(paces((400, 1), episode, (400, 1)), detector)
    assert (round(first.change, 1), round(end.change, 1)) == (0.2, -0.2)
    assert detector.seconds_to_detect == pytest.approx(10, abs=0.5)
    assert (
        reported(paces((300, 1), (50, 1.2), (100, 1), (70, 1.3), (300, 1), (50, 1 / 1.2), (300, 1)), detector)
        == []
    )
    (lasting,) = reported(paces((100, 1), (300, 1.2)), detector)
    assert 9.5 <= (lasting.detected_step - lasting.step) * lasting.after_seconds < 12


@pytest.mark.parametrize(("slow", "fast"), [(30, 25), (40, 25), (70, 40), (80, 20)])
def test_alternating_step_time_is_rarely_reported(slow: int, fast: int) -> None:
    """Eight times slower and as before; half a second alone would report six to thirteen changes."""
    first, *later = reported(paces((400, 1), *[(slow, 1.2), (fast, 1)] * 8, (300, 1)))
    assert (first.step, round(first.change, 1)) == (400, 0.2)
    assert len(later) <= 4


def test_an_episode_is_forgotten() -> None:
    debounce = DebounceWindow()
    debounce.learn(1000, 0.1)
    assert debounce.required_seconds(1020, 0.2) == pytest.approx(2 * 20 * 0.2)
    assert debounce.seconds(1020) == MIN_SECONDS
    debounce.learn(1020, 0.2)
    assert debounce.seconds(2000) == debounce.required_seconds(2000, 0.1) == pytest.approx(2 * 20 * 0.2)
    assert debounce.seconds(1020 + MEMORY_STEPS) == MIN_SECONDS


def test_what_lasts_ten_seconds_is_no_episode() -> None:
    debounce = DebounceWindow()
    debounce.learn(1000, 0.1)
    assert debounce.required_seconds(1049, 0.2) == LONGEST_SECONDS
    debounce.learn(1051, 0.2)
    assert debounce.seconds(2000) == MIN_SECONDS


def test_drift_is_no_change() -> None:
    series = normal(20_000, 0.03, 4) * np.linspace(1, 1.06, 20_000)
    assert reported(series) == []


def test_in_noise_it_waits_longer_and_knows_it() -> None:
    quiet, loud = OnsetDetector(), OnsetDetector()
    assert quiet.steps_to_detect == math.inf
    reported(normal(2000, 0.01, 5), quiet)
    reported(normal(2000, 0.15, 5), loud)
    assert quiet.steps_to_detect == CONFIRM_STEPS
    assert loud.steps_to_detect > 50
    assert loud.noise == pytest.approx(0.15, rel=0.35)


def test_pace_that_wanders_by_itself_raises_the_least_change() -> None:
    """The level of 100 steps together is off by 10 %: no waiting distinguishes 10 % from that."""
    rng = np.random.default_rng(6)
    series = normal(12_000, 0.02, 6) * np.repeat(np.exp(0.1 * rng.standard_normal(120)), 100)
    detector = OnsetDetector()
    reported(series, detector)
    assert detector.least_change > 0.15
    steady = OnsetDetector()
    reported(normal(12_000, 0.02, 6), steady)
    assert steady.least_change < 0.06


@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=True, allow_infinity=True),
            st.sampled_from([0.0, -1.0, 1e-308, 1.7e308, 0.1, 0.1, 0.2]),
        ),
        max_size=20,
    ),
    st.integers(1, 60),
)
def test_no_input_breaks_it(values: list[float], times: int) -> None:
    detector = OnsetDetector()
    for seconds in values * times:
        onset = detector.observe(seconds)
        if onset is not None:
            assert 0 <= onset.step <= onset.detected_step
            assert 0 <= onset.confidence <= 1


@given(arrays.arrays(np.float64, st.integers(8, 700), elements=st.floats(-1, 1)))
def test_block_noise_is_that_of_its_definition(series: Float64) -> None:
    noise = BlockNoise()
    for value in series.tolist():
        noise.add(value)
    variances, squares = [0.0], [0.0]
    for length in LENGTHS:
        means = series[: len(series) // length * length].reshape(-1, length).mean(axis=1)
        if len(means) > 1:
            allan = length * np.mean(np.diff(means) ** 2) / 2
            variances.append(float(allan) * (1 - math.sqrt(3 / (len(means) - 1))))
        if len(means) and length >= 128:
            squares.append(float(np.mean(means**2)))
    assert noise.variance() == pytest.approx(max(variances), abs=1e-12)
    assert noise.wander() == pytest.approx(math.sqrt(max(squares)), abs=1e-9)


def step_times() -> Iterator[float]:
    """Yield step times with frequent long steps, in seconds."""
    chance = random.Random(5)
    while True:
        yield chance.uniform(0.1, 0.2) * chance.choice((1, 1, 1, 50))


def onset() -> tuple[OnsetDetector, Callable[[float], object]]:
    detector = OnsetDetector()
    return detector, detector.observe


def spikes() -> tuple[SpikeDetector, Callable[[float], object]]:
    detector = SpikeDetector()
    return detector, lambda seconds: detector.observe(seconds, {"data": seconds / 2})


def stall() -> tuple[StallDetector, Callable[[float], object]]:
    times, now = StepTimes(), [0.0]
    detector = StallDetector(times)
    detector.enter(Doing.TRAINING, 0.0)

    def observe(seconds: float) -> None:
        now[0] += seconds
        times.add(seconds)
        detector.progress(now[0])

    return detector, observe


def regression() -> tuple[RegressionDetector, Callable[[float], object]]:
    detector = RegressionDetector()
    return detector, detector.observe


@pytest.mark.parametrize(
    ("make", "most_bytes"), [(onset, 10_000), (spikes, 3_500), (stall, 4_500), (regression, 3_500)]
)
def test_detector_many_steps_keep_its_memory_bounded(
    make: Callable[[], tuple[Any, Callable[[float], object]]], most_bytes: int
) -> None:
    detector, observe = make()
    steps = step_times()
    for _ in range(20_000):
        observe(next(steps))
    assert len(pickle.dumps(detector)) <= most_bytes
