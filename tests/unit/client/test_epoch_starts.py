"""Waits for the first batches of epochs, in steps that are drained in pieces of any length."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.steps.epochs import EpochStarts
from torchperfd.steps.phases import DATA, TRAIN, VALIDATE, PhaseColumns, StepBatch


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
