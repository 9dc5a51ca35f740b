"""How long steps take lately, of steps as the recorder gives them."""

import pytest
from tests.unit.client.scripted import Clock

from torchperfd.steps.phases import DATA, TRAIN, VALIDATE, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import Pace


def drained(*steps: tuple[int, int]) -> list[StepBatch]:
    """Steps of a kind and a duration each."""
    clock = Clock()
    recorder = Recorder(clock, capacity=1000)
    recorder.open()
    for number, (kind, ns) in enumerate(steps):
        clock.advance(ns)
        recorder.close(kind, number)
    return recorder.drain()


def test_before_the_first_step_there_is_none() -> None:
    pace = Pace()
    pace.add(drained())
    pace.add(drained((VALIDATE, 5)))
    assert pace.step_ns == 0


def test_it_is_the_mean_of_training_steps() -> None:
    pace = Pace()
    pace.add(drained((TRAIN, 10), (VALIDATE, 1000), (TRAIN, 20)))
    pace.add(drained((TRAIN, 30)))
    assert pace.step_ns == 20


def test_rare_long_steps_do_not_count_but_every_other_one_does() -> None:
    pace = Pace()
    pace.add(drained(*[(TRAIN, 10)] * 9, (TRAIN, 31)))
    assert pace.step_ns == 10
    pace = Pace()
    pace.add(drained(*[(TRAIN, 10), (TRAIN, 24)] * 9))
    assert pace.step_ns == 17


@pytest.mark.parametrize("at_once", [True, False])
def test_the_oldest_are_forgotten(at_once: bool) -> None:
    pace = Pace()
    steps = [*[(TRAIN, 100)] * 500, *[(TRAIN, 50)] * 64]
    for batch in [steps] if at_once else [[step] for step in steps]:
        pace.add(drained(*batch))
    assert pace.step_ns == 50


def test_phases_are_means_over_the_same_steps() -> None:
    clock = Clock()
    recorder = Recorder(clock, capacity=1000)
    pace = Pace()
    recorder.open()
    for number, (data, rest) in enumerate([(0, 10), (4, 6), (8, 2), (900, 100)]):
        if data:
            recorder.enter(DATA)
            clock.advance(data)
            recorder.exit()
        clock.advance(rest)
        recorder.close(TRAIN, number)
        pace.add(recorder.drain())
    assert pace.step_ns == 10
    assert pace.phase_ns()[DATA] == 4
    assert sum(pace.phase_ns().values()) == 10
