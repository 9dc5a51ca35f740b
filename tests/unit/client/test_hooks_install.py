"""Putting hooks on and taking them off: afterwards torch is as it was, object by object."""

from typing import Any

import pytest
import torch
from tests.unit.client.training import calls, loader, per_step, tiny_model, tiny_training, train
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

import torchperfd
from torchperfd.events import EventBuffer
from torchperfd.hooks.instruments import Hooks
from torchperfd.hooks.patches import Patches
from torchperfd.safety.logs import Faults
from torchperfd.steps.replay import Replay

PATCHED = (
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "zero_grad"),
    (nn.Module, "zero_grad"),
    (nn.Module, "compile"),
    (nn.Module, "_replicate_for_data_parallel"),
    (torch.amp.GradScaler, "step"),
    (torch, "save"),
    (torch.serialization, "save"),
    (dataloader._BaseDataLoaderIter, "__next__"),
)


def patched_attributes() -> list[Any]:
    return [vars(owner)[name] for owner, name in PATCHED]


def global_optimizer_hooks() -> list[Any]:
    return [
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]


def same(some: list[Any], others: list[Any]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def test_detaching_puts_back_the_identical_objects() -> None:
    before = patched_attributes()
    model = tiny_model()
    own = {*vars(model)}
    client = torchperfd.attach(model=model)
    assert not any(one is other for one, other in zip(before, patched_attributes(), strict=True))
    assert len(global_optimizer_hooks()) == 2
    assert model._compiled_call_impl is not None
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(1))

    client.detach()
    assert same(before, patched_attributes())
    assert global_optimizer_hooks() == []
    assert vars(model).keys() == own
    client.detach()
    assert same(before, patched_attributes())


def test_a_model_compiled_in_place_gets_its_own_call_back() -> None:
    model = tiny_model()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    client = torchperfd.attach(model=model)
    assert model._compiled_call_impl is not compiled
    client.detach()
    assert model._compiled_call_impl is compiled


def test_patched_method_keeps_its_signature_and_name(client: torchperfd.Client) -> None:
    assert torch.autograd.backward.__name__ == "backward"
    assert "the sum of gradients" in str(torch.autograd.backward.__doc__)
    assert torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"
    assert nn.Module.zero_grad.__qualname__ == "Module.zero_grad"


def test_zeroing_takes_the_arguments_it_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(tiny_model().parameters(), lr=0.1)
    parameter = optimizer.param_groups[0]["params"][0]
    client = torchperfd.attach()
    parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.count_nonzero() == 0
    optimizer.zero_grad(True)
    assert parameter.grad is None
    client.detach()
    taken: list[Any] = []

    def of_a_fork(self: Any, *arguments: Any, **options: Any) -> None:
        taken.append((arguments, options))

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", of_a_fork)
    client = torchperfd.attach()
    zero_grad: Any = optimizer.zero_grad
    zero_grad(1, keep="momentum")
    zero_grad()
    client.detach()
    assert taken == [((1,), {"keep": "momentum"}), ((), {})]


def test_attaching_twice_is_attaching_once(client: torchperfd.Client) -> None:
    once = patched_attributes()
    assert torchperfd.attach() is client
    assert torchperfd.attach(run="another", job="another") is client
    assert same(once, patched_attributes())
    assert len(global_optimizer_hooks()) == 2
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    assert calls(client) == per_step(3)


def test_attaching_after_detaching_starts_anew() -> None:
    model, optimizer = tiny_training()
    for batches in (3, 2):
        client = torchperfd.attach()
        train(model, optimizer, loader(batches))
        assert calls(client) == per_step(batches)
        client.detach()
        assert not client.attached


