"""The recorder, on a scripted clock: every nanosecond of a step is somebody's, once."""

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.scripted import WALL_AHEAD, Clock, all_names, unpack

from torchperfd.steps.phase_stack import MAX_DEPTH
from torchperfd.steps.phases import (
    BACKWARD,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    PHASE_SLOTS,
    TRAIN,
    VALIDATE,
    ZERO_GRAD,
)
from torchperfd.steps.recorder import Recorder


def make(capacity: int = 8) -> tuple[Recorder, Clock]:
    clock = Clock()
    recorder = Recorder(clock, capacity=capacity)
    recorder.wall_offset = WALL_AHEAD
    return recorder, clock


def spend(recorder: Recorder, clock: Clock, phase: int, ns: int) -> None:
    recorder.enter(phase)
    clock.advance(ns)
    recorder.exit()


def test_a_phase_directly_inside_itself_is_one_call() -> None:
    recorder, clock = make()
    recorder.enter(OPTIMIZER)
    clock.advance(1)
    recorder.enter(OPTIMIZER)
    clock.advance(10)
    recorder.enter(OPTIMIZER)
    clock.advance(100)
    recorder.exit()
    recorder.exit()
    clock.advance(1000)
    recorder.exit()
    recorder.close(TRAIN, 0)
    (batch,) = recorder.drain()
    assert unpack([batch])[0].phases == {"optimizer": (1, 1111), "other": (1, 0)}
    assert batch.phases[OPTIMIZER].squares == 1111.0**2


def test_squares_are_of_each_call() -> None:
    recorder, clock = make()
    for ns in (3, 4, 5):
        spend(recorder, clock, DATA, ns)
        clock.advance(10)
    recorder.close(TRAIN, 0)
    (batch,) = recorder.drain()
    squares = {slot: columns.squares for slot, columns in batch.phases.items()}
    assert squares == {DATA: 9.0 + 16 + 25, OTHER: 30.0**2}
    assert batch.squares == (12 + 30) ** 2


def test_a_step_starts_where_the_one_before_has_ended() -> None:
    recorder, clock = make()
    recorder.open()
    for number, ns in enumerate((5, 70, 900)):
        clock.advance(ns)
        recorder.close(TRAIN, number)
    steps = unpack(recorder.drain())
    assert [step.duration for step in steps] == [5, 70, 900]
    assert [step.start for step in steps] == [1000, 1005, 1075]
    assert [step.index for step in steps] == [0, 1, 2]


def test_step_starts_are_in_wall_time_as_last_read() -> None:
    clock = Clock(now=50)
    recorder = Recorder(clock, capacity=4)
    recorder.wall_offset = 1_000_000
    recorder.open()
    recorder.close(TRAIN, 0)
    recorder.close(TRAIN, 1)
    recorder.wall_offset = 2_000_000
    recorder.close(TRAIN, 2)
    starts = [start for batch in recorder.drain() for start in batch.start]
    assert starts == [1_000_050, 1_000_050, 2_000_050]


def test_named_gap_counts_from_newest_boundary_until_renamed() -> None:
    recorder, clock = make()
    recorder.open()
    clock.advance(1)
    spend(recorder, clock, FORWARD, 100)
    clock.advance(20)
    recorder.name_gap(LOSS)  # names the 20 that have passed since forward ended, too
    clock.advance(300)
    recorder.enter(BACKWARD)
    recorder.name_gap(OTHER)
    clock.advance(4000)
    recorder.exit()
    clock.advance(50_000)
    recorder.close(TRAIN, 0)
    (batch,) = recorder.drain()
    assert unpack([batch])[0].phases == {
        "forward": (1, 100),
        "loss": (1, 320),
        "backward": (1, 4000),
        "other": (1, 50_001),
    }
    assert batch.phases[LOSS].squares == 320.0**2


def test_a_phase_open_at_an_edge_is_one_call_on_either_side() -> None:
    recorder, clock = make()
    recorder.enter(FORWARD)
    clock.advance(5)
    recorder.enter(DATA)
    clock.advance(30)
    recorder.close(TRAIN, 0)
    clock.advance(700)
    recorder.exit()
    clock.advance(11)
    recorder.exit()
    recorder.close(TRAIN, 1)
    batches = recorder.drain()
    first, second = unpack(batches)
    assert first.phases == {"forward": (1, 5), "data": (1, 30), "other": (1, 0)}
    assert second.phases == {"forward": (1, 11), "data": (1, 700), "other": (1, 0)}
    assert [batch.phases[DATA].squares for batch in batches] == [30.0**2, 700.0**2]


