"""The hooks on real loops: exact counts of what torch did, whatever shape the script has."""

import threading
from typing import Any

import pytest
import torch
from tests.unit.client.training import calls, evaluate, loader, open_phases, per_step, tiny_model, train
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import torchperfd
from torchperfd.events import Forward


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
