"""Cycles: told all at once or one by one, the same steps come of the same events."""

import os
from array import array
from dataclasses import dataclass
from struct import pack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.client.scripted import Step, all_names, unpack

from torchperfd.events import codes as on_tape
from torchperfd.faults import Faults
from torchperfd.steps import replay
from torchperfd.steps import templates as cycles
from torchperfd.steps.arrivals import Arrivals
from torchperfd.steps.recorder import MAX_DEPTH, OTHER, PHASE_SLOTS
from torchperfd.steps.replay import Replay
from torchperfd.steps.step_batch import StepBatch
from torchperfd.steps.totals import Account, KindTotals

if cycles.AVAILABLE or os.environ.get("CI"):
    from torchperfd.steps import _templates as _cycles
else:
    pytest.skip("the C half was not built", allow_module_level=True)

Event = tuple[int, int]  # a code, an argument; times come later


class ReadyTape:
    """A tape on which everything is written already; ``there`` says up to where it has been."""

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
    """What a replay has made of a tape."""

    stretches: list[StepBatch]
    state: dict[str, Any]
    told: int
    arrivals: Arrivals


def read(events: bytes, turns: list[int], capacity: int, *, at_once: bool, again: bool = False) -> Read:
    """Read a tape in turns of so many events; ``again``: without steps that have only begun."""
    tape = ReadyTape(events)
    reader = Replay(tape, capacity, Faults())  # type: ignore[arg-type]
    told = 0

    def counted(handler: Any) -> Any:
        def tell(argument: int) -> None:
            nonlocal told
            told += 1
            handler(argument)

        return tell

    reader._handlers = [counted(handler) for handler in reader._handlers]
    clock = SimpleNamespace(time_ns=lambda: 5_000, perf_counter_ns=lambda: 3_000, sleep=lambda _: None)
    stretches: list[StepBatch] = []
    with mock.patch.object(replay, "time", clock), mock.patch.object(cycles, "AVAILABLE", at_once):
        for turn in turns:
            tape.there += turn
            stretches += reader.drain(again=again)
        tape.there = len(events) // 16
        stretches += reader.drain()
        reader.finish()
    stretches += reader.drain()
    loop, passes, recorder = reader.loop, reader.passes, reader.recorder
    state = {
        **loop.counts(),
        "standing": loop.standing(),
        "ready": loop.ready,
        "saves": (loop.saves, loop.save_ns, loop.save_squares),
        "warm-up tokens": loop.warmup_tokens,
        "passes": (passes.epoch, passes.train, passes.validate),
        "recorded": (recorder.recorded, recorder.dropped, recorder.depth, recorder.is_open, recorder.last),
        "faults": reader._faults.counts(),
    }
    return Read(stretches, state, told, recorder.arrivals.drain())


def written(events: list[Event], gaps: list[int]) -> bytes:
    """Return events as a drained tape, with the gaps between them by turns."""
    now, packed = 10**6, []
    for number, (code, argument) in enumerate(events):
        now += gaps[number % len(gaps)] * (1 + number % 7)
        packed.append(pack("=qq", now, argument << on_tape.ARGUMENT_SHIFT | code))
    return b"".join(packed)


def check_alike(events: list[Event], gaps: list[int], turns: list[int]) -> tuple[int, int]:
    """Read both ways and compare; return how many events were told, one by one and at once."""
    tape, names = written(events, gaps), all_names()
    bounded: list[int] = []
    for turn in turns:
        bounded.append(min(turn, len(events) - sum(bounded)))
    slow = read(tape, bounded, 4096, at_once=False)
    check_whole(unpack(slow.stretches, names))
    for again in (True, False):
        fast = read(tape, bounded, 4096, at_once=True, again=again)
        assert fast.state == slow.state
        assert fast.arrivals == slow.arrivals
        assert unpack(fast.stretches, names) == unpack(slow.stretches, names)
        assert [step.start for step in unpack(fast.stretches, names)] == [
            step.start for step in unpack(slow.stretches, names)
        ]
        check_sums(fast.stretches, slow.stretches)
    return slow.told, fast.told


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


