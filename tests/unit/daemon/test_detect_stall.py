"""Stalls: found in time by the run's own pace, and never in a checkpoint or a validation of a minute."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.diagnosis.detect.stall import Doing, StallDetector


def trained(step_seconds: float, steps: int = 100) -> tuple[StallDetector, float]:
    """Return a detector after steps, and the time of the last."""
    detector = StallDetector()
    for step in range(steps):
        detector.step(1000 + step * step_seconds)
    return detector, 1000 + (steps - 1) * step_seconds


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, 10.0), (1.0, 10.0), (5.0, 40.0)])
def test_stall_is_reported_after_ten_seconds_or_eight_long_steps(step_seconds: float, limit: float) -> None:
    detector, last = trained(step_seconds)
    assert detector.check(last + limit * 0.99) is None
    stall = detector.check(last + limit * 1.06)
    assert stall is not None
    assert stall.limit_seconds == pytest.approx(limit, rel=0.05)
    assert stall.usual_seconds == pytest.approx(step_seconds, rel=0.05)
    detector.step(last + limit * 2)
    assert detector.check(last + limit * 2 + 1) is None


def test_stall_with_a_shorter_limit_is_reported_earlier() -> None:
    detector, last = trained(0.1)
    assert detector.check(last + 7.9, early=2) is None
    stall = detector.check(last + 8.1, early=2)
    assert stall is not None
    assert stall.waited_seconds == pytest.approx(8.1)
    assert stall.limit_seconds == 10


def test_minute_in_another_phase_is_no_stall_and_restarts_clock() -> None:
    detector, last = trained(0.1)
    detector.enter(Doing.ELSEWHERE, last + 1)
    assert detector.check(last + 61) is None
    detector.enter(Doing.TRAINING, last + 61)
    assert detector.check(last + 70) is None
    assert detector.check(last + 72) is not None
    assert detector.usual_seconds < 1


def test_a_checkpoint_that_never_ends_is_a_stall() -> None:
    detector, last = trained(0.1)
    detector.enter(Doing.ELSEWHERE, last)
    detector.enter(Doing.ELSEWHERE, last + 500)
    assert detector.check(last + 599) is None
    assert detector.check(last + 601) is not None


def test_long_validations_move_their_own_limit() -> None:
    detector, last = trained(0.1)
    detector.enter(Doing.ELSEWHERE, last)
    detector.enter(Doing.TRAINING, last + 200)
    detector.enter(Doing.ELSEWHERE, last + 201)
    assert detector.check(last + 201 + 1599) is None
    assert detector.check(last + 201 + 1601) is not None


def test_before_two_steps_and_after_the_last_no_stall() -> None:
    detector = StallDetector()
    assert detector.check(1e9) is None
    detector.step(0)
    assert detector.check(1e9) is None
    detector.step(1)
    detector.enter(Doing.IDLE, 2)
    assert detector.check(1e9) is None


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=300))
def test_the_usual_step_is_the_quantile_of_all_up_to_a_bucket(gaps: list[float]) -> None:
    detector = StallDetector()
    detector.step(0.0)
    for gap in gaps:
        # Every step begins at zero, so that the gap is exact.
        detector.enter(Doing.IDLE, 0.0)
        detector.enter(Doing.TRAINING, 0.0)
        detector.step(gap)
    exact = sorted(gaps)[math.floor(0.999 * len(gaps))]
    assert exact * (1 - 1e-9) <= detector.usual_seconds <= exact * 1.0501


@given(st.lists(st.tuples(st.sampled_from(["step", *Doing]), st.floats(-1e300, 1e300))))
def test_no_input_breaks_it(happenings: list[tuple[str | Doing, float]]) -> None:
    detector = StallDetector()
    for what, now in happenings:
        if isinstance(what, Doing):
            detector.enter(what, now)
        else:
            detector.step(now)
        detector.check(now)
