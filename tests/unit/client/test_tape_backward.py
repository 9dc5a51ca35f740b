"""A backward and the reducers that wait at its end, in C and in Python."""

import ctypes
import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.test_tape import both, native, written

from torchperfd.tape import portable

BEGIN, END, REDUCTION = 1, 2, 3


class Reducer:
    """As torch's: it notes when each gradient was ready, from the moment on at which it was prepared."""

    def __init__(self) -> None:
        self._prepared = 0
        self._times = [0, 0]
        self.asked = 0

    def prepare_for_backward(self, outputs: object) -> object:
        """Begin to count."""
        self._prepared = time.perf_counter_ns()
        return outputs

    def compute(self) -> None:
        """Have all gradients ready, after some time."""
        time.sleep(1e-4)
        first = time.perf_counter_ns() - self._prepared
        self._times = [time.perf_counter_ns() - self._prepared + 1, first]

    def get_backward_stats(self) -> list[int]:
        """Return when that was."""
        self.asked += 1
        return self._times


class Scene:
    """A tape, a backward on it that does as it is told, and reducers that are prepared for it."""

    def __init__(self, kind: Any) -> None:
        self.tape = kind.Tape(256, 29)
        self.timed = kind.Backward(self.tape, lambda act: act(), BEGIN, END, REDUCTION)
        self.otherwise: list[Any] = []
        self._told = kind.Prepare(self.timed, Reducer.prepare_for_backward, self.otherwise.append)

    def prepare(self, *reducers: Reducer) -> None:
        """Prepare them, as their method does once it is replaced."""
        for reducer in reducers:
            assert self._told.__get__(reducer)("outputs") == "outputs"

    def backward(self, act: Callable[[], object] = lambda: None) -> list[int]:
        """Go backward; return the codes of what was written."""
        self.timed(act)
        return [code for code, _ in written(self.tape)]


