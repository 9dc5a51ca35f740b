"""Stacks at random moments: each of one moment, also in code that holds the interpreter."""

import gc
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest

from torchperfd.hooks.thread_frames import MAX_WAIT_S, Stack, stacks_at_random, stacks_now
from torchperfd.hooks.worker_stacks import stack_lines


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    """An interval that is lost if it is rounded, and that later tests do not have."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0049)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_stacks_come_after_a_wait_with_a_short_interval(interval: float) -> None:
    seen: list[tuple[float, float]] = []
    for _ in range(20):
        stacks = stacks_at_random(lambda seconds: seen.append((seconds, sys.getswitchinterval())))
        assert stacks[threading.get_ident()]
        assert sys.getswitchinterval() == interval
    assert all(0 <= seconds <= MAX_WAIT_S and short < 1e-4 for seconds, short in seen)
    assert len({seconds for seconds, _ in seen}) > 1


def test_stacks_leave_an_interval_that_the_script_sets() -> None:
    stacks_at_random(lambda _: sys.setswitchinterval(0.02))
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_stacks_after_a_failed_wait_restore_the_interval(interval: float) -> None:
    def fail(_: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        stacks_at_random(fail)
    assert sys.getswitchinterval() == interval


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_forked_in_the_wait_has_the_interval(interval: float) -> None:
    codes: list[int] = []

    def fork(_: float) -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == interval else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    stacks_at_random(fork)
    assert codes == [0]
    assert sys.getswitchinterval() == interval


def parse(text: str) -> None:
    json.loads(text)


def give_way() -> None:
    os.stat("/")  # releases the interpreter


def text_of(seconds: float) -> str:
    """Return JSON whose parsing takes about so long, and holds the interpreter meanwhile."""
    numbers = [0.5] * 1000
    text, taken = json.dumps(numbers), []
    for _ in range(10):
        began = time.perf_counter()
        json.loads(text)
        taken.append(time.perf_counter() - began)
    return json.dumps(numbers * max(1, int(seconds / min(taken))))


@pytest.mark.parametrize("seconds", [0.002, 0.02])
def test_stacks_show_c_code_that_holds_the_interpreter(seconds: float) -> None:
    """Without a short interval nine in ten of the samples are in the call that releases the interpreter."""
    text, stop = text_of(seconds), threading.Event()

    def train() -> None:
        while not stop.is_set():
            parse(text)
            give_way()

    thread = threading.Thread(target=train)
    thread.start()
    seen: Counter[str] = Counter()
    try:
        for _ in range(40):
            lines = stack_lines(stacks_at_random()[thread.ident or 0])
            functions = [line.function for line in lines]
            seen.update(name for name in ("parse", "give_way") if name in functions)
    finally:
        stop.set()
        thread.join()
    assert seen["parse"] > 2 * seen["give_way"], seen


def descend(frames: int) -> None:
    """Give way below so many frames: the reader passes them before it comes to the caller."""
    if frames:
        descend(frames - 1)
    else:
        give_way()


def first() -> None:
    descend(90)


def second() -> None:
    descend(90)


def test_stack_is_of_one_moment_though_its_thread_goes_on() -> None:
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            first()
            second()

    lines = {name: train.__code__.co_firstlineno + line for line, name in enumerate(("first", "second"), 2)}
    thread = threading.Thread(target=train)
    thread.start()
    sys.setswitchinterval(1e-6)
    seen: Counter[str] = Counter()
    try:
        while min(seen[name] for name in lines) < 500:
            stack = stack_lines(stacks_now()[thread.ident or 0])
            called = [line.function for line in stack if line.function in lines]
            [outer] = [line for line in stack if line.function == "train"]
            assert not called or outer.line == lines[called[0]]
            seen.update(called)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("read", [stacks_now, stacks_at_random])
def test_stacks_keep_no_object_alive(read: Callable[[], Mapping[int, Stack]]) -> None:
    class Batch:
        pass

    def draw() -> "weakref.ref[Batch]":
        batch = Batch()
        assert stack_lines(read()[threading.get_ident()])
        return weakref.ref(batch)

    gc.disable()
    try:
        assert draw()() is None
    finally:
        gc.enable()
