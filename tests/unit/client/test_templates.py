"""Step templates: replayed at once or event by event, the same events give the same steps."""

import os
from array import array
from dataclasses import astuple, dataclass
from struct import pack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.client.scripted import Step, all_names, unpack

from torchperfd.events import codes
from torchperfd.safety.logs import Faults
from torchperfd.steps import replay, templates
from torchperfd.steps.phase_stack import MAX_DEPTH
from torchperfd.steps.phases import LOSS, OTHER, PHASE_SLOTS, StepBatch
from torchperfd.steps.replay import Replay
from torchperfd.steps.step_series import Arrivals
from torchperfd.steps.totals import KindTotals, Totals

if templates.AVAILABLE or os.environ.get("CI"):
    from torchperfd.steps import _templates as _step_templates
else:
    pytest.skip("the C half was not built", allow_module_level=True)

Event = tuple[int, int]  # a code, an argument; times come later


class ReadyBuffer:
    """A ring buffer on which everything is written already; ``there`` says up to where it has been."""

    def __init__(self, events: bytes) -> None:
        self.thread = 1
        self.lost = 0
        self.on_event = None
        self._events = events
        self._taken = 0
        self.there = 0

    def here(self) -> bool:
        return False

    def __len__(self) -> int:
        return self.there - self._taken

    def peek(self) -> bytes:
        return self._events[16 * self._taken : 16 * self.there]

    def skip(self, count: int) -> None:
        assert 0 <= count <= len(self)
        self._taken += count

    def __getattr__(self, name: str) -> Any:
        return None


@dataclass
class Read:
    """What a replay has made of a ring buffer."""

    batches: list[StepBatch]
    state: dict[str, Any]
    reported: int
    arrivals: Arrivals


def read(events: bytes, turns: list[int], capacity: int, *, at_once: bool, again: bool = False) -> Read:
    """Read a ring buffer in turns of so many events; ``again``: without steps that have only begun."""
    buffer = ReadyBuffer(events)
    reader = Replay(buffer, capacity, Faults())  # type: ignore[arg-type]
    reported = 0

    def counted(handler: Any) -> Any:
        def call(argument: int) -> None:
            nonlocal reported
            reported += 1
            handler(argument)

        return call

    reader.handlers = [counted(handler) for handler in reader.handlers]
    clock = SimpleNamespace(time_ns=lambda: 5_000, perf_counter_ns=lambda: 3_000, sleep=lambda _: None)
    batches: list[StepBatch] = []
    with mock.patch.object(replay, "time", clock), mock.patch.object(templates, "AVAILABLE", at_once):
        for turn in turns:
            buffer.there += turn
            batches += reader.drain(again=again)
        buffer.there = len(events) // 16
        batches += reader.drain()
        reader.finish()
    batches += reader.drain()
    loop, epochs, recorder = reader.loop, reader.epochs, reader.recorder
    state = {
        **loop.counts(),
        "state_key": loop.state_key(),
        "ready": loop.ready,
        "saves": astuple(loop.saves),
        "warm-up tokens": loop.warmup_tokens,
        "passes": (epochs.epoch, epochs.train, epochs.validate),
        "recorded": (recorder.recorded, recorder.dropped, recorder.depth, recorder.is_open, recorder.last),
        "faults": reader.faults.counts(),
    }
    return Read(batches, state, reported, recorder.arrivals.drain())


def written(events: list[Event], gaps: list[int]) -> bytes:
    """Return events as a drained buffer, with alternating gaps between them."""
    now, packed = 10**6, []
    for number, (code, argument) in enumerate(events):
        now += gaps[number % len(gaps)] * (1 + number % 7)
        packed.append(pack("=qq", now, argument << codes.ARGUMENT_SHIFT | code))
    return b"".join(packed)