@both
def test_it_is_told_how_long_ago_the_last_gradient_was_ready(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    for _ in range(3):
        scene.prepare(reducer)
        ready = 0

        def wait() -> None:
            nonlocal ready
            reducer.compute()
            ready = time.perf_counter_ns()
            time.sleep(0.002)

        scene.timed(wait)
        (begin, _), (reduction, ago), (end, _) = written(scene.tape)
        assert (begin, reduction, end) == (BEGIN, REDUCTION, END)
        assert 2_000_000 <= ago <= time.perf_counter_ns() - ready + 1_000_000


@both
def test_nothing_is_asked_of_who_is_not_prepared(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    assert scene.backward(reducer.compute) == [BEGIN, END]
    scene.prepare(reducer)
    assert scene.backward(reducer.compute) == [BEGIN, REDUCTION, END]
    assert scene.backward(reducer.compute) == [BEGIN, END]  # as under no_sync()
    assert reducer.asked == 1


@both
def test_of_several_models_each_waits_in_its_own_backward(kind: Any) -> None:
    scene, one, other = Scene(kind), Reducer(), Reducer()
    for _ in range(3):
        scene.prepare(one, other)
        assert scene.backward() == [BEGIN, END]
        assert scene.backward(other.compute) == [BEGIN, REDUCTION, END]
        assert scene.backward(one.compute) == [BEGIN, REDUCTION, END]


@both
def test_the_last_gradient_may_be_as_late_as_before(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    for first in (1, 2, 3):

        def compute(first: int = first) -> None:
            reducer._times = [10**9, first]

        scene.prepare(reducer)
        assert scene.backward(compute) == [BEGIN, REDUCTION, END]


@both
def test_of_several_in_one_backward_the_last_counts(kind: Any) -> None:
    scene, one, other = Scene(kind), Reducer(), Reducer()
    scene.prepare(one, other)

    def both_compute() -> None:
        one.compute()
        time.sleep(0.02)
        other.compute()

    scene.timed(both_compute)
    (_, _), (code, ago), (_, _) = written(scene.tape)
    assert code == REDUCTION
    assert ago < 15_000_000


@both
def test_a_backward_within_the_backward_leaves_it_to_the_outer(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    scene.prepare(reducer)
    assert scene.backward(lambda: scene.timed(reducer.compute)) == [BEGIN, BEGIN, END, REDUCTION, END]


@both
def test_a_backward_that_fails_has_an_end_and_no_reduction(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    scene.prepare(reducer)

    def fail() -> None:
        reducer.compute()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scene.timed(fail)
    assert [code for code, _ in written(scene.tape)] == [BEGIN, END]
    scene.prepare(reducer)
    assert scene.backward(reducer.compute) == [BEGIN, REDUCTION, END]


@both
def test_a_reducer_that_is_held_up_while_it_is_prepared_has_its_wait(kind: Any) -> None:
    class HeldUp(Reducer):
        def prepare_for_backward(self, outputs: object) -> object:
            time.sleep(0.005)
            return super().prepare_for_backward(outputs)

    scene, reducer = Scene(kind), HeldUp()
    told = kind.Prepare(scene.timed, HeldUp.prepare_for_backward, scene.otherwise.append)
    told.__get__(reducer)("outputs")
    began = time.perf_counter_ns()
    scene.timed(reducer.compute)
    (_, _), (code, ago), (_, _) = written(scene.tape)
    assert code == REDUCTION
    assert ago <= time.perf_counter_ns() - began


@both
def test_what_was_ready_before_the_backward_is_not_of_it(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    scene.prepare(reducer)
    reducer.compute()
    time.sleep(0.001)
    assert scene.backward() == [BEGIN, END]


@both
def test_nothing_is_written_of_other_threads_or_what_is_muted(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    scene.tape.muted = 1 << BEGIN
    scene.prepare(reducer)
    assert scene.backward(reducer.compute) == []
    scene.tape.muted = 0
    assert scene.backward(reducer.compute) == [BEGIN, END]
    me, scene.tape.thread = scene.tape.thread, 0
    scene.prepare(reducer)
    assert scene.backward(reducer.compute) == []
    scene.tape.thread = me
    assert reducer.asked == 0


@both
def test_where_events_have_tickets_others_tell_the_moment(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    scene.tape.ticket = lambda: 5
    scene.prepare(reducer)
    scene.timed(reducer.compute)
    assert scene.otherwise == [reducer]
    assert [code for code, _ in written(scene.tape) if code != 29] == [BEGIN, END]


@both
@pytest.mark.parametrize("answer", ["no list", [], ["text"], None])
def test_a_reducer_that_says_something_else_is_left_alone(kind: Any, answer: object) -> None:
    class Odd(Reducer):
        def get_backward_stats(self) -> Any:
            if answer is None:
                raise RuntimeError
            return answer

    scene, odd = Scene(kind), Odd()
    for _ in range(2):
        scene.prepare(odd)
        assert scene.backward() == [BEGIN, END]


@both
def test_each_reducer_is_asked_as_its_class_has_it_by_now(kind: Any) -> None:
    class Silent(Reducer):
        def get_backward_stats(self) -> list[int]:
            self.asked += 1
            return []

    scene, plain, silent = Scene(kind), Reducer(), Silent()
    scene.prepare(plain, silent)
    scene.timed(plain.compute)
    assert [code for code, _ in written(scene.tape)] == [BEGIN, REDUCTION, END]
    assert (plain.asked, silent.asked) == (1, 1)
    Silent.get_backward_stats = Reducer.get_backward_stats  # type: ignore[method-assign]
    scene.prepare(silent)
    assert scene.backward(silent.compute) == [BEGIN, REDUCTION, END]
    del Silent.get_backward_stats
    scene.prepare(silent)
    assert scene.backward(silent.compute) == [BEGIN, REDUCTION, END]
    assert (plain.asked, silent.asked) == (1, 3)


@both
def test_reducers_are_not_kept_alive(kind: Any) -> None:
    scene, reducer = Scene(kind), Reducer()
    gone = weakref.ref(reducer)
    scene.prepare(reducer)
    gc.disable()
    try:
        del reducer
        assert gone() is None
    finally:
        gc.enable()
    assert scene.backward() == [BEGIN, END]


@both
def test_many_reducers_come_and_go(kind: Any) -> None:
    scene = Scene(kind)
    reducers = [Reducer() for _ in range(40)]
    for reducer in reducers:
        scene.prepare(reducer)
        assert scene.backward(reducer.compute) == [BEGIN, REDUCTION, END]
    scene.prepare(*reducers)
    assert scene.backward(reducers[-1].compute) == [BEGIN, REDUCTION, END]


class Vector(ctypes.Structure):
    """As the C++ library has it."""

    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p)]

    def __init__(self, numbers: Any) -> None:
        self.show(numbers, len(numbers))

    def show(self, numbers: Any, count: int) -> None:
        """Have so many of these numbers in it."""
        self.numbers = numbers
        self.begin = ctypes.addressof(numbers)
        self.end = self.begin + 8 * count


class Open(Reducer):
    """A reducer that has its stats in memory in which they can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = Vector((ctypes.c_int64 * 2)())
        self.said: list[int] | None = None

    def compute(self) -> None:
        """Have them in memory."""
        super().compute()
        self.vector.numbers[:] = self._times

    def get_backward_stats(self) -> list[int]:
        """Return them, unless something else is to be said."""
        self.asked += 1
        return self.said or list(self.vector.numbers)


class Finder:
    """Tells where a reducer has them, and notes who is looked for."""

    def __init__(self, scene: Scene, found: Callable[[Any], object]) -> None:
        self.looked_for: list[Any] = []
        self._found = found
        scene.timed.find_stats = self

    def __call__(self, reducer: Any) -> object:
        self.looked_for.append(reducer)
        return self._found(reducer)


compiled = pytest.mark.skipif(native is None, reason="only C reads where torch has written")


def backwards(scene: Scene, reducer: Reducer, count: int) -> None:
    """Go backward so often, each time with a reduction."""
    for _ in range(count):
        scene.prepare(reducer)
        assert scene.backward(reducer.compute) == [BEGIN, REDUCTION, END]


@compiled
def test_once_it_was_the_same_three_times_it_is_read_where_it_is() -> None:
    scene, reducer = Scene(native), Open()
    finder = Finder(scene, lambda reducer: ctypes.addressof(reducer.vector))
    scene.prepare(reducer)
    assert scene.backward() == [BEGIN, END]  # there was no gradient yet, and nothing to compare with
    assert finder.looked_for == []
    backwards(scene, reducer, 1)
    assert finder.looked_for == [reducer]
    backwards(scene, reducer, 3)
    asked = reducer.asked
    backwards(scene, reducer, 1023)
    assert reducer.asked == asked
    backwards(scene, reducer, 1)
    assert reducer.asked == asked + 1  # now and then it is compared again
    assert finder.looked_for == [reducer]


@compiled
def test_what_is_read_says_when_the_last_gradient_was_ready() -> None:
    scene, reducer = Scene(native), Open()
    Finder(scene, lambda reducer: ctypes.addressof(reducer.vector))
    backwards(scene, reducer, 4)
    asked, ready = reducer.asked, 0

    def wait() -> None:
        nonlocal ready
        reducer.compute()
        ready = time.perf_counter_ns()
        time.sleep(0.002)

    scene.prepare(reducer)
    scene.timed(wait)
    _, (reduction, ago), _ = written(scene.tape)
    assert reduction == REDUCTION
    assert 2_000_000 <= ago <= time.perf_counter_ns() - ready + 1_000_000
    assert reducer.asked == asked


@compiled
@pytest.mark.parametrize("answer", ["another", None, "text", 0, 1 << 70, ZeroDivisionError])
def test_a_reducer_that_is_not_found_is_asked(answer: Any) -> None:
    scene, reducer = Scene(native), Open()
    other = Vector((ctypes.c_int64 * 2)(7, 8))

    def find(_: Any) -> object:
        if answer is ZeroDivisionError:
            raise answer
        return ctypes.addressof(other) if answer == "another" else answer

    finder = Finder(scene, find)
    backwards(scene, reducer, 20)
    assert reducer.asked == 20
    assert finder.looked_for == [reducer]


@compiled
def test_what_was_found_is_given_up_once_it_is_no_longer_the_same() -> None:
    scene, reducer = Scene(native), Open()
    Finder(scene, lambda reducer: ctypes.addressof(reducer.vector))
    backwards(scene, reducer, 4)
    reducer.said = [10**10, 5]  # after the backward began, however long this process is held up before
    backwards(scene, reducer, 1024)
    asked = reducer.asked
    reducer.said = None
    backwards(scene, reducer, 10)
    assert reducer.asked == asked + 10


@compiled
def test_what_has_another_length_by_now_is_not_read() -> None:
    scene, reducer = Scene(native), Open()
    Finder(scene, lambda reducer: ctypes.addressof(reducer.vector))
    backwards(scene, reducer, 4)
    asked = reducer.asked
    reducer.vector.show(reducer.vector.numbers, 1)
    backwards(scene, reducer, 10)
    assert reducer.asked == asked + 10


@compiled
def test_each_of_several_reducers_is_read_where_it_is() -> None:
    scene, reducers = Scene(native), [Open() for _ in range(3)]
    finder = Finder(scene, lambda reducer: ctypes.addressof(reducer.vector))
    for _ in range(4):
        for reducer in reducers:
            backwards(scene, reducer, 1)
    asked = [reducer.asked for reducer in reducers]
    for _ in range(5):
        scene.prepare(*reducers)
        for reducer in reducers:
            assert scene.backward(reducer.compute) == [BEGIN, REDUCTION, END]
    assert [reducer.asked for reducer in reducers] == asked
    assert finder.looked_for == reducers


@compiled
def test_what_a_signal_handler_raises_while_it_is_looked_for_is_the_programs() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    scene, reducer = Scene(native), Open()
    Finder(scene, interrupt)
    scene.prepare(reducer)
    with pytest.raises(KeyboardInterrupt):
        scene.timed(reducer.compute)
    assert [code for code, _ in written(scene.tape)] == [BEGIN, END]
    backwards(scene, reducer, 5)


@compiled
def test_a_reducer_that_has_been_replaced_meanwhile_is_not_taken_for_the_other() -> None:
    scene, reducer = Scene(native), Open()
    others = [Open() for _ in range(16)]

    def find(found: Any) -> object:
        if found is reducer:  # a signal handler trains, too
            for other in others:
                scene.prepare(other)
        return ctypes.addressof(found.vector)

    Finder(scene, find)
    scene.prepare(reducer)
    scene.timed(reducer.compute)
    written(scene.tape)
    for _ in range(5):
        for other in others:
            backwards(scene, other, 1)
    asked = [other.asked for other in others]
    for other in others:
        backwards(scene, other, 5)
    assert [other.asked for other in others] == asked


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["prepare", "backward", "nothing"]), st.integers(0, 3)), max_size=40
)


@pytest.mark.skipif(native is None, reason="there is no compiled tape to compare with")
@settings(max_examples=100)
@given(ACTIONS)
def test_both_halves_say_the_same(actions: list[tuple[str, int]]) -> None:
    told = []
    for kind in (native, portable):
        scene, reducers = Scene(kind), [Reducer() for _ in range(4)]
        codes = []
        for name, number in actions:
            if name == "prepare":
                scene.prepare(reducers[number])
            else:
                codes.append(scene.backward(reducers[number].compute if name == "backward" else lambda: None))
        told.append(codes)
    assert told[0] == told[1]


@pytest.mark.skipif(native is None, reason="only C can lose count of references")
def test_the_compiled_half_loses_no_reference() -> None:
    scene, reducer = Scene(native), Reducer()
    result = object()

    def go() -> None:
        scene.prepare(reducer)
        scene.timed(reducer.compute)
        written(scene.tape)

    go()
    counts = [sys.getrefcount(each) for each in (reducer, scene.tape, scene.timed, result)]
    for _ in range(50):
        go()
    assert [sys.getrefcount(each) for each in (reducer, scene.tape, scene.timed, result)] == counts