def check_sums(stretches: list[StepBatch], expected: list[StepBatch]) -> None:
    """Check that they add up to the same, however they are cut."""
    account, other = Account(), Account()
    account.fold(stretches)
    other.fold(expected)
    for one, two in zip(kinds(account), kinds(other), strict=True):
        # Sums of squares are rounded once in each stretch.
        assert [one.squares, *(phase.squares for phase in one.phases)] == pytest.approx(
            [two.squares, *(phase.squares for phase in two.phases)], rel=1e-12
        )
        for totals in (one, two):
            totals.squares = 0.0
            for phase in totals.phases:
                phase.squares = 0.0
    assert account == other


def kinds(account: Account) -> list[KindTotals]:
    return [account.train, account.validate, account.warmup]


def called(begin: int, end: int, argument: int = 0) -> list[Event]:
    return [(begin, argument), (end, argument)]


FORWARD = called(on_tape.FORWARD, on_tape.FORWARD_END)
EVALUATE = called(on_tape.EVALUATE, on_tape.FORWARD_END)
BACKWARD = called(on_tape.BACKWARD, on_tape.BACKWARD_END)
ZERO = called(on_tape.ZERO, on_tape.ZERO_END)
OPTIMIZER = called(on_tape.OPTIMIZER, on_tape.OPTIMIZER_END, 1)
SECOND = called(on_tape.OPTIMIZER, on_tape.OPTIMIZER_END, 2)
SCALED = [(on_tape.SCALER, 1), *OPTIMIZER, (on_tape.SCALER_END, 0)]
SKIPPED = [(on_tape.SCALER, 1), (on_tape.SCALER_END, 0)]
USER = called(on_tape.ENTER, on_tape.EXIT, 14)
SAVE = called(on_tape.SAVE, on_tape.SAVE_END)
COLLECTIVE = called(on_tape.COLLECTIVE, on_tape.COLLECTIVE_END)


def reduced(ago: int) -> list[Event]:
    """Return a backward that DDP's wait is the end of."""
    return [(on_tape.BACKWARD, 0), (on_tape.REDUCTION, ago), (on_tape.BACKWARD_END, 0)]


def draw(iterator: int, samples: int) -> list[Event]:
    return [(on_tape.DRAW, iterator), (on_tape.DRAWN, samples)]


def epoch(steps: list[list[Event]], loader: int, *, ready: bool = False) -> list[Event]:
    """Return a pass over a loader, whose batches are of 32 samples but for the last one."""
    events: list[Event] = []
    iterator = loader << 4  # as an address is, which has no low bits
    for number, step in enumerate(steps):
        if ready:
            events.append((on_tape.READY, number % 5 + 1))
        events += draw(iterator, 32 if number + 1 < len(steps) else 7) + step
    return [*events, (on_tape.DRAW, iterator), (on_tape.EXHAUSTED, iterator)]


