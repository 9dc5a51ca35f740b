"""Epochs: training and validation passes, and waits for their first batches."""

import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.events import EventBuffer, codes
from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.epochs import EpochStarts, EpochTracker, Iterators
from torchperfd.steps.phases import DATA, TRAIN, VALIDATE, PhaseColumns, StepBatch

TRAIN_LOADER, VALIDATE_LOADER = 1, 2


def test_two_epochs_with_validation() -> None:
    passes = EpochTracker()
    for epoch, began in enumerate((100, 1100)):
        passes.draw(TRAIN_LOADER, began, 5 * epoch, 3 * epoch)
        passes.draw(TRAIN_LOADER, began + 50, 5 * epoch + 1, 3 * epoch)
        passes.exhausted(TRAIN_LOADER, began + 500, 5 * epoch + 5, 3 * epoch)
        passes.draw(VALIDATE_LOADER, began + 600, 5 * epoch + 5, 3 * epoch)
        passes.exhausted(VALIDATE_LOADER, began + 700, 5 * epoch + 5, 3 * epoch + 3)
    assert passes.train == PhaseTotals(2, 1000, 2 * 500.0**2)
    assert passes.validate == PhaseTotals(2, 200, 2 * 100.0**2)
    assert passes.epoch == PhaseTotals(1, 1000, 1000.0**2)  # the second has not ended
    passes.finish()
    assert passes.epoch == PhaseTotals(2, 1700, 1000.0**2 + 700.0**2)
    passes.finish()
    assert passes.epoch.calls == 2


def test_validation_in_the_middle_of_a_training_pass() -> None:
    passes = EpochTracker()
    passes.draw(TRAIN_LOADER, 0, 0, 0)
    passes.draw(VALIDATE_LOADER, 40, 4, 0)
    passes.exhausted(VALIDATE_LOADER, 60, 4, 2)
    passes.draw(TRAIN_LOADER, 70, 4, 2)
    passes.exhausted(TRAIN_LOADER, 100, 8, 2)
    assert (passes.train.calls, passes.train.ns) == (1, 100)
    assert (passes.validate.calls, passes.validate.ns) == (1, 20)


def test_a_loader_that_only_prepares_is_no_pass() -> None:
    passes = EpochTracker()
    passes.draw(1, 0, 0, 0)
    passes.exhausted(1, 10, 0, 0)
    passes.exhausted(2, 20, 0, 0)  # never drawn from as far as we know
    passes.finish()
    assert (passes.train.calls, passes.validate.calls, passes.epoch.calls) == (0, 0, 0)


def test_loops_that_are_left_early_are_forgotten() -> None:
    passes = EpochTracker()
    for iterator in range(1000):
        passes.draw(iterator, iterator, iterator, 0)
    for iterator in range(1000 - 8):
        passes.exhausted(iterator, 2000, 1001, 0)
    assert passes.train.calls == 0
    passes.exhausted(999, 2000, 1001, 0)
    assert passes.train == PhaseTotals(1, 2000 - 999, float(2000 - 999) ** 2)


def test_a_loop_around_others_makes_no_epoch_of_its_own() -> None:
    passes = EpochTracker()
    passes.draw(1, 0, 0, 0)
    for number in range(3):
        passes.draw(2 + number, 100 + 100 * number, number, 0)
        passes.exhausted(2 + number, 150 + 100 * number, number + 1, 0)
    passes.exhausted(1, 400, 3, 0)
    passes.finish()
    assert (passes.train.calls, passes.train.ns) == (4, 550)
    assert (passes.epoch.calls, passes.epoch.ns) == (3, 300)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 9), st.integers(0, 1), st.integers(0, 1))
    )
)
def test_whatever_is_drawn_times_are_never_negative(
    draws: list[tuple[int, bool, int, int, int]],
) -> None:
    passes, now, trained, validated = EpochTracker(), 1, 0, 0
    for iterator, exhausted, ns, trains, validates in draws:
        now, trained, validated = now + ns, trained + trains, validated + validates
        (passes.exhausted if exhausted else passes.draw)(iterator, now, trained, validated)
    passes.finish()
    for totals in (passes.train, passes.validate, passes.epoch):
        assert totals.ns >= 0
        assert totals.ns <= totals.calls * now
    assert passes.epoch.ns <= now


