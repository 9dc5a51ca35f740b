"""Checkpoints saved in the background: their cost is what steps beside them take more than the others."""

import random

import pytest
from tests.unit.daemon.test_observer import Watched

from torchperfd_daemon.diagnosis import Cause
from torchperfd_daemon.observer.rank_window import StepsBesideSaves

STEPS = 12


def compared(*samples: tuple[float, float], scatter: float = 0.01) -> float:
    """Return the extra of a step, after samples of its saving part and its mean step in seconds."""
    chance = random.Random(3)
    beside = StepsBesideSaves()
    for saving, step_seconds in samples:
        beside.add(saving, STEPS, STEPS * step_seconds * chance.gauss(1, scatter))
    return beside.extra_seconds


def test_steps_beside_a_save_are_compared_with_those_around_it() -> None:
    fast, slow = (0.0, 0.08), (1.0, 0.11)
    assert compared(*[fast] * 10, *[slow] * 5) == pytest.approx(0.03, rel=0.1)
    assert compared(*[fast] * 10, *[slow] * 5, *[fast] * 5) == pytest.approx(0.03, rel=0.1)
    assert compared(*([fast] * 6 + [slow] * 6) * 5) == pytest.approx(0.03, rel=0.1)


def test_a_save_that_changes_nothing_costs_nothing() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        beside = StepsBesideSaves()
        for sample in range(40):
            beside.add(float(sample % 10 >= 5), STEPS, STEPS * 0.1 * chance.gauss(1, 0.1))
            assert beside.extra_seconds < 0.02
    assert compared(*[(0.0, 0.1)] * 10, *[(1.0, 0.104)] * 10) == 0.0


def test_steps_that_stay_slow_after_the_save_have_another_cause() -> None:
    assert compared(*[(0.0, 0.08)] * 10, *[(1.0, 0.11)] * 5, *[(0.0, 0.11)] * 5) == 0.0


def test_without_other_steps_nothing_is_known() -> None:
    assert compared(*[(1.0, 0.11)] * 10) == 0.0
    assert compared(*[(0.0, 0.08)] * 4, *[(1.0, 0.11)] * 10) == 0.0
    assert compared(*[(0.3, 0.08)] * 10, *[(1.0, 0.11)] * 10) == 0.0


def test_a_run_that_slows_while_one_rank_saves_has_that_cause() -> None:
    watched = Watched(4)
    watched.train(30)
    watched.job.saving = {0}
    watched.train(15, lambda rank, _step: {"forward": 0.03} if rank == 0 else {})
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank) == (Cause.CHECKPOINT, 0)
    assert verdict.cost_seconds_per_step == pytest.approx(0.03, rel=0.1)
    assert "beside checkpoints that are saved in the background" in verdict.evidence
    watched.job.saving = set()
    watched.train(30)
    assert watched.verdict.cause is Cause.NONE