def check_alike(events: list[Event], gaps: list[int], turns: list[int]) -> tuple[int, int]:
    """Read both ways and compare; return the numbers of events replayed one by one and at once."""
    buffer, names = written(events, gaps), all_names()
    bounded: list[int] = []
    for turn in turns:
        bounded.append(min(turn, len(events) - sum(bounded)))
    slow = read(buffer, bounded, 4096, at_once=False)
    check_whole(unpack(slow.batches, names))
    for again in (True, False):
        fast = read(buffer, bounded, 4096, at_once=True, again=again)
        assert fast.state == slow.state
        assert fast.arrivals == slow.arrivals
        assert unpack(fast.batches, names) == unpack(slow.batches, names)
        assert [step.start for step in unpack(fast.batches, names)] == [
            step.start for step in unpack(slow.batches, names)
        ]
        check_sums(fast.batches, slow.batches)
    return slow.reported, fast.reported


def check_whole(steps: list[Step]) -> None:
    """Check that each step's phases make it up, none of them below zero, and that steps follow each other."""
    over: dict[str, int] = {}
    for step in steps:
        assert sum(ns for _, ns in step.phases.values()) == step.duration
        assert all(ns >= 0 and calls > 0 for calls, ns in step.phases.values()), step
        assert step.samples >= 0
        # Of one kind: whether a batch was a micro-batch may show only after a validation.
        assert step.start >= over.get(step.kind, step.start)
        over[step.kind] = step.start + step.duration


def check_sums(batches: list[StepBatch], expected: list[StepBatch]) -> None:
    """Check that they add up to the same, however they are cut."""
    totals, other = Totals(), Totals()
    totals.add(batches)
    other.add(expected)
    for one, two in zip(kinds(totals), kinds(other), strict=True):
        # Sums of squares are rounded once in each stretch.
        assert [one.squares, *(phase.squares for phase in one.phases)] == pytest.approx(
            [two.squares, *(phase.squares for phase in two.phases)], rel=1e-12
        )
        for each in (one, two):
            each.squares = 0.0
            for phase in each.phases:
                phase.squares = 0.0
    assert totals == other


def kinds(totals: Totals) -> list[KindTotals]:
    return [totals.train, totals.validate, totals.warmup]


def called(begin: int, end: int, argument: int = 0) -> list[Event]:
    return [(begin, argument), (end, argument)]


FORWARD = called(codes.FORWARD, codes.FORWARD_END)
EVALUATE = called(codes.EVALUATE, codes.FORWARD_END)
ACT = called(codes.EVALUATE, codes.FORWARD_END, codes.EVALUATE_IN_TRAINING_MODE)
BACKWARD = called(codes.BACKWARD, codes.BACKWARD_END)
ZERO = called(codes.ZERO, codes.ZERO_END)
OPTIMIZER = called(codes.OPTIMIZER, codes.OPTIMIZER_END, 1)
SECOND = called(codes.OPTIMIZER, codes.OPTIMIZER_END, 2)
SCALED = [(codes.SCALER, 1), *OPTIMIZER, (codes.SCALER_END, 0)]
SKIPPED = [(codes.SCALER, 1), (codes.SCALER_END, 0)]
USER = called(codes.ENTER, codes.EXIT, 14)
SAVE = called(codes.SAVE, codes.SAVE_END)
COLLECTIVE = called(codes.COLLECTIVE, codes.COLLECTIVE_END)


def reduced(ago: int) -> list[Event]:
    """Return a backward that DDP's wait is the end of."""
    return [(codes.BACKWARD, 0), (codes.REDUCTION, ago), (codes.BACKWARD_END, 0)]


def draw(iterator: int, samples: int) -> list[Event]:
    return [(codes.DRAW, iterator), (codes.DRAWN, samples)]


def epoch(steps: list[list[Event]], loader: int, *, ready: bool = False) -> list[Event]:
    """Return a pass over a loader, whose batches are of 32 samples but for the last one."""
    events: list[Event] = []
    iterator = loader << 4  # as an address is, which has no low bits
    for number, step in enumerate(steps):
        if ready:
            events.append((codes.READY, number % 5 + 1))
        events += draw(iterator, 32 if number + 1 < len(steps) else 7) + step
    return [*events, (codes.DRAW, iterator), (codes.EXHAUSTED, iterator)]


