"""Blocks of steps: the same sums in whatever batches the steps come, in fixed memory."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.test_totals import record

from torchperfd.steps.phases import BACKWARD, DATA, FORWARD, TRAIN, VALIDATE, StepBatch
from torchperfd.steps.step_series import MAX_BLOCKS, StepBlocks


def train(times: list[int], before: int) -> list[StepBatch]:
    """Return training steps of a millisecond of data, and so many nanoseconds forward."""
    return record([(TRAIN, 1, {DATA: 1_000_000, FORWARD: ns}) for ns in times], before)


def test_blocks_few_steps_have_one_each_without_the_first() -> None:
    blocks = StepBlocks()
    for batch in train([9_000, 10, 20, 30], before=0):
        blocks.add(batch)
    sums = blocks.sums()
    assert (sums.steps, sums.step_ns) == (1, (1_000_010, 1_000_020, 1_000_030))
    assert sums.phase_ns[FORWARD] == (10, 20, 30)
    assert sums.phase_ns[DATA] == (1_000_000,) * 3


def test_blocks_validation_is_left_out() -> None:
    blocks = StepBlocks()
    for batch in record([(VALIDATE, 1, {FORWARD: 5}), (VALIDATE, 1, {FORWARD: 5})], before=3):
        blocks.add(batch)
    assert blocks.sums().step_ns == ()


def test_blocks_phase_that_begins_late_is_zero_before() -> None:
    blocks = StepBlocks()
    steps = record(
        [(TRAIN, 1, {FORWARD: 5}), (TRAIN, 1, {FORWARD: 5, BACKWARD: 7}), (TRAIN, 1, {FORWARD: 6})], before=1
    )
    for batch in steps:
        blocks.add(batch)
    phases = blocks.sums().phase_ns
    assert (phases[FORWARD], phases[BACKWARD]) == ((5, 5, 6), (0, 7, 0))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60))
def test_blocks_do_not_depend_on_batches(sizes: list[int]) -> None:
    total = sum(sizes)
    times = [1000 + 37 * number % 991 for number in range(total)]
    blocks, position = StepBlocks(), 0
    for size in sizes:
        for batch in train(times[position : position + size], before=1 + position):
            blocks.add(batch)
        position += size
    sums = blocks.sums()
    assert len(sums.step_ns) == total // sums.steps < MAX_BLOCKS
    assert sums.steps == 1 or len(sums.step_ns) >= MAX_BLOCKS // 2
    edges = range(0, len(sums.step_ns) * sums.steps, sums.steps)
    assert sums.phase_ns[FORWARD] == tuple(sum(times[first : first + sums.steps]) for first in edges)
    assert sums.step_ns == tuple(ns + sums.steps * 1_000_000 for ns in sums.phase_ns[FORWARD])
