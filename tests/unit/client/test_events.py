"""The ring buffer and its hooks: equal events from C and Python; no error of ours reaches the script."""

import copy
import functools
import gc
import inspect
import pickle
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchperfd.events import NATIVE, codes, reference
from torchperfd.hooks.batches import samples_in

native: Any = pytest.importorskip("torchperfd.events._native") if NATIVE else None

BOTH = [
    pytest.param(native, id="native", marks=pytest.mark.needs("gcc") if native is None else ()),
    pytest.param(reference, id="reference"),
]
both = pytest.mark.parametrize("kind", BOTH)

Written = list[tuple[int, int]]


def written(buffer: Any) -> Written:
    """Take codes and arguments from a ring buffer; check that times never run backwards."""
    events = list(struct.iter_unpack(codes.EVENT_FORMAT, buffer.peek()))
    buffer.skip(len(events))
    times = [time for time, _ in events]
    assert times == sorted(times)
    return [(word & codes.CODE_MASK, word >> codes.ARGUMENT_SHIFT) for _, word in events]


def codes_in(buffer: Any) -> list[int]:
    return [code for code, _ in written(buffer)]


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


# Draws.


class Batches:
    """An iterator as torch's are: without workers, unless it says otherwise."""

    _num_workers = 0

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        if not self.batches:
            raise StopIteration
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch


class Workers(Batches):
    """Its draws are announced."""

    _num_workers = 2


def drawing(
    kind: Any,
    buffer: Any,
    monkeypatch: pytest.MonkeyPatch,
    ahead: Callable[[Any], bool] = lambda _: False,
    models: list[Any] | None = None,
) -> Any:
    draws = kind.Draws(
        buffer,
        Batches.__next__,
        1,
        2,
        3,
        Batches,
        torch.Tensor,
        ahead,
        samples_in,
        torch.is_grad_enabled,
        [] if models is None else models,
    )
    draws.watching = False
    monkeypatch.setattr(Batches, "__next__", functools.update_wrapper(draws, Batches.__next__))
    return draws


