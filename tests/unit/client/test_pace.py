"""How long steps take lately, of rows as the recorder makes them."""

from array import array

import pytest

from torchperfd.pace import Pace
from torchperfd.recorder import DURATION, KIND, PHASE_SLOTS, ROW_WIDTH, TRAIN, VALIDATE, Rows


def rows(*steps: tuple[int, int]) -> Rows:
    """Steps of a kind and a duration each."""
    values = array("q", bytes(8 * ROW_WIDTH * len(steps)))
    for number, (kind, ns) in enumerate(steps):
        values[number * ROW_WIDTH + KIND] = kind
        values[number * ROW_WIDTH + DURATION] = ns
    return Rows(len(steps), values, array("d", bytes(8 * PHASE_SLOTS * len(steps))))


def test_before_the_first_step_there_is_none() -> None:
    pace = Pace()
    pace.fold(rows())
    pace.fold(rows((VALIDATE, 5)))
    assert pace.step_ns == 0


def test_it_is_the_mean_of_training_steps() -> None:
    pace = Pace()
    pace.fold(rows((TRAIN, 10), (VALIDATE, 1000), (TRAIN, 20)))
    pace.fold(rows((TRAIN, 30)))
    assert pace.step_ns == 20


def test_rare_long_steps_do_not_count_but_every_other_one_does() -> None:
    pace = Pace()
    pace.fold(rows(*[(TRAIN, 10)] * 9, (TRAIN, 31)))
    assert pace.step_ns == 10
    pace = Pace()
    pace.fold(rows(*[(TRAIN, 10), (TRAIN, 24)] * 9))
    assert pace.step_ns == 17


@pytest.mark.parametrize("at_once", [True, False])
def test_the_oldest_are_forgotten(at_once: bool) -> None:
    pace = Pace()
    steps = [*[(TRAIN, 100)] * 500, *[(TRAIN, 50)] * 64]
    for batch in [steps] if at_once else [[step] for step in steps]:
        pace.fold(rows(*batch))
    assert pace.step_ns == 50