def test_an_abandoned_step_leaves_no_mark_on_the_next() -> None:
    recorder, clock = make()
    recorder.samples = 64
    spend(recorder, clock, DATA, 5)
    recorder.name_gap(LOSS)
    clock.advance(7)
    recorder.enter(FORWARD)
    clock.advance(9)
    recorder.abandon()
    assert not recorder.is_open
    recorder.exit()  # the other half of the forward comes all the same
    clock.advance(1000)
    spend(recorder, clock, BACKWARD, 3)
    recorder.close(TRAIN, 0)
    (step,) = unpack(recorder.drain())
    assert (step.duration, step.samples) == (3, 0)
    assert step.phases == {"backward": (1, 3), "other": (1, 0)}


def test_skipped_time_belongs_to_no_step() -> None:
    recorder, clock = make()
    recorder.open()
    recorder.close(TRAIN, 0)
    clock.advance(5_000_000)  # a profiler starts
    recorder.skip(clock())
    clock.advance(8)
    recorder.close(TRAIN, 1)
    assert [step.duration for step in unpack(recorder.drain())] == [0, 8]


def test_inside_knows_every_level() -> None:
    recorder, _ = make()
    recorder.enter(OPTIMIZER)
    recorder.enter(FORWARD)
    assert recorder.inside(OPTIMIZER)
    assert recorder.inside(FORWARD)
    assert not recorder.inside(BACKWARD)
    recorder.exit()
    assert not recorder.inside(FORWARD)
    assert not recorder.inside(OTHER)  # the gap is no phase that one is inside of


def test_step_batch_holds_consecutive_steps_of_one_kind() -> None:
    """A batch holds steps of one kind that follow one another; the first step is a batch of its own."""
    recorder, clock = make(capacity=16)
    recorder.open()
    kinds = [(TRAIN, 0), (TRAIN, 1), (TRAIN, 2), (VALIDATE, 0), (VALIDATE, 1), (TRAIN, 3), (TRAIN, 5)]
    for number, (kind, index) in enumerate(kinds):
        recorder.samples = number
        clock.advance(10**number)
        recorder.close(kind, index)
    batches = recorder.drain()
    assert [(each.kind[0], each.index[0], each.count) for each in batches] == [
        *((TRAIN, 0, 1), (TRAIN, 1, 2), (VALIDATE, 0, 2), (TRAIN, 3, 1), (TRAIN, 5, 1))
    ]
    assert [(each.total_ns, each.total_samples, each.squares) for each in batches] == [
        *((1, 0, 1.0), (110, 3, 10.0**2 + 10.0**4), (11_000, 7, 10.0**6 + 10.0**8)),
        *((10**5, 5, 10.0**10), (10**6, 6, 10.0**12)),
    ]
    assert all(each.phases[OTHER].total_ns == each.total_ns for each in batches)
    assert all(each.phases[OTHER].total_calls == each.count for each in batches)


@given(
    before=st.lists(st.tuples(st.sampled_from([DATA, FORWARD, BACKWARD]), st.integers(0, 99)), max_size=4),
    after=st.lists(st.tuples(st.sampled_from([DATA, FORWARD, ZERO_GRAD]), st.integers(0, 99)), max_size=4),
    around=st.booleans(),
    pause=st.booleans(),
)
def test_held_steps_and_the_rest_are_together_complete(
    before: list[tuple[int, int]], after: list[tuple[int, int]], around: bool, pause: bool
) -> None:
    """One step or two, and whether or not something that belongs to no step lies in between."""

    def play(outcome: str) -> list[Any]:
        recorder, clock = make()
        recorder.open()
        clock.advance(3)
        if around:
            recorder.enter(PHASE_SLOTS - 1)
        for phase, ns in before:
            spend(recorder, clock, phase, ns)
            clock.advance(1)
        recorder.samples += 4
        if outcome != "uninterrupted":
            recorder.hold()
        if pause:
            recorder.abandon()
            clock.advance(10**9)
            recorder.open()
        for phase, ns in after:
            spend(recorder, clock, phase, ns)
            clock.advance(1)
        recorder.samples += 5
        if outcome == "one":
            recorder.rejoin()
        elif outcome == "two":
            recorder.release(TRAIN, 0)
        elif outcome == "the second":
            recorder.discard()
        clock.advance(2)
        recorder.unwind()
        recorder.close(TRAIN, 1)
        assert recorder.recorded == (2 if outcome == "two" else 1)
        return unpack(recorder.drain(), all_names())

    for steps in map(play, ("one", "two", "the second")):
        for step in steps:
            assert sum(ns for _, ns in step.phases.values()) == step.duration < 10**9
    first, second = play("two")
    (one,) = play("one")
    assert play("the second") == [second]
    assert (first.samples, second.samples, one.samples) == (4, 5, 9)
    assert first.duration + second.duration == one.duration
    assert first.start == 1000
    if not pause:
        assert second.start == first.start + first.duration
        assert play("uninterrupted") == [one]


