"""The hooks on real loops: exact counts of what torch did, whatever shape the script has."""

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.client.training import calls, evaluate, loader, open_phases, per_step, tiny_model, train
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import torchperfd
from torchperfd.events import EventBuffer, Forward
from torchperfd.hooks import models, passes
from torchperfd.hooks.batches import samples_in
from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.hooks.compiler import Compilations
from torchperfd.hooks.context import HookContext, HookLinks
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.models import RootModels, roots
from torchperfd.hooks.worker_stacks import WorkerStacks
from torchperfd.safety.logs import Faults
from torchperfd.steps.epochs import Iterators
from torchperfd.steps.replay import Replay


def is_timed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_compiled_call_impl"), Forward)


def test_a_plain_loop_has_one_of_each_phase_per_step(client: torchperfd.Client) -> None:
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    assert calls(client) == per_step(3)
    totals = client.report().totals.train
    assert sum(phase.ns for phase in totals.phases) == totals.ns > 0
    assert totals.samples == 6
    assert client.parts.instruments.faults.counts() == {}


def test_epochs_and_validations_in_between(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        train(model, optimizer, loader(3))
        evaluate(model, loader(2))
    assert calls(client) == per_step(6)
    assert calls(client, "validate") == {"steps": 4, "data": 4, "forward": 4, "loss": 4, "other": 4}


def test_an_iterable_data_set_is_drawn_from_like_any_other(client: torchperfd.Client) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(4), torch.ones(2))] * 6)

    model = tiny_model()
    train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.DataLoader(Stream(), batch_size=2),
    )
    assert calls(client) == per_step(3)


def test_loop_that_breaks_out_of_loader_keeps_its_last_step(client: torchperfd.Client) -> None:
    model = tiny_model()
    batches = iter(loader(3))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), [next(batches)])
    assert calls(client) == {"steps": 0}
    client.finish()
    assert calls(client) == per_step(1)


def test_a_loop_without_a_loader_is_followed_by_its_optimizer(client: torchperfd.Client) -> None:
    model = tiny_model()
    batch = torch.ones(2, 4), torch.ones(2, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch] * 3)
    counted = calls(client)
    assert (counted["forward"], counted["loss"], counted.get("data")) == (3, 3, None)
    assert (counted["steps"], counted["backward"], counted["optimizer"]) == (3, 3, 3)


def test_a_named_model_is_seen_from_its_first_forward_on() -> None:
    model = tiny_model()
    client = torchperfd.attach(model=model)
    batch = torch.ones(2, 4), torch.ones(2, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch] * 3)
    assert calls(client)["forward"] == 3


def test_a_model_that_is_named_and_found_counts_once() -> None:
    model = tiny_model()
    client = torchperfd.attach(model=model)
    torchperfd.attach(model=model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    assert calls(client) == per_step(3)


def test_two_models_and_two_optimizers_are_one_step(client: torchperfd.Client) -> None:
    generator, critic = tiny_model(), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for inputs, _ in loader(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
            critic(generator(inputs)).mean().backward()
            optimizer.step()
    assert calls(client) == per_step(3, forward=12, loss=12, backward=6, optimizer=6, zero_grad=6)


def test_only_the_outermost_module_is_the_model(client: torchperfd.Client) -> None:
    model = nn.Sequential(tiny_model(), nn.Sequential(nn.Linear(2, 2)))
    unrelated = nn.Linear(4, 2)
    for inputs, targets in loader(3):
        unrelated(inputs)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), [(inputs, targets)])
    assert calls(client)["forward"] == 3  # each is known as soon as it has an optimizer
    assert not is_timed(unrelated)
    assert not is_timed(model[0])
    assert is_timed(model)


def test_an_optimizer_of_ones_own_is_an_optimizer(client: torchperfd.Client) -> None:
    class Halving(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                group["lr"] /= 2

    model = tiny_model()
    optimizer = Halving(model.parameters(), lr=0.8)
    train(model, optimizer, loader(3))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert calls(client) == per_step(3)


def test_an_optimizer_that_steps_another_is_one_call() -> None:
    """As ZeroRedundancyOptimizer does."""

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            inner.step()
            inner.step()

    model = tiny_model()
    client = torchperfd.attach(model=model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Outer(model.parameters(), lr=0.1)
    batch = torch.ones(2, 4), torch.ones(2, 2)
    train(model, optimizer, [batch] * 3)
    counted = calls(client)
    assert (counted["steps"], counted["optimizer"], counted["backward"]) == (3, 3, 3)


def test_a_schedulers_wrap_around_the_optimizer_changes_nothing(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, loader(3))
    assert calls(client) == per_step(3)


def test_zeroing_through_the_model_counts_too(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in loader(3):
        model.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
    assert calls(client) == per_step(3)


def test_a_closure_runs_inside_the_optimizer(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, max_eval=2)
    for inputs, _ in loader(3):

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    counted = calls(client)
    assert (counted["steps"], counted["optimizer"], counted["data"]) == (3, 3, 3)
    assert counted["forward"] == counted["backward"] == counted["zero_grad"] >= 3


def test_wrapping_any_iterable_makes_it_a_loader(client: torchperfd.Client) -> None:
    model = tiny_model()
    batch = torch.ones(5, 4), torch.ones(5, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), client.wrap([batch] * 3))
    counted = calls(client)
    assert (counted["steps"], counted["data"], counted["backward"]) == (3, 3, 3)
    assert client.report().totals.train.samples == 15


def test_user_phases_and_explicit_steps(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    augment = client.phase("augment")
    for inputs, _ in loader(4):
        for _ in range(2):
            with augment:
                inputs = inputs + 1
        model(inputs).mean().backward()
        optimizer.step()
        client.step(samples=10)
    counted = calls(client)
    assert (counted["steps"], counted["augment"], counted["optimizer"]) == (4, 8, 4)
    assert client.report().totals.train.samples == 4 * (2 + 10)


# What raises.


class Once:
    """Raises the first time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> None:
        self.asked += 1
        if self.asked == 1:
            raise FloatingPointError("once")


def attempt(*arguments: Any) -> None:
    with pytest.raises(FloatingPointError, match="once"):
        train(*arguments)


def test_a_backward_that_raises_leaves_its_phase(client: torchperfd.Client) -> None:
    once = Once()

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            once()
            return gradients[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()

        def forward(self, inputs: torch.Tensor) -> Any:
            return Fragile.apply(self.inner(inputs))  # type: ignore[no-untyped-call]

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attempt(model, optimizer, loader(1))
    assert open_phases(client) == 0
    train(model, optimizer, loader(2))
    # What the attempt left behind was zeroed unused: its batch is over, not a micro-batch.
    assert calls(client) == per_step(3, optimizer=2)
    assert client.report().totals.train.skipped == 1


def test_a_forward_that_raises_leaves_its_phase(client: torchperfd.Client) -> None:
    once = Once()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()

        def forward(self, inputs: torch.Tensor) -> Any:
            once()
            return self.inner(inputs)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attempt(model, optimizer, loader(1))
    assert open_phases(client) == 0
    train(model, optimizer, loader(2))
    # The loop that failed is over: nothing of it is part of the next.
    assert calls(client) == per_step(2)


class FragileSGD(torch.optim.SGD):
    """An optimizer whose first step fails."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.once = Once()

    def step(self, closure: Any = None) -> Any:
        self.once()
        return super().step(closure)


def test_an_optimizer_that_raises_is_over_with_the_next_draw(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = FragileSGD(model.parameters(), lr=0.1)
    attempt(model, optimizer, loader(1))
    train(model, optimizer, loader(2))
    assert open_phases(client) == 0
    # Its gradients were zeroed unused, so that batch is a step of its own.
    assert calls(client) == per_step(3)
    assert client.report().totals.train.skipped == 1


def test_an_optimizer_that_raises_is_over_without_a_loader_too() -> None:
    model = tiny_model()
    client = torchperfd.attach(model=model)
    optimizer = FragileSGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, 4), torch.ones(2, 2)
    attempt(model, optimizer, [batch])
    train(model, optimizer, [batch] * 3)
    assert open_phases(client) == 0
    counted = calls(client)
    assert (counted["steps"], counted["optimizer"]) == (3, 4)


def test_a_data_set_that_raises_leaves_its_phase(client: torchperfd.Client) -> None:
    once = Once()

    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            once()
            return torch.ones(4), torch.ones(2)

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(Data(), batch_size=2)
    attempt(model, optimizer, batches)
    train(model, optimizer, batches)
    assert open_phases(client) == 0
    assert calls(client) == per_step(2)


# Where we must not look.


def test_another_threads_training_is_not_this_loops(client: torchperfd.Client) -> None:
    mine = tiny_model()
    train(mine, torch.optim.SGD(mine.parameters(), lr=0.1), loader(1))

    def other() -> None:
        model = tiny_model()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
        client.step()
        with client.phase("elsewhere"):
            pass
        list(client.wrap([1, 2]))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    client.finish()
    assert calls(client) == per_step(1)


def test_after_finish_only_the_scripts_calls_are_recorded(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, loader(2))
    client.finish()
    train(model, optimizer, loader(5))
    assert calls(client) == per_step(2)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


# Roots.


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
    links = HookLinks(Iterators(buffer), LoaderSampler(), Compilations(), BackgroundSaves(), WorkerStacks())
    replay = Replay(buffer, 4, faults)
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


# Batches.


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