PLAIN = [*ZERO, *FORWARD, *BACKWARD, *OPTIMIZER]
STEPS = {
    "plain": PLAIN,
    "zeroed last": [*FORWARD, *BACKWARD, *OPTIMIZER, *ZERO],
    "scaler": [*ZERO, *FORWARD, *BACKWARD, *SCALED],
    "user phases": [*USER, *FORWARD, *USER, *BACKWARD, *OPTIMIZER, *ZERO],
    "nested": [(on_tape.ENTER, 15), *FORWARD, *USER, (on_tape.EXIT, 0), *BACKWARD, *OPTIMIZER],
    "two losses": [*ZERO, *FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *OPTIMIZER],
    "two optimizers": [*FORWARD, *BACKWARD, *OPTIMIZER, *BACKWARD, *SECOND],
    "tokens": [*PLAIN, (on_tape.TOKENS, 128)],
    "DDP": [*ZERO, *COLLECTIVE, *FORWARD, *reduced(30), *OPTIMIZER],
    "FSDP": [
        *(*ZERO, (on_tape.FORWARD, 0), *COLLECTIVE, *COLLECTIVE, (on_tape.FORWARD_END, 0)),
        *((on_tape.BACKWARD, 0), *COLLECTIVE, (on_tape.BACKWARD_END, 0), *OPTIMIZER),
    ],
    "a phase in itself": [*FORWARD, *BACKWARD, (on_tape.OPTIMIZER, 1), *SECOND, (on_tape.OPTIMIZER_END, 1)],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("ready", [False, True])
def test_of_steps_that_go_alike_few_are_told(name: str, ready: bool) -> None:
    step = STEPS[name]
    events = epoch([step] * 200, 7, ready=ready) + epoch([step] * 100, 8, ready=ready)
    slow, fast = check_alike(events, [100, 3, 70], [500, 501, 1])
    assert slow == len(events)
    assert fast < 0.15 * slow


def test_a_loop_that_says_where_its_steps_end() -> None:
    step = [*FORWARD, *BACKWARD, *OPTIMIZER, (on_tape.STEP, 16)]
    slow, fast = check_alike(step * 300, [10, 400], [900])
    assert fast < 0.15 * slow


def test_validation_goes_in_cycles_too() -> None:
    events = epoch([PLAIN] * 100, 7) + epoch([EVALUATE] * 100, 8) + epoch([PLAIN] * 100, 9)
    slow, fast = check_alike(events, [10, 400, 3], [900])
    assert fast < 0.15 * slow


def test_a_phase_of_the_scripts_own_around_the_whole_loop() -> None:
    events = [(on_tape.ENTER, 14), *epoch([PLAIN] * 100, 7), (on_tape.EXIT, 0), *epoch([PLAIN] * 50, 7)]
    check_alike(events, [10, 400, 3], [300, 400])


@pytest.mark.parametrize("at_once", [True, False])
def test_more_steps_than_the_recorder_has_room_for_are_put_aside(at_once: bool) -> None:
    whole = read(written(epoch([PLAIN] * 3000, 7), [10, 400, 3]), [20_000], 512, at_once=at_once)
    assert whole.state["recorded"][:2] == (3000, 0)
    assert [step.index for step in unpack(whole.stretches)] == [*range(3000)]


def test_so_many_events_that_the_lock_is_let_go_are_the_same_as_few_at_a_time() -> None:
    events = written(epoch([PLAIN] * 8000, 7), [10, 400, 3])
    assert len(events) > 65_536 * 16
    whole, parts = (read(events, [turn], 512, at_once=True) for turn in (len(events) // 16, 20_000))
    assert whole.state["recorded"][:2] == (8000, 0)
    assert unpack(whole.stretches) == unpack(parts.stretches)


_STEP = st.sampled_from(
    [
        *STEPS.values(),
        [*ZERO, *FORWARD, *BACKWARD, *SKIPPED],
        [*FORWARD, *BACKWARD],  # a micro-batch
        EVALUATE,
        [*PLAIN, *EVALUATE],
        [*PLAIN, *SAVE],
        [*PLAIN, (on_tape.SAMPLES, 9)],
        [*PLAIN, (on_tape.BETWEEN, 0)],
        [*PLAIN, (on_tape.STEP, 4)],
        [*PLAIN, *PLAIN],
        called(on_tape.EVALUATE, on_tape.FORWARD_END, on_tape.EVALUATE_IN_TRAINING_MODE),
        called(on_tape.EVALUATE, on_tape.FORWARD_END, on_tape.EVALUATE_WITH_GRADIENTS),
        [(on_tape.DRAW, 9 << 4 | on_tape.DRAW_WITHOUT_GRADIENTS), (on_tape.DRAWN, 4)],
        [(on_tape.PASS, 0), (on_tape.LEFT, 7 << 4)],
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
    st.tuples(st.integers(0, 500), st.tuples(st.integers(0, on_tape.CODES - 1), st.sampled_from(_ARGUMENTS))),
    max_size=4,
)


@given(
    _EPOCHS,
    _NOISE,
    st.lists(st.integers(0, 10**6), min_size=1, max_size=9),
    st.lists(st.integers(0, 150), max_size=6),
)
@example([([(PLAIN, 12)], 7, False)], [(40, (on_tape.EXIT, 0))], [5], [])
@example([([(PLAIN, 8)], 7, False)], [(13, (on_tape.DRAW, 0)), (70, (on_tape.DRAW, 0))], [1], [])
def test_whatever_is_on_the_tape_the_same_steps_come_of_it(
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
        event = code, argument % PHASE_SLOTS if code == on_tape.ENTER else argument
        events.insert(place % len(events), event)
    check_alike(events, gaps, turns)


def test_phases_sum_after_a_hook_has_failed() -> None:
    """A forward without gradients comes next, which sets aside what has begun: of that, nothing is known."""
    evaluation = [*ZERO, *FORWARD, *BACKWARD, *OPTIMIZER, *EVALUATE]
    events = epoch([[*ZERO, *FORWARD, *BACKWARD, *SCALED], *[evaluation] * 6], 7, ready=True)
    for place in range(len(events)):
        check_alike([*events[:place], (on_tape.ABANDON, 0), *events[place:]], [1], [])


def test_a_phase_that_is_open_in_the_end_has_ended_with_the_newest_event() -> None:
    """A forward that raised, say: the steps around which it is open may have been read all at once."""
    check_alike([(on_tape.FORWARD, 0), *[(on_tape.STEP, 3)] * 3], [0, 5, 5, 5], [])


def test_a_phase_of_the_gaps_own_name_is_part_of_it() -> None:
    """So are the phases of the script's own beyond the sixteenth; here where a draw may have been an edge."""
    draws = [(on_tape.DRAW, 113), (on_tape.DRAWN, 4)] * 3
    check_alike([(on_tape.ENTER, OTHER), *draws, *EVALUATE], [1, 5, 1, 5], [])


def test_times_beyond_what_a_double_holds_are_squared_exactly() -> None:
    check_alike(epoch([PLAIN] * 50, 7), [10**10 + 1, 3 * 10**9 + 7], [200])


@pytest.mark.parametrize(
    "deeds",
    [
        b"",
        b"\0",
        b"\1\0",
        b"\5\1",  # an event that does not end
        b"\2\0\0\0",  # leaves what is not open
        b"\5\1\5\1\0\0",  # two steps
        b"\1\xff\5\1\2\0\0\0",  # no such phase
        b"\6\xff\5\1\2\0\0\0",  # no such phase of collectives
        b"\7\0\5\1\0\0",  # no such deed
        b"\1\0" * (MAX_DEPTH + 2) + b"\0\0",
    ],
)
def test_nonsense_is_refused(deeds: bytes) -> None:
    with pytest.raises(ValueError, match="no cycle"):
        repeat(deeds, 0)


def test_too_deep_a_start_is_refused() -> None:
    assert repeat(b"\5\1\0\0", 0)[0] == 0
    with pytest.raises(ValueError, match="no cycle"):
        repeat(b"\5\1\0\0", MAX_DEPTH + 1)


def repeat(
    deeds: bytes, depth: int
) -> tuple[int, bool, int, bytes, tuple[tuple[int, int, float], ...], bytes]:
    standing = Replay(ReadyTape(b""), 4, Faults()).recorder.stand()  # type: ignore[arg-type]
    standing[2] = depth
    words = array("q", [0])
    phases = bytes(range(PHASE_SLOTS))
    return _cycles.repeat(memoryview(b""), words, words, deeds, standing, phases, OTHER, 0, 0)


def test_a_phase_that_was_not_announced_is_refused() -> None:
    standing = Replay(ReadyTape(b""), 4, Faults()).recorder.stand()  # type: ignore[arg-type]
    words = array("q", [0])
    for deeds, phases in (
        (b"\1\2\5\1\2\0\0\0", bytes([OTHER])),
        (b"\5\1\0\0", b"\2"),
        (b"\5\1\0\0", b"\xff"),
    ):
        with pytest.raises(ValueError, match="no cycle"):
            _cycles.repeat(memoryview(b""), words, words, deeds, standing, phases, OTHER, 0, 0)


def test_steps_say_what_they_were() -> None:
    stretches = read(written(epoch([PLAIN] * 20, 7), [100]), [], 64, at_once=True).stretches
    steps = unpack(stretches)
    assert [step.index for step in steps] == [*range(20)]
    assert [step.samples for step in steps] == [32] * 19 + [7]
    for step in steps:
        assert sum(ns for _, ns in step.phases.values()) == step.duration
    assert max(stretch.count for stretch in stretches) > 10


def test_what_has_begun_waits_for_the_rest_but_not_for_ever() -> None:
    tape = ReadyTape(written([*epoch([PLAIN] * 20, 7)], [100]))
    reader = Replay(tape, 64, Faults())  # type: ignore[arg-type]
    tape.there = 10 * len(PLAIN) + 10 * 2 + 5  # within the eleventh step
    reader.drain(again=True)
    left = len(tape)
    assert 0 < left <= len(PLAIN) + 2
    assert reader.loop.train_steps == 10
    tape.there += 1
    reader.drain(again=True)
    assert len(tape) == left + 1, "there was more of it"
    reader.drain(again=True)
    assert len(tape) == 0, "there was not"
    assert reader.recorder.is_open
    tape.there += 3 * (len(PLAIN) + 2)
    reader.drain(again=True)
    tape.there += 1
    reader.drain()
    assert len(tape) == 0, "who does not come again is told all"
    assert reader.loop.train_steps == 13