@both
def test_draws_record_the_number_of_samples(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = kind.EventBuffer(256)
    drawing(kind, buffer, monkeypatch)
    batches: list[Any] = [
        torch.ones(7, 3),
        torch.ones(7, 3).numpy(),
        torch.tensor(1.0),
        torch.ones(0, 3),
        nn.Parameter(torch.ones(6, 3)),
        (torch.ones(5, 2), torch.ones(9)),
        [torch.ones(5, 2)],
        {"input_ids": torch.ones(4, 128), "labels": torch.ones(4)},
        [{"x": torch.ones(3, 2)}],
        [[[torch.ones(3)]]],
        (),
        {},
        None,
        "text",
        2**70,
    ]
    iterator = Batches([*batches])
    assert all(drawn is batch for drawn, batch in zip(iterator, batches, strict=True))
    expected = [samples_in(batch) for batch in batches]
    assert expected[:10] == [7, 7, 1, 0, 6, 5, 5, 4, 3, 0]
    draws = [event for samples in expected for event in ((1, id(iterator)), (2, samples))]
    assert written(buffer) == [*draws, (1, id(iterator)), (3, id(iterator))]


@both
def test_draws_say_whether_the_loop_evaluates(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, models = kind.EventBuffer(64), [nn.Linear(2, 1), nn.Linear(2, 1)]
    references = [weakref.ref(model) for model in models]
    drawing(kind, buffer, monkeypatch, models=references)
    iterator = Batches([1] * 6)

    def flags() -> int:
        next(iterator)
        (_, argument), _ = written(buffer)
        assert argument & ~3 == id(iterator)
        return int(argument & 3)

    assert flags() == 0
    with torch.no_grad():
        assert flags() == 1
    models[0].eval()
    assert flags() == 0, "another model is in training mode"
    models[1].eval()
    assert flags() == 2
    with torch.inference_mode():
        assert flags() == 3
    models.clear()
    assert flags() == 0, "of no model at all nothing can be said"


@both
def test_a_hostile_batch_is_handed_on(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        @property
        def shape(self) -> Any:
            raise RuntimeError("look away")

    buffer = kind.EventBuffer(64)
    drawing(kind, buffer, monkeypatch)
    batch = Hostile()
    iterator = Batches([batch])
    assert list(iterator) == [batch]
    assert codes_in(buffer) == [1, 2, 1, 3]


@both
def test_a_draw_that_fails_fails_as_before(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = kind.EventBuffer(64)
    drawing(kind, buffer, monkeypatch)
    error = OSError("disk")
    with pytest.raises(OSError, match="disk") as caught:
        list(Batches([1, error]))
    assert caught.value is error
    assert codes_in(buffer) == [1, 2, 1, 3]


@both
def test_unusual_draws_are_announced(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = kind.EventBuffer(64)
    announced: list[Any] = []

    def ahead(iterator: Any) -> bool:
        announced.append(iterator)
        buffer.mark(9)
        return len(announced) < 4

    draws = drawing(kind, buffer, monkeypatch, ahead)
    plain, workers = Batches([1, 2, 3, 4]), Workers([1])
    assert next(workers) == 1
    assert next(plain) == 1
    draws.watching = True
    assert next(plain) == 2
    draws.watching = False
    buffer.steps_open = 1
    assert next(plain) == 3
    assert next(plain) == 4  # not to be timed
    assert announced == [workers, plain, plain, plain]
    assert codes_in(buffer) == [9, 2, 1, 2, 9, 2, 9, 2, 9]


# Forward.


def timed_forward(kind: Any, buffer: Any, module: nn.Module, compiled: Any = None) -> Any:
    forward = kind.Forward(buffer, module, compiled, "_call_impl", torch.is_grad_enabled, 1, 2, 3)
    vars(module)["_compiled_call_impl"] = forward
    return forward


@both
def test_forward_distinguishes_training_from_evaluation(kind: Any) -> None:
    buffer = kind.EventBuffer(64)
    module = nn.Linear(2, 1)
    expected = module(torch.ones(1, 2))
    timed_forward(kind, buffer, module)
    assert torch.equal(module(torch.ones(1, 2)), expected)
    assert torch.equal(module(input=torch.ones(1, 2)), expected)
    with torch.no_grad():
        module(torch.ones(1, 2))
    module.eval()
    module(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    buffer.muted = 1 << 1
    module.train()
    module(torch.ones(1, 2))
    train, frozen = [(1, 0), (3, 0)], [(2, 2), (3, 0)]
    assert written(buffer) == [*train, *train, (2, 1), (3, 0), *frozen, *frozen]
    with torch.no_grad():
        module.eval()(torch.ones(1, 2))
    assert written(buffer) == [(2, 0), (3, 0)]


@both
def test_a_forward_leaves_no_trace_in_copies_and_pickles(kind: Any) -> None:
    class Stubborn(nn.Linear):
        """Pickles all it has, as some frameworks' modules do."""

        def __getstate__(self) -> Any:
            return dict(vars(self))

    module = Stubborn(2, 1)
    timed_forward(kind, kind.EventBuffer(64), module)
    assert vars(copy.deepcopy(module))["_compiled_call_impl"] is None
    assert pickle.loads(pickle.dumps(vars(module)["_compiled_call_impl"])) is None
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.fill_(0.0)
        assert torch.equal(twin(torch.ones(1, 2)), twin.bias.reshape(1, 1))


@both
def test_a_forward_does_not_keep_its_module_alive(kind: Any) -> None:
    module = nn.Linear(2, 1)
    forward = timed_forward(kind, kind.EventBuffer(64), module)
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError):
        forward(torch.ones(1, 2))


@both
def test_a_forward_calls_what_was_in_its_place(kind: Any) -> None:
    buffer = kind.EventBuffer(64)
    module = nn.Linear(1, 1).eval()
    forward = timed_forward(kind, buffer, module, lambda *args, **kwargs: (args, kwargs))
    assert forward(1, a=2) == ((1,), {"a": 2})
    assert written(buffer) == [(2, 2), (3, 0)]


@both
def test_a_forward_calls_what_its_class_has_by_now(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Base(nn.Module):
        """What another tool replaces a part of."""

        def forward(self, number: int) -> int:
            return number

    class Module(Base):
        """The class of the module."""

    class Other(Base):
        """What the module becomes, as under FSDP."""

        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return "other"

    module: Any = Module()
    timed_forward(kind, kind.EventBuffer(64), module)
    assert [module(1), module(2)] == [1, 2]
    monkeypatch.setattr(Base, "_call_impl", lambda _module, number: -number)
    assert [module(1), module(2)] == [-1, -2]
    monkeypatch.setattr(Module, "_call_impl", lambda _module, number: number + 10)
    assert [module(1), module(2)] == [11, 12]
    module.__class__ = Other
    assert [module(1), module(2)] == ["other", "other"]
    module.__class__ = Module
    assert module(1) == 11
    monkeypatch.undo()
    assert module(1) == 1


# Steps.


@both
def test_known_optimizer_steps_are_written_others_left_to_caller(kind: Any) -> None:
    class Optimizer:
        pass

    buffer, one, other = kind.EventBuffer(64), Optimizer(), Optimizer()
    known: dict[int, weakref.ref[Any]] = {id(one): weakref.ref(one), id(other): weakref.ref(one)}
    steps = kind.Steps(buffer, known, 1, 2)
    assert steps.begin(one)
    assert buffer.steps_open == 1
    assert not steps.begin(one)  # one within another
    assert steps.end(one)
    assert buffer.steps_open == 0
    assert steps.end(one)
    assert buffer.steps_open == 0
    assert not steps.begin(other)  # somebody else's reference: the id has been taken over
    assert not steps.begin(Optimizer())
    buffer.thread = 0
    assert not steps.begin(one)
    assert not steps.end(one)
    assert written(buffer) == [(1, id(one)), (2, id(one)), (2, id(one))]


# All of it at once.

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("mark"), st.integers(0, 28), st.integers(-(2**40), 2**40)),
        st.tuples(st.just("call"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("raise"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("mute"), st.integers(0, 2**10), st.just(0)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
        st.tuples(st.just("follow"), st.booleans(), st.just(0)),
    ),
    max_size=60,
)


def play(kind: ModuleType, actions: list[tuple[str, Any, Any]]) -> list[Any]:
    """Return all that is visible from outside."""
    buffer: Any = kind.EventBuffer(1024)
    me = buffer.thread
    seen: list[Any] = []

    def nested(depth: int, fails: bool) -> int:
        if depth:
            return int(timed(depth - 1, fails))
        if fails:
            raise KeyError(depth)
        return 17

    timed: Any = kind.Timed(buffer, nested, 5, 6, 7)
    for name, one, two in actions:
        if name == "mark":
            seen.append(buffer.mark(one, two))
        elif name in ("call", "raise"):
            try:
                seen.append(timed(one, name == "raise"))
            except KeyError as error:
                seen.append(repr(error))
        elif name == "mute":
            buffer.muted = one
        elif name == "drain":
            seen.append(written(buffer))
        else:
            buffer.thread = me if one else 0
    return [*seen, written(buffer), buffer.lost]


@pytest.mark.skipif(native is None, reason="there is no compiled buffer to compare with")
@settings(max_examples=200)
@given(ACTIONS)
def test_both_halves_say_the_same(actions: list[tuple[str, Any, Any]]) -> None:
    assert play(native, actions) == play(reference, actions)


@pytest.mark.skipif(native is None, reason="only C can lose count of references")
def test_the_compiled_half_loses_no_reference() -> None:
    class Optimizer:
        pass

    buffer, optimizer, module = native.EventBuffer(64, 29), Optimizer(), nn.Linear(2, 1)
    forward = timed_forward(native, buffer, module)
    steps = native.Steps(buffer, {id(optimizer): weakref.ref(optimizer)}, 1, 2)
    result = object()
    argument = object()
    timed = native.Timed(buffer, lambda *_, **__: result, 1, 2)
    draws = native.Draws(
        buffer,
        lambda iterator: iterator,
        1,
        2,
        3,
        list,
        torch.Tensor,
        lambda _: True,
        lambda _: 1,
        torch.is_grad_enabled,
        [weakref.ref(module)],
    )
    inputs = torch.ones(1, 2)
    buffer.on_full = buffer.on_low = lambda: buffer.skip(len(buffer))
    buffer.cuda_event_id = lambda: 10**6
    watched = [optimizer, result, argument, timed, forward, steps, draws, buffer, module, inputs]

    def exercise() -> None:
        for _ in range(500):
            timed(argument, key=argument)
            steps.begin(optimizer)
            steps.end(optimizer)
            draws(watched)
            module(inputs)
            buffer.on_event = lambda: argument
            timed(argument)
            buffer.on_event = None

    exercise()
    gc.collect()
    before, blocks = [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()
    exercise()
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before
    assert sys.getallocatedblocks() - blocks < 200