def test_held_step_with_the_ring_full_is_dropped() -> None:
    recorder, clock = make(capacity=1)
    for _ in range(2):
        spend(recorder, clock, FORWARD, 5)
        recorder.hold()
        spend(recorder, clock, BACKWARD, 7)
        recorder.release(TRAIN, 0)
        recorder.close(TRAIN, 1)
        assert (recorder.recorded, recorder.dropped) == (2, 1)
        (step,) = unpack(recorder.drain())
        assert step.phases == {"forward": (1, 5), "other": (1, 0)}
        recorder.recorded = recorder.dropped = 0
        recorder.abandon()


def test_memory_is_fixed_whatever_is_recorded() -> None:
    recorder, clock = make(capacity=16)

    def memory() -> set[tuple[int, int, int]]:
        """Return every list that the recorder and its ring hold: where, how long and how large."""
        lists: list[list[Any]] = []
        for owner in (recorder, recorder.ring):
            found = [each for each in gc.get_referents(owner) if type(each) is list and each]
            lists += [*found, *(inner for each in found for inner in each if type(inner) is list)]
        return {(id(block), len(block), sys.getsizeof(block)) for block in lists}

    recorder.drain()
    before = memory()
    assert len(before) >= 16
    for number in range(200):
        for depth in range(MAX_DEPTH + 10):
            recorder.enter(depth % PHASE_SLOTS)
            clock.advance(1 << 20)
        recorder.unwind()
        recorder.close(TRAIN, number)
        if number % 50 == 0:
            recorder.drain()
    assert recorder.dropped > 0
    recorder.drain()
    assert memory() == before


# Against a model that knows nothing of accumulators: it labels each stretch between two boundaries.


@dataclass
class Model:
    """What any sequence of calls must come to."""

    capacity: int
    spans: list[int] = field(default_factory=list)
    is_open: bool = False
    gap: int = OTHER
    start: int = 0
    boundary: int = 0
    ns: Counter[int] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    waiting: list[dict[str, Any]] = field(default_factory=list)
    recorded: int = 0
    dropped: int = 0

    def open(self, now: int) -> None:
        if not self.is_open:
            self.is_open, self.gap, self.start, self.boundary = True, OTHER, now, now

    def _label(self, now: int) -> None:
        """The stretch since the last boundary was whatever is innermost, as far as we follow."""
        labels = [self.gap, *self.spans[:MAX_DEPTH]]
        self.ns[labels[-1]] += now - self.boundary
        self.boundary = now

    def enter(self, phase: int, now: int) -> None:
        self.open(now)
        if len(self.spans) < MAX_DEPTH:
            self._label(now)
        self.spans.append(phase)

    def push(self, phase: int, now: int) -> None:
        if self.is_open:
            self.enter(phase, now)
        else:
            self.spans.append(phase)

    def exit(self, now: int) -> None:
        if not self.spans:
            return
        if self.is_open and len(self.spans) <= MAX_DEPTH:
            self._label(now)
            self.calls[self.spans[-1]] += [self.gap, *self.spans][-2] != self.spans[-1]
        self.spans.pop()

    def name_gap(self, phase: int) -> None:
        if self.is_open:
            self.calls[self.gap] += 1
            self.gap = phase

    def close(self, kind: int, index: int, now: int, *, at_last: bool = False) -> None:
        if at_last:
            now = self.boundary
        self._label(now)
        labels = [self.gap, *self.spans[:MAX_DEPTH]]
        for outer, inner in pairwise(labels):
            self.calls[inner] += outer != inner
        self.calls[self.gap] += 1
        self.calls[OTHER] = 1
        self.recorded += 1
        if len(self.waiting) == self.capacity:
            self.dropped += 1
        else:
            self.waiting.append(
                {
                    "kind": kind,
                    "index": index,
                    "duration": now - self.start,
                    "samples": self.samples,
                    "ns": [self.ns[slot] for slot in range(PHASE_SLOTS)],
                    "calls": [self.calls[slot] for slot in range(PHASE_SLOTS)],
                }
            )
        self._forget()
        self.is_open, self.gap, self.start = not at_last, OTHER, now

    def abandon(self) -> None:
        self._forget()
        if {DATA, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD} & set(self.spans[:MAX_DEPTH]):
            self.spans.clear()
        self.is_open = False

    def _forget(self) -> None:
        self.ns.clear()
        self.calls.clear()
        self.samples = 0


