"""The ring buffer and its hooks: equal events from C and Python; no error of ours reaches the script."""

import copy
import functools
import inspect
import pickle
import sys
import threading
from typing import Any

import pytest
from tests.unit.client.event_halves import Written, both, codes_in, native, written

from torchperfd.events import NATIVE


@pytest.mark.needs("gcc")
def test_ring_buffer_with_a_compiler_present_is_native() -> None:
    assert NATIVE


@both
def test_what_is_marked_is_read_once_and_in_order(kind: Any) -> None:
    buffer = kind.EventBuffer(16)
    assert buffer.mark(3, 42)
    assert buffer.mark(5)
    buffer.write(7, -1)
    buffer.write(1, 2**54)
    assert len(buffer) == 4
    assert written(buffer) == [(3, 42), (5, 0), (7, -1), (1, 2**54)]
    assert len(buffer) == 0
    assert buffer.peek() == b""


@both
def test_other_threads_may_write_but_not_mark(kind: Any) -> None:
    buffer = kind.EventBuffer(16)
    said: list[bool] = []

    def work() -> None:
        said.extend((buffer.here(), buffer.mark(1)))
        buffer.write(2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [False, False]
    assert written(buffer) == [(2, 0)]
    buffer.thread = 0
    assert not buffer.mark(1)


@both
def test_another_thread_can_be_followed(kind: Any) -> None:
    buffer = kind.EventBuffer(16)
    assert buffer.thread == threading.get_ident()
    said: list[object] = []
    there, reported = threading.Event(), threading.Event()

    def work() -> None:
        there.set()
        assert reported.wait(10)
        said.extend((buffer.thread == threading.get_ident(), buffer.here(), buffer.mark(1)))

    thread = threading.Thread(target=work)
    thread.start()
    assert there.wait(10)
    buffer.thread = thread.ident
    assert not buffer.mark(2)
    reported.set()
    thread.join()
    assert said == [True, True, True]
    buffer.thread = 0
    assert (buffer.thread, buffer.here()) == (0, False)
    assert codes_in(buffer) == [1]


@both
def test_listeners_come_and_go(kind: Any) -> None:
    buffer = kind.EventBuffer(16, 9)
    lengths: list[int] = []

    def listen() -> None:
        lengths.append(len(buffer))

    for name, there in (("on_event", listen), ("cuda_event_id", lambda: 6)):
        default = getattr(buffer, name)
        assert not default
        setattr(buffer, name, there)
        assert getattr(buffer, name) is there
        buffer.mark(1)
        setattr(buffer, name, default)
        assert getattr(buffer, name) is default
        buffer.mark(2)
    assert lengths == [1]
    assert written(buffer) == [(1, 0), (2, 0), (9, 7), (1, 0), (2, 0)]


@both
@pytest.mark.parametrize("arguments", [(), (1, 2, 3), ("1",), (1, "2")])
def test_what_is_no_event_is_refused(kind: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        kind.EventBuffer(16).mark(*arguments)


@both
def test_full_ring_buffer_calls_on_full_and_counts_drops(kind: Any) -> None:
    buffer = kind.EventBuffer(8)
    for code in range(20):
        buffer.write(code)
    kept = len(buffer)
    assert kept == 7  # an event may take two places
    assert buffer.lost == 20 - kept
    assert [code for code, _ in written(buffer)] == list(range(kept))
    read: Written = []
    buffer.on_full = lambda: read.extend(written(buffer))
    for code in range(30):
        buffer.write(code)
    assert [code for code, _ in read + written(buffer)] == list(range(30))
    assert buffer.lost == 20 - kept


@both
def test_what_is_not_skipped_stays(kind: Any) -> None:
    buffer = kind.EventBuffer(8)
    for round_ in range(9):
        for code in (1, 2, 3):
            buffer.write(code, round_)
        before = buffer.peek()
        assert buffer.peek() == before
        buffer.skip(2)
        assert buffer.peek() == before[-16:]
        assert written(buffer) == [(3, round_)]
    for count in (1, -1):
        with pytest.raises((ValueError, OverflowError)):
            buffer.skip(count)


@both
@pytest.mark.parametrize(("capacity", "events"), [(4096, 3000), (131_072, 100_000)])
def test_many_events_are_the_same_as_few(kind: Any, capacity: int, events: int) -> None:
    buffer = kind.EventBuffer(capacity)
    for number in range(events):
        buffer.write(number % 30, number)
    assert written(buffer) == [(number % 30, number) for number in range(events)]


@both
def test_half_full_ring_buffer_signals_once_until_read(kind: Any) -> None:
    buffer = kind.EventBuffer(64)
    calls: list[int] = []
    buffer.on_low = lambda: calls.append(len(buffer))
    for _ in range(2):
        for code in range(50):
            buffer.write(code % 30)
        assert len(calls) == 1
        assert 30 <= calls.pop() <= 32
        buffer.skip(len(buffer))
    assert buffer.lost == 0
    buffer.on_low = lambda: 1 / 0
    for _ in range(200):
        buffer.write(1)
    assert len(buffer) == 63


def test_a_ring_reads_around_its_end() -> None:
    if native is None:
        pytest.skip("only the compiled buffer is a ring")
    buffer = native.EventBuffer(8)
    for start in range(40):
        for code in range(start % 5 + 1):
            buffer.write(code, start)
        assert written(buffer) == [(code, start) for code in range(start % 5 + 1)]


@both
def test_event_id_precedes_every_event(kind: Any) -> None:
    buffer = kind.EventBuffer(16, 29)
    numbers = iter([5, -1])

    def cuda_event_id() -> int:
        return next(numbers)

    buffer.cuda_event_id = cuda_event_id
    buffer.write(1)
    buffer.write(2)
    buffer.write(3)  # no more numbers: StopIteration is ours alone
    buffer.cuda_event_id = None
    buffer.write(4)
    assert written(buffer) == [(29, 6), (1, 0), (29, 0), (2, 0), (29, 0), (3, 0), (4, 0)]


@both
def test_listener_gets_every_event_and_its_failures_stay_inside(kind: Any) -> None:
    buffer = kind.EventBuffer(16)
    lengths: list[int] = []

    def listener() -> None:
        lengths.append(len(buffer))
        raise ZeroDivisionError

    buffer.on_event = listener
    timed = kind.Timed(buffer, lambda: 1 / 0, 1, 2, 3)
    with pytest.raises(ZeroDivisionError) as caught:
        timed()
    assert caught.traceback[-1].name == "<lambda>"
    assert lengths == [1, 2]
    assert written(buffer) == [(1, 0), (3, 0)]


@both
@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_signal_handler_error_within_listener_reaches_program(
    kind: Any, when: int, signal: type[BaseException]
) -> None:
    buffer = kind.EventBuffer(16)
    calls: list[None] = []

    def listener() -> None:
        calls.append(None)
        if len(calls) == when:
            raise signal

    buffer.on_event = listener
    done: list[int] = []
    timed = kind.Timed(buffer, lambda: done.append(1), 1, 2)
    with pytest.raises(signal):
        timed()
    assert len(done) == when - 1


class Owner:
    """Has methods to time."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def method(self, *args: Any, **kwargs: Any) -> Any:
        """Do something."""
        self.seen.append((args, kwargs))
        return args, kwargs


def hosted(kind: Any, buffer: Any) -> type[Owner]:
    """Return a class of which ``method`` is timed."""
    timed = functools.update_wrapper(kind.Timed(buffer, Owner.method, 1, 2), Owner.method)
    return type("Hosted", (Owner,), {"method": timed})


@both
def test_timed_method_is_called_and_appears_unchanged(kind: Any) -> None:
    buffer = kind.EventBuffer(64)
    owner = hosted(kind, buffer)()
    assert owner.method(1, two=2) == ((1,), {"two": 2})
    assert type(owner).method(owner, 3) == ((3,), {})
    assert [*map(owner.method, (4,))] == [((4,), {})]
    assert owner.method(*(), **{}) == ((), {})
    assert [args for args, _ in owner.seen] == [(1,), (3,), (4,), ()]
    assert written(buffer) == [(1, 0), (2, 0)] * 4
    assert inspect.ismethod(owner.method)
    assert inspect.signature(owner.method) == inspect.signature(Owner().method)
    assert (owner.method.__name__, owner.method.__doc__) == ("method", "Do something.")
    assert inspect.unwrap(vars(type(owner))["method"]) is Owner.method


@both
def test_a_timed_function_is_pickled_and_copied_by_name(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = functools.update_wrapper(kind.Timed(kind.EventBuffer(16), hosted, 1, 2), hosted)
    with pytest.raises(pickle.PicklingError):  # as any function that is not where its name says
        pickle.dumps(timed)
    monkeypatch.setattr(sys.modules[__name__], "hosted", timed)
    assert pickle.loads(pickle.dumps(timed)) is timed
    assert copy.deepcopy([timed])[0] is timed


@both
def test_muted_silenced_or_other_threads_are_not_timed(kind: Any) -> None:
    buffer = kind.EventBuffer(16)
    timed = kind.Timed(buffer, lambda: "result", 1, 2)
    buffer.muted = 1 << 1
    assert timed() == "result"
    buffer.muted = 1 << 2
    assert timed() == "result"
    assert written(buffer) == [(1, 0), (2, 0)]
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(timed()))
    thread.start()
    thread.join()
    assert results == ["result"]
    buffer.thread = 0
    assert timed() == "result"
    assert written(buffer) == []


@both
def test_a_call_in_which_we_are_silenced_has_no_end(kind: Any) -> None:
    buffer = kind.EventBuffer(16)

    def silence() -> None:
        buffer.thread = 0

    kind.Timed(buffer, silence, 1, 2)()
    assert written(buffer) == [(1, 0)]
