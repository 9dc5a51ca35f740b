"""Long steps at a period, and a run that becomes slower too slowly for an onset."""

import re
from array import array

import numpy as np
import numpy.typing as npt
import pytest

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.observer.slowdown import PeriodicityTracker
from torchperfd_daemon.store import StepColumns

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
    verdict = periodicity.slower_than_ever("a run")
    assert verdict is not None
    assert (verdict.cause, verdict.rank) == (Cause.UNKNOWN, None)
    assert verdict.cost_seconds_per_step == pytest.approx(0.12 * 0.05, rel=0.15)
    assert "of the run's past" in verdict.evidence
    assert verdict.next_command == "torchperfd capture --run 'a run' --steps 5"


@pytest.mark.parametrize("count", [64, 900, 6400])
def test_a_run_as_ever_is_not(count: int) -> None:
    periodicity = PeriodicityTracker()
    periodicity.observe(steps(count))
    assert periodicity.slower_than_ever("r") is None