_PHASES = st.sampled_from([DATA, FORWARD, LOSS, OPTIMIZER, OTHER, PHASE_SLOTS - 1])
_CALLS = st.one_of(
    st.tuples(st.just("enter"), _PHASES),
    st.tuples(st.just("push"), _PHASES),
    st.tuples(st.just("enter many"), st.integers(1, 40)),
    st.tuples(st.just("exit"), st.none()),
    st.tuples(st.just("exit"), st.none()),
    st.tuples(st.just("exit many"), st.integers(1, 40)),
    st.tuples(st.just("close"), st.sampled_from([TRAIN, VALIDATE])),
    st.tuples(st.just("close at last"), st.sampled_from([TRAIN, VALIDATE])),
    st.tuples(st.just("name_gap"), _PHASES),
    st.tuples(st.sampled_from(["open", "unwind", "abandon", "drain"]), st.none()),
    st.tuples(st.just("samples"), st.integers(0, 1000)),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 10**7), _CALLS), max_size=60), st.integers(1, 4))
def test_any_sequence_of_calls_comes_to_what_the_model_says(
    script: list[tuple[int, tuple[str, Any]]], capacity: int
) -> None:
    recorder, clock = make(capacity)
    model = Model(capacity)
    index = 0
    for ns, (call, value) in [*script, (1, ("unwind", None)), (1, ("drain", None))]:
        clock.advance(ns)
        now = clock.now
        if call == "enter":
            recorder.enter(value)
            model.enter(value, now)
        elif call == "push":
            recorder.push(value)
            model.push(value, now)
        elif call == "enter many":
            for number in range(value):
                recorder.enter(number % 3)
                model.enter(number % 3, now)
        elif call == "exit":
            recorder.exit()
            model.exit(now)
        elif call == "exit many":
            for _ in range(value):
                recorder.exit()
                model.exit(now)
        elif call == "close" and recorder.is_open:
            recorder.close(value, index)
            model.close(value, index, now)
            index += 1
        elif call == "close at last" and recorder.is_open:
            # As the loop does it: after unwinding, since no step stays open.
            recorder.unwind()
            while model.spans:
                model.exit(now)
            clock.advance(ns)
            recorder.close(value, index, at_last=True)
            model.close(value, index, clock.now, at_last=True)
            index += 1
        elif call == "name_gap":
            recorder.name_gap(value)
            model.name_gap(value)
        elif call == "open":
            recorder.open()
            model.open(now)
        elif call == "unwind":
            recorder.unwind()
            while model.spans:
                model.exit(now)
        elif call == "abandon":
            recorder.abandon()
            model.abandon()
        elif call == "samples":
            recorder.samples += value
            model.samples += value
        elif call == "drain":
            check_drain(recorder, model)
        assert recorder.depth == len(model.spans)
        assert recorder.is_open == model.is_open
    assert (recorder.recorded, recorder.dropped) == (model.recorded, model.dropped)


def check_drain(recorder: Recorder, model: Model) -> None:
    expected, model.waiting = model.waiting, []
    for batch in recorder.drain():
        least, most = dict.fromkeys(batch.phases, 0.0), dict.fromkeys(batch.phases, 0.0)
        for number in range(batch.count):
            step = expected.pop(0)
            assert (batch.kind[number], batch.index[number]) == (step["kind"], step["index"])
            assert batch.duration[number] == step["duration"] == sum(step["ns"])
            assert batch.samples[number] == step["samples"]
            for slot in range(PHASE_SLOTS):
                ns, calls = step["ns"][slot], step["calls"][slot]
                if slot not in batch.phases:
                    assert ns == calls == 0
                    continue
                columns = batch.phases[slot]
                assert (columns.ns[number], columns.calls[number]) == (ns, calls)
                assert ns >= 0
                most[slot] += float(ns) ** 2
                least[slot] += float(ns) ** 2 / calls if calls else 0.0
        # The sum of squares is between that of equal calls and that of one call doing it all.
        for slot, columns in batch.phases.items():
            assert 0.999999 * least[slot] <= columns.squares <= 1.000001 * most[slot]
            assert (columns.total_ns, columns.total_calls) == (sum(columns.ns), sum(columns.calls))
    assert expected == []