def test_later_patch_over_ours_stays_and_works() -> None:
    original = torch.autograd.backward
    client = torchperfd.attach()
    ours = torch.autograd.backward
    seen: list[int] = []

    def foreign(*arguments: Any, **options: Any) -> None:
        seen.append(1)
        ours(*arguments, **options)

    torch.autograd.backward = foreign
    try:
        model, optimizer = tiny_training()
        train(model, optimizer, loader(2))
        assert calls(client) == per_step(2)
        client.detach()
        assert torch.autograd.backward is foreign
        train(model, optimizer, loader(3))
        assert len(seen) == 5
        assert calls(client) == per_step(2)
    finally:
        torch.autograd.backward = original


def test_hooks_that_others_registered_stay(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    seen: list[str] = []
    handles = [
        model.register_forward_hook(lambda *_: seen.append("forward")),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: seen.append("step")),
    ]
    try:
        train(model, optimizer, loader(1))
        client.detach()
        train(model, optimizer, loader(1))
        assert seen == ["forward", "step"] * 2
    finally:
        for handle in handles:
            handle.remove()


def test_a_torch_that_lacks_a_place_loses_that_phase_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dataloader, "_BaseDataLoaderIter", type("Renamed", (), {}))
    client = torchperfd.attach()
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    counted = calls(client)
    assert "data" not in counted
    assert counted["optimizer"] == 3
    assert [record.getMessage() for record in caplog.records] == [
        "hook off: loader: this torch has no Renamed.__next__; what it measures stays empty",
        "hook off: index_lists: the hook loader is off; what it measures stays empty",
        "hook off: loader_use: the hook loader is off; what it measures stays empty",
    ]
    assert [str(state) for state in client.hooks if not state.is_on] == [
        "loader: this torch has no Renamed.__next__",
        "index_lists: the hook loader is off",
        "loader_use: the hook loader is off",
    ]


def test_silenced_hooks_pass_through_and_can_still_be_taken_off() -> None:
    before = patched_attributes()
    buffer, faults = EventBuffer(64), Faults()
    hooks = Hooks(buffer, Replay(buffer, 16, faults), faults)
    hooks.install()
    try:
        buffer.thread = 0  # as in a forked child
        model = tiny_model()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
        assert len(buffer) == 0
    finally:
        hooks.uninstall()
    assert same(before, patched_attributes())


# Patches, on things that are not torch's.


class Owner:
    def greet(self) -> str:
        return "hello"

    @staticmethod
    def aside() -> str:
        return "psst"


class Heir(Owner):
    pass


def test_a_patch_is_undone_to_the_identical_attribute() -> None:
    originals = vars(Owner)["greet"], vars(Owner)["aside"]
    patches = Patches()
    patches.replace(Owner, "greet", lambda self: "patched")
    patches.replace(Owner, "aside", staticmethod(lambda: "patched"))
    assert (Owner().greet(), Owner.aside()) == ("patched", "patched")
    patches.undo()
    # As stored, not as looked up: a static method must not come back as a plain function.
    assert same([*originals], [vars(Owner)["greet"], vars(Owner)["aside"]])


def test_patches_upon_patches_are_undone_newest_first() -> None:
    original = vars(Owner)["greet"]
    patches = Patches()
    patches.replace(Owner, "greet", lambda self: "first")
    patches.replace(Owner, "greet", lambda self: "second")
    patches.undo()
    assert vars(Owner)["greet"] is original


def test_undoing_leaves_a_foreign_later_patch_alone() -> None:
    original = vars(Owner)["greet"]
    patches = Patches()
    patches.replace(Owner, "greet", lambda self: "ours")
    foreign = lambda self: "foreign"  # noqa: E731
    Owner.greet = foreign  # type: ignore[method-assign]
    try:
        patches.undo()
        assert vars(Owner)["greet"] is foreign
        patches.undo()
        assert vars(Owner)["greet"] is foreign
    finally:
        Owner.greet = original  # type: ignore[method-assign]


def test_only_an_attribute_of_its_own_can_be_replaced() -> None:
    patches = Patches()
    for name in ("greet", "nothing"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}' of its own"):
            patches.replace(Heir, name, None)
    assert vars(Heir).keys().isdisjoint({"greet", "nothing"})
    patches.undo()
