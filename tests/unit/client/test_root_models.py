"""Which modules are models: found by their optimizers, at any address and age; and samples in batches."""

import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.client.training import calls, loader, tiny_model, train
from torch import nn

import torchperfd
from torchperfd.events import EventBuffer, Forward
from torchperfd.hooks import models, passes
from torchperfd.hooks.batches import samples_in
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.instruments import Hooks
from torchperfd.hooks.models import RootModels, roots
from torchperfd.safety.logs import Faults
from torchperfd.steps.replay import Replay


def is_timed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_compiled_call_impl"), Forward)


def test_roots_are_the_parentless_modules_of_an_optimizer() -> None:
    inner, alone, frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    outer = nn.Sequential(inner, nn.ReLU())
    modules = [inner, outer, *outer.children(), alone, frozen]
    assert roots(modules, [torch.optim.SGD(inner.parameters()), torch.optim.SGD(alone.parameters())]) == [
        outer,
        alone,
    ]
    assert roots(modules, []) == []
    assert roots([], [torch.optim.SGD(inner.parameters())]) == []


def make_roots() -> RootModels:
    buffer, faults = EventBuffer(16), Faults()
    replay = Replay(buffer, 4, faults)
    links = Hooks(buffer, replay, faults).links
    passes.install_forward(HookContext("forward", buffer, replay, faults, links))
    return RootModels(HookContext("models", buffer, replay, faults, links))


@pytest.fixture
def one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every object take the place in memory of the one before it."""
    monkeypatch.setattr(models, "id", lambda thing: 42, raising=False)


def test_next_model_at_the_same_address_is_hooked(one_address: None) -> None:
    found = make_roots()
    for _ in range(3):
        model = nn.Linear(1, 1)
        found.add(model)
        found.add(model)
        assert is_timed(model)
        del model
        gc.collect()


def test_next_optimizer_at_the_same_address_has_its_model_found(
    one_address: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is searched, though the optimizer has the address of one that is gone."""
    searches: list[None] = []
    monkeypatch.setattr(RootModels, "_search", lambda self, optimizer=None: searches.append(None))
    found = make_roots()
    for number in range(3):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        found.before_step(optimizer)
        found.before_step(optimizer)
        assert len(searches) == number + 1
        del optimizer
        gc.collect()


def test_a_script_of_many_optimizers_is_not_searched_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Searches for new optimizers' models may take two seconds, and two percent of the time."""
    clock, searches = [100.0], list[None]()

    def search(self: RootModels, optimizer: Any = None) -> None:
        searches.append(None)
        self._searched_seconds += 0.5

    monkeypatch.setattr(RootModels, "_search", search)
    monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    caplog.set_level("INFO")
    found = make_roots()
    kept = [torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(100)]
    for optimizer in kept:
        found.before_step(optimizer)
    assert len(searches) == 4
    assert (
        caplog.text.count("their forward is not timed; name a model with torchperfd.attach(model=...)") == 1
    )
    clock[0] += 100.0
    later = [torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(100)]
    for optimizer in later:
        found.before_step(optimizer)
    assert len(searches) == 4 + 4
    for _ in range(100):
        found.before_draw()
    assert len(searches) == 8 + 2


def test_a_new_optimizer_of_a_known_model_costs_no_scan_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked_at = nn.Linear(2, 1), list[int | None]()

    def look(generation: int | None) -> Any:
        looked_at.append(generation)
        return [], []

    monkeypatch.setattr(models, "live_optimizers_and_modules", look)
    found = make_roots()
    found.add(model)
    kept = [torch.optim.SGD(model.parameters()) for _ in range(3)]
    for optimizer in kept:
        found.before_step(optimizer)
    assert looked_at == [0, 1], "once for all, since a wrapper may have been put around the model"


def test_new_optimizers_model_is_found_among_youngest_objects() -> None:
    found, looked_at = make_roots(), list[int | None]()
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters())
    honest = models.live_optimizers_and_modules

    def look(generation: int | None) -> Any:
        looked_at.append(generation)
        return honest(generation)

    with mock.patch.object(models, "live_optimizers_and_modules", look):
        found.before_step(optimizer)
    assert is_timed(model)
    assert None not in looked_at


def test_the_older_parent_of_a_young_module_is_the_root() -> None:
    """A parent is made ahead of its children: the collector may count it among older objects."""
    found = make_roots()
    model = nn.Module()
    gc.collect()
    model.add_module("inner", nn.Sequential(nn.Linear(2, 1)))
    found.before_step(torch.optim.SGD(model.parameters()))
    assert is_timed(model)
    assert not is_timed(model.get_submodule("inner"))


def _frozen(holder: str) -> tuple[object, torch.optim.Optimizer, "weakref.ref[nn.Module]"]:
    """Return what leads to a model, an optimizer of it, and a reference to it."""
    model = nn.Sequential(nn.Linear(2, 1))
    holders = {"variable": model, "attribute": SimpleNamespace(parts=[model]), "closure": lambda: model}
    return holders[holder], torch.optim.SGD(model.parameters()), weakref.ref(model)


@pytest.mark.parametrize("holder", ["variable", "attribute", "closure"])
def test_model_that_gc_freeze_has_hidden_is_found(holder: str) -> None:
    """As in a script that freezes its objects ahead of the loop: ``gc.get_objects()`` lists none of them."""
    found = make_roots()
    held, optimizer, model = _frozen(holder)
    gc.collect()
    gc.freeze()
    try:
        found.before_step(optimizer)
        assert is_timed(model())  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    del held, optimizer
    eventually_freed(model)


def eventually_freed(reference: "weakref.ref[Any]") -> None:
    """Wait until what a search has found is let go of, which another thread does."""
    deadline = time.monotonic() + 20
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert reference() is None


def test_a_model_that_is_loaded_is_timed(client: torchperfd.Client, tmp_path: Path) -> None:
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    torch.save(model, tmp_path / "best.pt")
    best = torch.load(tmp_path / "best.pt", weights_only=False)
    assert is_timed(best)
    best.eval()
    with torch.no_grad():
        for _ in range(3):
            best(torch.ones(2, 4))
    client.finish()
    assert calls(client, "validate")["steps"] == 3


class Odd:
    """Has a ``shape``, but not one to count with."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(7, 3), 7),
        (torch.ones(7, 3).numpy(), 7),
        (torch.tensor(1.0), 1),
        ((torch.ones(5, 2), torch.ones(9)), 5),
        ([torch.ones(5, 2)], 5),
        ({"input_ids": torch.ones(4, 128), "labels": torch.ones(4)}, 4),
        ([{"x": torch.ones(3, 2)}], 3),
        ([[[torch.ones(3)]]], 0),
        ((), 0),
        ({}, 0),
        (None, 0),
        ("text", 0),
        (42, 0),
        (Odd(None), 0),
        (Odd((None, 3)), 0),
        (Odd("square"), 0),
        (Odd(lambda: (3, 4)), 0),
        (Odd(7), 0),
    ],
)
def test_batch_samples_are_first_tensors_first_dimension(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples
