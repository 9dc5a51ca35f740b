"""Totals, blocks of steps and names of phases."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.scripted import WALL_AHEAD, Clock

from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd.steps.phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OTHER,
    PHASE_SLOTS,
    TRAIN,
    VALIDATE,
    PhaseNames,
    StepBatch,
)
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import MAX_BLOCKS, StepBlocks
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd.v1.contract import MAX_USER_PHASES, PHASES


def record(steps: list[tuple[int, int, dict[int, int]]], before: int = 0) -> list[StepBatch]:
    """Return drained steps of (kind, samples, nanoseconds by phase), after so many of each kind."""
    clock = Clock()
    recorder = Recorder(clock, capacity=64)
    indices = {TRAIN: before, VALIDATE: before}
    recorder.wall_offset = WALL_AHEAD
    recorder.open()
    for kind, samples, phases in steps:
        recorder.samples = samples
        for phase, ns in phases.items():
            recorder.enter(phase)
            clock.advance(ns)
            recorder.exit()
        recorder.close(kind, indices[kind])
        indices[kind] += 1
    return recorder.drain()


def test_kinds_are_kept_apart_however_they_are_mixed() -> None:
    totals = Totals()
    totals.add(
        record(
            [
                (TRAIN, 4, {DATA: 1}),
                (TRAIN, 4, {DATA: 10}),
                (VALIDATE, 8, {DATA: 100}),
                (TRAIN, 4, {DATA: 1000}),
                (VALIDATE, 8, {DATA: 10_000}),
                (VALIDATE, 8, {FORWARD: 100_000}),
            ]
        )
    )
    assert (totals.train.steps, totals.train.ns, totals.train.samples) == (3, 1011, 12)
    assert (totals.validate.steps, totals.validate.ns, totals.validate.samples) == (3, 110_100, 24)
    assert totals.train.phases[DATA] == PhaseTotals(3, 1011, 1.0 + 100 + 10**6)
    assert totals.validate.phases[DATA] == PhaseTotals(2, 10_100, 10.0**4 + 10**8)
    assert totals.validate.phases[FORWARD] == PhaseTotals(1, 100_000, 10.0**10)
    assert totals.train.phases[FORWARD] == PhaseTotals()


def test_folding_nothing_changes_nothing() -> None:
    totals = Totals()
    totals.add(record([]))
    assert totals == Totals()


def test_the_first_training_step_is_also_kept_by_itself() -> None:
    totals = Totals()
    totals.add(record([(VALIDATE, 8, {FORWARD: 7}), (TRAIN, 4, {FORWARD: 1000, DATA: 5})]))
    totals.add(record([(TRAIN, 4, {FORWARD: 10}), (TRAIN, 4, {FORWARD: 30}), (TRAIN, 4, {})], before=1))
    assert (totals.train.steps, totals.train.ns, totals.train.samples) == (4, 1045, 16)
    assert (totals.warmup.steps, totals.warmup.ns, totals.warmup.samples) == (1, 1005, 4)
    assert totals.warmup.phases[FORWARD] == PhaseTotals(1, 1000, 1e6)
    steady = totals.steady()
    assert (steady.steps, steady.ns, steady.samples, steady.squares) == (3, 40, 12, 1000.0)
    assert steady.phases[FORWARD] == PhaseTotals(2, 40, 1000.0)
    assert steady.phases[DATA] == PhaseTotals()
    assert sum(phase.ns for phase in steady.phases) == steady.ns


def test_steps_deviate_from_their_mean_if_that_was_kept() -> None:
    totals = Totals()
    totals.add(record([(VALIDATE, 0, {DATA: ns}) for ns in (2, 4, 4, 10)]))
    assert totals.validate.std_seconds == pytest.approx(3e-9)
    assert KindTotals().std_seconds is None
    assert KindTotals(steps=2, ns=10).std_seconds is None


def test_fit_spans_first_to_last_step_with_all_between() -> None:
    clock = Clock()
    recorder = Recorder(clock, capacity=4)
    recorder.wall_offset = WALL_AHEAD
    totals = Totals()
    for index in range(2):
        recorder.open()
        clock.advance(100)
        recorder.close(TRAIN, index)
        recorder.abandon()
        totals.add(recorder.drain())
        clock.advance(1000)
    assert totals.ended_ns - totals.began_ns == 1200
    assert totals.train.ns == 200


def test_copy_does_not_change_with_the_totals() -> None:
    totals = Totals()
    totals.add(record([(TRAIN, 1, {DATA: 5})]))
    copy = totals.copy()
    assert copy == totals
    totals.add(record([(TRAIN, 1, {DATA: 5})], before=1))
    assert (copy.train.steps, copy.train.phases[DATA].ns, copy.warmup.steps) == (1, 5, 1)


def test_a_copy_shares_nothing_that_may_change() -> None:
    totals = Totals(
        epoch=PhaseTotals(1, 5, 25.0), cuda=CudaMemory(1, 2, 3), overhead=0.01, degradation_level=1
    )
    copy = totals.copy()
    assert copy == totals
    for phase in (totals.epoch, totals.train_pass, totals.validate_pass, totals.checkpoint):
        phase.calls += 1
    totals.gc[2].calls += 1
    assert (copy.epoch, copy.train_pass, copy.validate_pass) == (
        PhaseTotals(1, 5, 25.0),
        PhaseTotals(),
        PhaseTotals(),
    )
    assert (copy.checkpoint, copy.gc) == (PhaseTotals(), (GcTotals(), GcTotals(), GcTotals()))


def test_what_remains_is_less_in_everything() -> None:
    whole = KindTotals(steps=3, ns=60, samples=9, squares=1400.0, micro_batches=6, skipped=1, tokens=300)
    whole.phases[DATA] = PhaseTotals(3, 60, 1400.0, 30, 2)
    part = KindTotals(steps=1, ns=10, samples=3, squares=100.0, micro_batches=2, tokens=100)
    part.phases[DATA] = PhaseTotals(1, 10, 100.0, 20, 1)
    rest = whole.minus(part)
    expected = KindTotals(2, 50, 6, squares=1300.0, micro_batches=4, skipped=1, tokens=200)
    expected.phases[DATA] = PhaseTotals(2, 50, 1300.0, 10, 1)
    assert rest == expected


def test_time_on_the_device_is_a_mean_of_the_calls_timed_there() -> None:
    assert PhaseTotals(9, 1, 1.0, device_ns=30, device_calls=2).device_mean_seconds == pytest.approx(15e-9)
    assert PhaseTotals(9, 1, 1.0).device_mean_seconds is None


def test_the_peak_is_used_as_far_as_the_steps_go() -> None:
    totals = Totals(flops_per_step=4e12, peak_flops=1e15)
    steps = KindTotals(steps=10, ns=100_000_000)
    assert totals.flops_utilization(steps) == pytest.approx(0.4)
    assert totals.flops_utilization(KindTotals()) is None
    assert Totals(flops_per_step=4e12).flops_utilization(steps) is None
    assert Totals(peak_flops=1e15).flops_utilization(steps) is None


def test_of_finds_the_kind_or_says_that_there_is_none() -> None:
    totals = Totals()
    assert totals.of(TRAIN) is totals.train
    assert totals.of(VALIDATE) is totals.validate
    with pytest.raises(ValueError, match="no such kind of step: 3"):
        totals.of(3)


def test_mean_and_deviation_are_those_of_the_calls() -> None:
    phase = PhaseTotals(calls=4, ns=20, squares=float(2 * 2 + 4 * 4 + 4 * 4 + 10 * 10))
    assert phase.mean_seconds == pytest.approx(5e-9)
    assert phase.std_seconds == pytest.approx(3e-9)
    assert phase.seconds == pytest.approx(20e-9)


def test_a_phase_that_never_was_has_zeros() -> None:
    assert (PhaseTotals().mean_seconds, PhaseTotals().std_seconds) == (0.0, 0.0)


def test_rounding_never_takes_the_root_of_a_negative_variance() -> None:
    ns = 3_333_333_333
    assert PhaseTotals(calls=3, ns=3 * ns, squares=3 * float(ns) ** 2 * (1 - 1e-15)).std_seconds == 0.0


_STEPS = st.lists(
    st.tuples(
        st.sampled_from([TRAIN, VALIDATE]),
        st.integers(0, 4096),
        st.dictionaries(st.integers(0, PHASE_SLOTS - 1), st.integers(0, 10**10), max_size=6),
    ),
    max_size=40,
)


@settings(max_examples=100)
@given(_STEPS, st.integers(0, 40))
def test_totals_are_the_sum_of_steps_for_any_drain_order(
    steps: list[tuple[int, int, dict[int, int]]], cut: int
) -> None:
    totals = Totals()
    totals.add(record(steps[:cut]))
    totals.add(record(steps[cut:]))
    for kind in (TRAIN, VALIDATE):
        own = [(samples, phases) for step_kind, samples, phases in steps if step_kind == kind]
        kind_totals = totals.of(kind)
        assert kind_totals.steps == len(own)
        assert kind_totals.samples == sum(samples for samples, _ in own)
        assert kind_totals.ns == sum(sum(phases.values()) for _, phases in own)
        assert sum(phase.ns for phase in kind_totals.phases) == kind_totals.ns
        for slot in set(range(PHASE_SLOTS)) - {OTHER}:
            spent = [phases[slot] for _, phases in own if slot in phases]
            assert kind_totals.phases[slot].calls == len(spent)
            assert kind_totals.phases[slot].ns == sum(spent)
            assert math.isclose(kind_totals.phases[slot].squares, sum(float(ns) ** 2 for ns in spent))


def test_phase_open_across_an_edge_is_in_totals_before_its_end() -> None:
    clock = Clock()
    recorder = Recorder(clock, capacity=4)
    recorder.wall_offset = WALL_AHEAD
    recorder.enter(PHASE_SLOTS - 1)
    for index in range(3):
        clock.advance(10)
        recorder.close(TRAIN, index)
    totals = Totals()
    totals.add(recorder.drain())
    assert totals.train.phases[PHASE_SLOTS - 1] == PhaseTotals(3, 30, 300.0)
    assert totals.train.ns == 30


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


def test_built_in_phases_have_their_slots_from_the_start() -> None:
    names = PhaseNames()
    assert [names.slot(name) for name in PHASES] == list(range(len(PHASES)))
    assert len(names) == len(PHASES)


def test_user_phases_keep_slots_in_order_of_first_use() -> None:
    names = PhaseNames()
    first = names.slot("augment")
    second = names.slot("log metrics ✓")
    assert (first, second) == (len(PHASES), len(PHASES) + 1)
    assert names.slot("augment") == first
    assert names.name(first) == "augment"
    assert names.name(second) == "log metrics ✓"
    assert len(names) == len(PHASES) + 2


def test_sixteen_user_phases_are_distinct_and_the_next_is_other() -> None:
    names = PhaseNames()
    slots = [names.slot(f"mine {number}") for number in range(MAX_USER_PHASES)]
    assert slots == list(range(len(PHASES), PHASE_SLOTS))
    assert names.overflowed == set()
    assert names.slot("one too many") == OTHER
    assert names.slot("mine 15") == PHASE_SLOTS - 1
    assert names.overflowed == {"one too many"}
    assert len(names) == PHASE_SLOTS == 27


def test_what_overflows_is_remembered_within_bounds() -> None:
    names = PhaseNames()
    for number in range(10_000):
        names.slot(f"batch {number}")
    assert len(names.overflowed) == MAX_USER_PHASES
    assert len(names) == PHASE_SLOTS


@pytest.mark.parametrize("name", ["", "x" * 65, "two\nlines", "tab\t", "\x1b[31m"])
def test_names_that_no_label_could_carry_are_refused(name: str) -> None:
    names = PhaseNames()
    with pytest.raises(ValueError, match="1 to 64 printable characters"):
        names.slot(name)
    assert len(names) == len(PHASES)


def test_the_longest_name_is_64_characters() -> None:
    assert PhaseNames().slot("x" * 64) == len(PHASES)