def test_steps_with_which_training_passes_begin_are_found() -> None:
    passes = EpochTracker()
    for epoch in range(3):
        began = 1000 * epoch
        passes.draw(TRAIN_LOADER, began, 5 * epoch, epoch)
        passes.find_begun(5 * epoch)
        passes.draw(TRAIN_LOADER, began + 400, 5 * epoch + 1, epoch)
        passes.find_begun(5 * epoch + 1)
        passes.draw(VALIDATE_LOADER, began + 450, 5 * epoch + 2, epoch)
        passes.exhausted(VALIDATE_LOADER, began + 460, 5 * epoch + 2, epoch + 1)
        passes.find_begun(5 * epoch + 4)
        passes.exhausted(TRAIN_LOADER, began + 500, 5 * epoch + 5, epoch + 1)
    assert passes.begun == [0, 5, 10]


def test_loops_that_are_left_early_begin_with_their_step() -> None:
    """Another iterator may get the id of one that is gone."""
    passes = EpochTracker()
    for epoch in range(4):
        passes.draw(TRAIN_LOADER, 1000 * epoch, 5 * epoch, 0)
        passes.left(TRAIN_LOADER, 5 * epoch + 5)
    assert passes.begun == [0, 5, 10, 15]


def test_empty_pass_begins_no_step() -> None:
    passes = EpochTracker()
    passes.draw(TRAIN_LOADER, 0, 0, 0)
    passes.exhausted(TRAIN_LOADER, 10, 0, 0)
    passes.find_begun(7)
    assert passes.begun == []


def batch(first: int, waits: list[int], kind: int = TRAIN) -> StepBatch:
    def column(values: list[int]) -> "memoryview[int]":
        return memoryview(array("q", values))

    ones = [1] * len(waits)
    data = PhaseColumns(column(waits), column(ones), sum(waits), len(waits), 0.0)
    return StepBatch(
        column([*range(first, first + len(waits))]),
        column([kind] * len(waits)),
        *(column(ones),) * 3,
        {DATA: data},
        len(waits),
        0.0,
        0,
    )


def epochs(count: int, steps: int, firsts: list[int], usual: int) -> list[int]:
    """Return the waits of so many epochs of so many steps, whose first ones wait longer."""
    return (firsts + [usual] * (steps - len(firsts))) * count


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_starts_are_the_first_steps_of_each_pass_but_the_first(pieces: list[int]) -> None:
    starts, waits = EpochStarts(), epochs(5, 8, [510, 60], 10)
    begun, position = [0, 8, 16, 24, 32], 0
    for piece in [*pieces, len(waits)]:
        end = min(position + piece, len(waits))
        drained = [batch(position, waits[position:end])] if end > position else []
        starts.add(drained, [each for each in begun if position <= each < end], workers=2)
        position = end
    assert (starts.totals.calls, starts.totals.ns) == (4, 4 * 550)


def test_epochs_without_longer_starts_cost_nothing() -> None:
    starts = EpochStarts()
    starts.add([batch(0, epochs(5, 8, [], 10)), batch(0, [9999], VALIDATE)], [0, 8, 16, 24, 32], workers=4)
    assert (starts.totals.calls, starts.totals.ns) == (4, 0)


@pytest.mark.parametrize("begun", [[], [0]])
def test_run_without_a_second_pass_has_no_starts(begun: list[int]) -> None:
    starts = EpochStarts()
    starts.add([batch(0, epochs(1, 40, [900], 10))], begun, workers=0)
    assert (starts.totals.calls, starts.totals.ns) == (0, 0)


class Iterator:
    """One that a loop draws from."""


def test_iterators_beyond_eight_are_forgotten_oldest_first() -> None:
    buffer: Any = EventBuffer(256)
    iterators = Iterators(buffer)
    alive = [Iterator() for _ in range(9)]
    for each in alive:
        iterators.begin(each)
    gone = [id(each) for each in alive]
    buffer.skip(len(buffer))
    del each
    alive.clear()
    iterators.begin([])
    words = [word for _, word in struct.iter_unpack(codes.EVENT_FORMAT, buffer.peek())]
    left = [word >> codes.ARGUMENT_SHIFT for word in words if word & codes.CODE_MASK == codes.LEFT]
    assert left == gone[1:]
