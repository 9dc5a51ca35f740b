"""When the last gradient of a backward was ready, as the reducers that took part in it say."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from torchperfd.hooks.gradient_times import GradientTimes


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


class Scene:
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
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return Scene(clock)


def test_last_ready_prepared_reducer_is_its_last_gradient(scene: Scene) -> None:
    reducer = scene.reducer()
    for _ in range(3):
        scene.prepare(reducer)
        assert scene.backward(reducer.compute) == 5050  # 50 ns of which it may have been prepared in


def test_last_ready_unprepared_reducer_is_not_asked(scene: Scene) -> None:
    """As under no_sync()."""
    reducer = scene.reducer()
    assert scene.backward(reducer.compute) is None
    scene.prepare(reducer)
    assert scene.backward(reducer.compute) == 5050
    assert scene.backward(reducer.compute) is None
    assert reducer.asked == 1


def test_last_ready_several_models_each_in_its_own_backward(scene: Scene) -> None:
    one, other = scene.reducer(), scene.reducer()
    for _ in range(3):
        scene.prepare(one, other)
        assert scene.backward() is None
        assert scene.backward(other.compute) == 5050
        assert scene.backward(one.compute) == 5050
        assert not scene.times.are_expected


def test_last_ready_as_late_as_before_still_counts(scene: Scene) -> None:
    reducer = scene.reducer()
    for first in (1, 2, 3):

        def compute(first: int = first) -> None:
            reducer.times = [10**6, first]

        scene.prepare(reducer)
        assert scene.backward(compute) is not None


def test_last_ready_of_two_in_one_backward_is_the_later(scene: Scene) -> None:
    one, other = scene.reducer(), scene.reducer()

    def compute() -> None:
        one.compute()
        scene.clock.ns += 20_000
        other.compute()

    scene.prepare(one, other)
    assert scene.backward(compute) == 5050


def test_take_pending_leaves_inner_backward_nothing(scene: Scene) -> None:
    reducer = scene.reducer()
    scene.prepare(reducer)
    inner: list[int | None] = []

    def checkpoint() -> None:
        assert not scene.times.are_expected
        inner.append(scene.backward(reducer.compute))

    assert scene.backward(checkpoint) == 10_050
    assert inner == [None]


def test_last_ready_after_failed_backward_is_that_of_the_next(scene: Scene) -> None:
    reducer = scene.reducer()
    scene.prepare(reducer)
    with pytest.raises(ZeroDivisionError):
        scene.backward(lambda: 1 // 0)
    scene.prepare(reducer)
    assert scene.backward(reducer.compute) == 5050


def test_last_ready_reducer_held_up_in_preparation_counts(scene: Scene) -> None:
    reducer = scene.reducer()
    scene.prepare(reducer, held_up_ns=50_000)
    assert scene.backward(reducer.compute) == 6500  # clipped to where the backward began


def test_last_ready_before_the_backward_is_none(scene: Scene) -> None:
    reducer = scene.reducer()
    scene.prepare(reducer)
    reducer.compute()
    scene.clock.ns += 1000
    assert scene.backward() is None


def test_last_ready_reducer_without_times_is_none(scene: Scene) -> None:
    reducer = scene.reducer()
    for _ in range(2):
        scene.prepare(reducer)
        reducer.times = []
        assert scene.backward() is None
    assert not scene.times.are_expected


def test_note_prepared_does_not_keep_reducers_alive(scene: Scene) -> None:
    reducer = scene.reducer()
    gone = weakref.ref(reducer)
    scene.prepare(reducer)
    gc.disable()
    try:
        del reducer
        assert gone() is None
    finally:
        gc.enable()
    assert scene.backward() is None


def test_last_ready_many_reducers_forgets_those_that_are_gone(scene: Scene) -> None:
    reducers: list[Any] = [scene.reducer() for _ in range(40)]
    for reducer in reducers:
        scene.prepare(reducer)
        assert scene.backward(reducer.compute) == 5050
    scene.prepare(*reducers)
    assert scene.backward(reducers[-1].compute) == 5050
    del reducer, reducers[:-1]
    scene.prepare(reducers[0])
    assert scene.backward(reducers[0].compute) == 5050
    assert len(scene.times._newest) == 1