PLAIN = [*ZERO, *FORWARD, *BACKWARD, *OPTIMIZER]
STEPS = {
    "plain": PLAIN,
    "zeroed last": [*FORWARD, *BACKWARD, *OPTIMIZER, *ZERO],
    "scaler": [*ZERO, *FORWARD, *BACKWARD, *SCALED],
    "user phases": [*USER, *FORWARD, *USER, *BACKWARD, *OPTIMIZER, *ZERO],
    "nested": [(codes.ENTER, 15), *FORWARD, *USER, (codes.EXIT, 0), *BACKWARD, *OPTIMIZER],
    "two losses": [*ZERO, *FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *OPTIMIZER],
    "two optimizers": [*FORWARD, *BACKWARD, *OPTIMIZER, *BACKWARD, *SECOND],
    "tokens": [*PLAIN, (codes.TOKENS, 128)],
    "acting": [*ACT, *USER, *ACT, *ZERO, *FORWARD, *BACKWARD, *OPTIMIZER],
    "teacher": [*FORWARD, *ACT, *BACKWARD, *OPTIMIZER, *ACT],
    "DDP": [*ZERO, *COLLECTIVE, *FORWARD, *reduced(30), *OPTIMIZER],
    "FSDP": [
        *(*ZERO, (codes.FORWARD, 0), *COLLECTIVE, *COLLECTIVE, (codes.FORWARD_END, 0)),
        *((codes.BACKWARD, 0), *COLLECTIVE, (codes.BACKWARD_END, 0), *OPTIMIZER),
    ],
    "a phase in itself": [*FORWARD, *BACKWARD, (codes.OPTIMIZER, 1), *SECOND, (codes.OPTIMIZER_END, 1)],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("ready", [False, True])
def test_equal_steps_use_a_template(name: str, ready: bool) -> None:
    step = STEPS[name]
    events = epoch([step] * 200, 7, ready=ready) + epoch([step] * 100, 8, ready=ready)
    slow, fast = check_alike(events, [100, 3, 70], [500, 501, 1])
    assert slow == len(events)
    assert fast < 0.15 * slow


def test_a_loop_that_says_where_its_steps_end() -> None:
    step = [*FORWARD, *BACKWARD, *OPTIMIZER, (codes.STEP, 16)]
    slow, fast = check_alike(step * 300, [10, 400], [900])
    assert fast < 0.15 * slow


def test_evaluations_with_gradients_have_templates() -> None:
    training = [*epoch([PLAIN] * 50, 7)[:-2], *epoch([FORWARD] * 100, 8), *epoch([PLAIN] * 50, 7)]
    slow, fast = check_alike(training * 3, [10, 400, 3], [900])
    assert fast < 0.3 * slow


def test_validation_steps_have_templates_too() -> None:
    events = epoch([PLAIN] * 100, 7) + epoch([EVALUATE] * 100, 8) + epoch([PLAIN] * 100, 9)
    slow, fast = check_alike(events, [10, 400, 3], [900])
    assert fast < 0.15 * slow


def test_a_phase_of_the_scripts_own_around_the_whole_loop() -> None:
    events = [(codes.ENTER, 14), *epoch([PLAIN] * 100, 7), (codes.EXIT, 0), *epoch([PLAIN] * 50, 7)]
    check_alike(events, [10, 400, 3], [300, 400])


@pytest.mark.parametrize("at_once", [True, False])
def test_more_steps_than_the_recorder_has_room_for_are_put_aside(at_once: bool) -> None:
    whole = read(written(epoch([PLAIN] * 3000, 7), [10, 400, 3]), [20_000], 512, at_once=at_once)
    assert whole.state["recorded"][:2] == (3000, 0)
    assert [step.index for step in unpack(whole.batches)] == [*range(3000)]


def test_many_events_across_lock_releases_give_the_same_steps() -> None:
    events = written(epoch([PLAIN] * 8000, 7), [10, 400, 3])
    assert len(events) > 65_536 * 16
    whole, parts = (read(events, [turn], 512, at_once=True) for turn in (len(events) // 16, 20_000))
    assert whole.state["recorded"][:2] == (8000, 0)
    assert unpack(whole.batches) == unpack(parts.batches)


_STEP = st.sampled_from(
    [
        *STEPS.values(),
        [*ZERO, *FORWARD, *BACKWARD, *SKIPPED],
        [*FORWARD, *BACKWARD],  # a micro-batch
        EVALUATE,
        [*PLAIN, *EVALUATE],
        [*PLAIN, *SAVE],
        [*PLAIN, (codes.SAMPLES, 9)],
        [*PLAIN, (codes.BETWEEN, 0)],
        [*PLAIN, (codes.STEP, 4)],
        [*PLAIN, *PLAIN],
        ACT,
        FORWARD,
        # Phases of the script's own with the names of those that follow an acting forward.
        *(
            [*ACT, *called(codes.ENTER, codes.EXIT, slot), *FORWARD, *BACKWARD, *OPTIMIZER]
            for slot in (LOSS, OTHER)
        ),
        *(
            [*PLAIN, (codes.EVALUATION_MODE, 0), *step, (codes.TRAINING_MODE, 0)]
            for step in ([], EVALUATE, SAVE)
        ),
        called(codes.EVALUATE, codes.FORWARD_END, codes.EVALUATE_WITH_GRADIENTS),
        [(codes.DRAW, 9 << 4 | codes.DRAW_WITHOUT_GRADIENTS), (codes.DRAWN, 4)],
        [(codes.PASS, 0), (codes.LEFT, 7 << 4)],
        [],
    ]
)
_EPOCHS = st.lists(
    st.tuples(
        st.lists(st.tuples(_STEP, st.integers(1, 12)), min_size=1, max_size=5),
        st.integers(7, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
# Flags, phases, and iterators with and without flags.
_ARGUMENTS = (0, 1, 2, 3, 7 << 4, 7 << 4 | 1, 7 << 4 | 2, 8 << 4, 8 << 4 | 3)
_NOISE = st.lists(
    st.tuples(st.integers(0, 500), st.tuples(st.integers(0, codes.CODES - 1), st.sampled_from(_ARGUMENTS))),
    max_size=4,
)


@given(
    _EPOCHS,
    _NOISE,
    st.lists(st.integers(0, 10**6), min_size=1, max_size=9),
    st.lists(st.integers(0, 150), max_size=6),
)
@example([([(PLAIN, 12)], 7, False)], [(40, (codes.EXIT, 0))], [5], [])
@example([([(PLAIN, 8)], 7, False)], [(13, (codes.DRAW, 0)), (70, (codes.DRAW, 0))], [1], [])
def test_any_events_give_the_same_steps_with_templates(
    epochs: list[tuple[list[tuple[list[Event], int]], int, bool]],
    noise: list[tuple[int, Event]],
    gaps: list[int],
    turns: list[int],
) -> None:
    events: list[Event] = []
    for parts, iterator, ready in epochs:
        events += epoch([step for step, times in parts for _ in range(times)], iterator, ready=ready)
    for place, (code, argument) in noise:
        # There are only so many phases.
        event = code, argument % PHASE_SLOTS if code == codes.ENTER else argument
        events.insert(place % len(events), event)
    check_alike(events, gaps, turns)


def test_phases_sum_after_a_hook_has_failed() -> None:
    """A forward without gradients comes next, which sets aside what has begun: of that, nothing is known."""
    evaluation = [*ZERO, *FORWARD, *BACKWARD, *OPTIMIZER, *EVALUATE]
    events = epoch([[*ZERO, *FORWARD, *BACKWARD, *SCALED], *[evaluation] * 6], 7, ready=True)
    for place in range(len(events)):
        check_alike([*events[:place], (codes.ABANDON, 0), *events[place:]], [1], [])


def test_phase_open_at_the_end_ends_with_the_newest_event() -> None:
    """A forward that raised, say: the steps around which it is open may have been read all at once."""
    check_alike([(codes.FORWARD, 0), *[(codes.STEP, 3)] * 3], [0, 5, 5, 5], [])


def test_a_phase_of_the_gaps_own_name_is_part_of_it() -> None:
    """So are the phases of the script's own beyond the sixteenth; here where a draw may have been an edge."""
    draws = [(codes.DRAW, 113), (codes.DRAWN, 4)] * 3
    check_alike([(codes.ENTER, OTHER), *draws, *EVALUATE], [1, 5, 1, 5], [])


def test_times_beyond_what_a_double_holds_are_squared_exactly() -> None:
    check_alike(epoch([PLAIN] * 50, 7), [10**10 + 1, 3 * 10**9 + 7], [200])


@pytest.mark.parametrize(
    "ops",
    [
        b"",
        b"\0",
        b"\1\0",
        b"\5\1",  # an event that does not end
        b"\2\0\0\0",  # leaves what is not open
        b"\5\1\5\1\0\0",  # two steps
        b"\1\xff\5\1\2\0\0\0",  # no such phase
        b"\6\xff\5\1\2\0\0\0",  # no such phase of collectives
        b"\7\0\5\1\0\0",  # no such op
        b"\1\0" * (MAX_DEPTH + 2) + b"\0\0",
    ],
)
def test_nonsense_is_refused(ops: bytes) -> None:
    with pytest.raises(ValueError, match="do not make up one step"):
        repeat(ops, 0)


def test_too_deep_a_start_is_refused() -> None:
    assert repeat(b"\5\1\0\0", 0)[0] == 0
    with pytest.raises(ValueError, match="do not make up one step"):
        repeat(b"\5\1\0\0", MAX_DEPTH + 1)


def repeat(ops: bytes, depth: int) -> tuple[int, bool, int, bytes, tuple[tuple[int, int, float], ...], bytes]:
    state_key = Replay(ReadyBuffer(b""), 4, Faults()).recorder.packed_state()  # type: ignore[arg-type]
    state_key[2] = depth
    words = array("q", [0])
    phases = bytes(range(PHASE_SLOTS))
    return _step_templates.repeat(memoryview(b""), words, words, ops, state_key, phases, OTHER, 0, 0)


def test_a_phase_that_was_not_announced_is_refused() -> None:
    state_key = Replay(ReadyBuffer(b""), 4, Faults()).recorder.packed_state()  # type: ignore[arg-type]
    words = array("q", [0])
    for ops, phases in (
        (b"\1\2\5\1\2\0\0\0", bytes([OTHER])),
        (b"\5\1\0\0", b"\2"),
        (b"\5\1\0\0", b"\xff"),
    ):
        with pytest.raises(ValueError, match="do not make up one step"):
            _step_templates.repeat(memoryview(b""), words, words, ops, state_key, phases, OTHER, 0, 0)


def test_steps_say_what_they_were() -> None:
    batches = read(written(epoch([PLAIN] * 20, 7), [100]), [], 64, at_once=True).batches
    steps = unpack(batches)
    assert [step.index for step in steps] == [*range(20)]
    assert [step.samples for step in steps] == [32] * 19 + [7]
    for step in steps:
        assert sum(ns for _, ns in step.phases.values()) == step.duration
    assert max(batch.count for batch in batches) > 10


def test_what_has_begun_waits_for_the_rest_but_not_for_ever() -> None:
    buffer = ReadyBuffer(written([*epoch([PLAIN] * 20, 7)], [100]))
    reader = Replay(buffer, 64, Faults())  # type: ignore[arg-type]
    buffer.there = 10 * len(PLAIN) + 10 * 2 + 5  # within the eleventh step
    reader.drain(again=True)
    left = len(buffer)
    assert 0 < left <= len(PLAIN) + 2
    assert reader.loop.train_steps == 10
    buffer.there += 1
    reader.drain(again=True)
    assert len(buffer) == left + 1, "there was more of it"
    reader.drain(again=True)
    assert len(buffer) == 0, "there was not"
    assert reader.recorder.is_open
    buffer.there += 3 * (len(PLAIN) + 2)
    reader.drain(again=True)
    buffer.there += 1
    reader.drain()
    assert len(buffer) == 0, "a step that does not repeat is replayed whole"
    assert reader.loop.train_steps == 13
