"""When the last gradient of a backward was ready, as the reducers that took part in it say."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from torchperfd.hooks.passes import GradientTimes


class Reducer:
    """As torch's: it notes when each gradient was ready, from the moment on at which it was prepared."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self.times = [0, 0]
        self.prepared_ns = 0
        self.asked = 0

    def compute(self) -> None:
        """Have all gradients ready, after some time that is another each time."""
        self.clock.ns += 1000 + self.asked
        first = self.clock.ns - self.prepared_ns
        self.clock.ns += 500
        self.times = [self.clock.ns - self.prepared_ns, first]

    def get_backward_stats(self) -> list[int]:
        """Return when that was."""
        self.asked += 1
        return self.times


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.ns = 10**9

    def __call__(self) -> int:
        return self.ns


class Backwards:
    """Reducers that are prepared, and backwards that do what they are given."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times = GradientTimes()

    def reducer(self, kind: type[Reducer] = Reducer) -> Reducer:
        """Return a new one."""
        return kind(self.clock)

    def prepare(self, *reducers: Reducer, held_up_ns: int = 0) -> None:
        """Prepare them, each within 100 ns and what holds it up ahead of that."""
        for reducer in reducers:
            began = self.clock.ns
            self.clock.ns += 50 + held_up_ns
            reducer.prepared_ns = self.clock.ns
            self.clock.ns += 50
            self.times.note_prepared(reducer, began)

    def backward(self, act: Callable[[], object] = lambda: None) -> int | None:
        """Go backward; return how long ago the last gradient was ready."""
        pending, began = self.times.take_pending(), self.clock.ns
        act()
        self.clock.ns += 5000
        ready = self.times.last_ready(pending, began)
        return None if ready is None else self.clock.ns - ready


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Backwards:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return Backwards(clock)


def test_last_ready_prepared_reducer_is_its_last_gradient(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    for _ in range(3):
        backwards.prepare(reducer)
        assert backwards.backward(reducer.compute) == 5050  # 50 ns of which it may have been prepared in


def test_last_ready_unprepared_reducer_is_not_asked(backwards: Backwards) -> None:
    """As under no_sync()."""
    reducer = backwards.reducer()
    assert backwards.backward(reducer.compute) is None
    backwards.prepare(reducer)
    assert backwards.backward(reducer.compute) == 5050
    assert backwards.backward(reducer.compute) is None
    assert reducer.asked == 1


def test_last_ready_several_models_each_in_its_own_backward(backwards: Backwards) -> None:
    one, other = backwards.reducer(), backwards.reducer()
    for _ in range(3):
        backwards.prepare(one, other)
        assert backwards.backward() is None
        assert backwards.backward(other.compute) == 5050
        assert backwards.backward(one.compute) == 5050
        assert not backwards.times.take_pending()


def test_last_ready_as_late_as_before_still_counts(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    for first in (1, 2, 3):

        def compute(first: int = first) -> None:
            reducer.times = [10**6, first]

        backwards.prepare(reducer)
        assert backwards.backward(compute) is not None


def test_last_ready_of_two_in_one_backward_is_the_later(backwards: Backwards) -> None:
    one, other = backwards.reducer(), backwards.reducer()

    def compute() -> None:
        one.compute()
        backwards.clock.ns += 20_000
        other.compute()

    backwards.prepare(one, other)
    assert backwards.backward(compute) == 5050


def test_take_pending_leaves_inner_backward_nothing(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    backwards.prepare(reducer)
    inner: list[int | None] = []

    def checkpoint() -> None:
        assert not backwards.times.take_pending()
        inner.append(backwards.backward(reducer.compute))

    assert backwards.backward(checkpoint) == 10_050
    assert inner == [None]


def test_last_ready_after_failed_backward_is_that_of_the_next(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    backwards.prepare(reducer)
    with pytest.raises(ZeroDivisionError):
        backwards.backward(lambda: 1 // 0)
    backwards.prepare(reducer)
    assert backwards.backward(reducer.compute) == 5050


def test_last_ready_reducer_held_up_in_preparation_counts(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    backwards.prepare(reducer, held_up_ns=50_000)
    assert backwards.backward(reducer.compute) == 6500  # clipped to where the backward began


def test_last_ready_before_the_backward_is_none(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    backwards.prepare(reducer)
    reducer.compute()
    backwards.clock.ns += 1000
    assert backwards.backward() is None


def test_last_ready_reducer_without_times_is_none(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    for _ in range(2):
        backwards.prepare(reducer)
        reducer.times = []
        assert backwards.backward() is None
    assert not backwards.times.take_pending()


def test_note_prepared_does_not_keep_reducers_alive(backwards: Backwards) -> None:
    reducer = backwards.reducer()
    gone = weakref.ref(reducer)
    backwards.prepare(reducer)
    gc.disable()
    try:
        del reducer
        assert gone() is None
    finally:
        gc.enable()
    assert backwards.backward() is None


def test_last_ready_many_reducers_forgets_those_that_are_gone(backwards: Backwards) -> None:
    reducers: list[Any] = [backwards.reducer() for _ in range(40)]
    for reducer in reducers:
        backwards.prepare(reducer)
        assert backwards.backward(reducer.compute) == 5050
    backwards.prepare(*reducers)
    assert backwards.backward(reducers[-1].compute) == 5050
    del reducer, reducers[:-1]
    backwards.prepare(reducers[0])
    assert backwards.backward(reducers[0].compute) == 5050
    assert backwards.times.remembered_count == 1
