"""Timed draws, forwards and steps: equal events from C and Python; no error of ours reaches the script."""

import copy
import gc
import pickle
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.event_halves import Batches, Workers, both, codes_in, drawing, native, written
from torch import nn

from torchperfd.events import reference
from torchperfd.hooks.batches import samples_in


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
