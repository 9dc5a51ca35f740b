"""Stragglers and stalls: found with their rank and phase, after the right time."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd_daemon.diagnosis.detect.straggler import (
    MIN_STEPS,
    Doing,
    RankWork,
    StallDetector,
    StepTimes,
    find_stragglers,
)

PHASES = {"data": 0.005, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}


def run(ranks: int, seed: int, steps: int = 100, spread: float = 0.1) -> list[RankWork]:
    """Return a synchronous run: who is faster waits for the slowest."""
    rng = np.random.default_rng(seed)
    return [
        RankWork(
            rank,
            {name: seconds * np.exp(spread * rng.standard_normal(steps)) for name, seconds in PHASES.items()},
        )
        for rank in range(ranks)
    ]


def wait_for_each_other(ranks: list[RankWork]) -> list[RankWork]:
    own = np.array([sum(rank.phase_seconds.values()) for rank in ranks])
    waits: npt.NDArray[np.float64] = own.max(axis=0) - own
    for rank, wait in zip(ranks, waits, strict=True):
        rank.phase_seconds["collective_wait"] = wait
    return ranks


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("phase", ["data", "backward"])
def test_slow_rank_and_phase_are_named_with_equal_steps(seed: int, phase: str) -> None:
    ranks = run(8, seed)
    culprit = seed % 8
    ranks[culprit].phase_seconds[phase] += 0.012
    wait_for_each_other(ranks)
    steps = [sum(column.mean() for column in rank.phase_seconds.values()) for rank in ranks]
    assert max(steps) == pytest.approx(min(steps))
    (found,) = find_stragglers(ranks)
    assert (found.rank, found.phase) == (culprit, phase)
    assert found.excess_seconds == pytest.approx(0.012, rel=0.3)
    assert found.phase_excess_seconds == pytest.approx(0.012, rel=0.2)
    assert found.peer_seconds == pytest.approx(0.095, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_two_of_eight_are_named_the_slower_first(seed: int) -> None:
    ranks = run(8, seed)
    first, second = np.random.default_rng(seed).permutation(8)[:2].tolist()
    ranks[first].phase_seconds["forward"] += 0.03
    ranks[second].phase_seconds["data"] += 0.02
    found = find_stragglers(wait_for_each_other(ranks))
    assert [(each.rank, each.phase) for each in found] == [(first, "forward"), (second, "data")]


def test_late_in_every_fifth_step_only_is_late() -> None:
    ranks = run(8, 3, steps=200)
    ranks[2].phase_seconds["data"][::5] += 0.1
    assert [each.rank for each in find_stragglers(ranks)] == [2]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_healthy_runs_blame_no_rank(ranks: int) -> None:
    """Of 300 runs at most 1 %, some of noise so loud that steps of one rank differ twofold."""
    blamed = sum(
        bool(find_stragglers(wait_for_each_other(run(ranks, seed, steps=64, spread=0.05 + 0.3 * (seed % 2)))))
        for seed in range(300)
    )
    assert blamed <= 3


def test_one_long_step_is_no_straggler() -> None:
    ranks = run(8, 5)
    ranks[4].phase_seconds["other"] = np.zeros(100)
    ranks[4].phase_seconds["other"][50] = 3.0
    assert find_stragglers(ranks) == []


def test_too_little_to_compare() -> None:
    assert find_stragglers([]) == []
    assert find_stragglers(run(1, 0)) == []
    assert find_stragglers([RankWork(0, {}), RankWork(1, {"collective_wait": np.ones(50)})]) == []
    brief = run(4, 0, steps=MIN_STEPS - 1)
    brief[0].phase_seconds["data"] += 1
    assert find_stragglers(brief) == []


def late_now_and_then(seed: int, steps: int) -> list[RankWork]:
    ranks = run(8, seed, steps, spread=0.03)
    ranks[seed % 8].phase_seconds["forward"][seed % 4 :: 4] += 0.08
    return wait_for_each_other(ranks)


def test_lateness_at_a_known_period_needs_fewer_steps() -> None:
    named = {
        period: [
            [each.rank for each in find_stragglers(late_now_and_then(seed, 30), period=period)]
            for seed in range(40)
        ]
        for period in (1, 4)
    }
    assert named[4] == [[seed % 8] for seed in range(40)]
    assert sum(map(bool, named[1])) < 10


@pytest.mark.parametrize("period", [2, 4, 9, 50])
def test_healthy_ranks_with_periodic_steps_are_rarely_blamed(period: int) -> None:
    blamed = 0
    for seed in range(200):
        ranks = run(8, seed, steps=64, spread=0.1)
        for rank in ranks:
            rank.phase_seconds["forward"][:: min(period, 9)] *= 3
        blamed += bool(find_stragglers(wait_for_each_other(ranks), period=period))
    assert blamed <= 2


@given(
    st.lists(
        st.dictionaries(st.sampled_from([*PHASES, "collective_wait"]), st.floats(0, 1e9), max_size=4),
        max_size=6,
    ),
    st.integers(0, 40),
    st.integers(1, 60),
)
def test_any_input_gives_excess_over_the_median_of_the_others(
    profiles: list[dict[str, float]], steps: int, period: int
) -> None:
    ranks = [
        RankWork(number, {name: np.full(steps, seconds) for name, seconds in phases.items()})
        for number, phases in enumerate(profiles)
    ]
    own = {
        number: sum(seconds for name, seconds in phases.items() if name != "collective_wait")
        for number, phases in enumerate(profiles)
        if any(name != "collective_wait" for name in phases)
    }
    for found in find_stragglers(ranks, period=period):
        peers = [seconds for rank, seconds in own.items() if rank != found.rank]
        assert found.excess_seconds == pytest.approx(own[found.rank] - float(np.median(peers)))
        assert found.excess_seconds > 0


def trained(step_seconds: float, steps: int = 100) -> tuple[StallDetector, float]:
    """Return a detector after steps, and the time of the last."""
    times = StepTimes()
    detector = StallDetector(times)
    detector.enter(Doing.TRAINING, 1000)
    for step in range(1, steps):
        times.add(step_seconds)
        detector.progress(1000 + step * step_seconds)
    return detector, 1000 + (steps - 1) * step_seconds


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, 10.0), (1.0, 10.0), (5.0, 40.0)])
def test_stall_is_reported_after_ten_seconds_or_eight_long_steps(step_seconds: float, limit: float) -> None:
    detector, last = trained(step_seconds)
    assert detector.check(last + limit * 0.99) is None
    stall = some(detector.check(last + limit * 1.06))
    assert stall.limit_seconds == pytest.approx(limit, rel=0.05)
    assert stall.usual_seconds == pytest.approx(step_seconds, rel=0.05)
    detector.progress(last + limit * 2)
    assert detector.check(last + limit * 2 + 1) is None


def test_stall_with_a_shorter_limit_is_reported_earlier() -> None:
    detector, last = trained(0.1)
    assert detector.check(last + 7.9, early=2) is None
    stall = some(detector.check(last + 8.1, early=2))
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
    times = StepTimes()
    detector = StallDetector(times)
    assert detector.check(1e9) is None
    detector.enter(Doing.TRAINING, 0)
    assert detector.check(1e9) is None
    times.add(1)
    detector.progress(1)
    detector.enter(Doing.IDLE, 2)
    assert detector.check(1e9) is None


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=300))
def test_the_usual_step_is_the_quantile_of_all_up_to_a_bucket(gaps: list[float]) -> None:
    times = StepTimes()
    detector = StallDetector(times)
    for gap in gaps:
        times.add(gap)
    exact = sorted(gaps)[math.floor(0.999 * len(gaps))]
    assert exact * (1 - 1e-9) <= detector.usual_seconds <= exact * 1.0501


@given(st.lists(st.tuples(st.sampled_from(["step", *Doing]), st.floats(-1e300, 1e300))))
def test_no_input_breaks_it(happenings: list[tuple[str | Doing, float]]) -> None:
    times = StepTimes()
    detector = StallDetector(times)
    for what, now in happenings:
        if isinstance(what, Doing):
            detector.enter(what, now)
        else:
            times.add(now)
            detector.progress(now)
        detector.check(now)
