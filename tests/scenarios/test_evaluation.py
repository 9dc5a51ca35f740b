"""Evaluations that nothing announces, sampling between steps, and steps of which a part is out of sight."""

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchperfd


def batches(count: int, size: int = 4) -> DataLoader[Any]:
    inputs = torch.arange(count * size * 4.0).reshape(-1, 4) / 100
    return DataLoader(TensorDataset(inputs, inputs[:, :2].clone()), batch_size=size)


class Net(nn.Module):
    """A model that can also sample, by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.body = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.body(self.frozen(inputs))

    @torch.inference_mode()
    def sample(self, pause: float) -> None:
        self.forward(torch.zeros(1, 4))
        time.sleep(pause)


class Wrapper(nn.Module):
    """Holds a model, as wrappers for parallel training do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.module(inputs)


def make(*, wrapped: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    model = Net()
    return Wrapper(model) if wrapped else model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def counted(client: torchperfd.Client) -> tuple[int, int, int, int]:
    """Return training steps, their samples, validation steps and their samples."""
    client.finish()
    totals = client.report().totals
    for kind in (totals.train, totals.validate):
        assert sum(phase.ns for phase in kind.phases) == kind.ns
    return totals.train.steps, totals.train.samples, totals.validate.steps, totals.validate.samples


def train_seconds(client: torchperfd.Client) -> float:
    return client.report().totals.train.ns / 1e9


@pytest.mark.parametrize("place", ["before", "after", "between"])
def test_test_in_training_mode_is_validation(client: torchperfd.Client, place: str) -> None:
    model, optimizer = make()

    def evaluate() -> None:
        for inputs, targets in batches(3, size=2):
            float((model(inputs) - targets).abs().sum())
            time.sleep(0.05)

    for _ in range(2):
        for number, batch in enumerate(batches(6)):
            if place == "before" and number == 3:
                evaluate()
            step(model, optimizer, batch)
            if place == "after" and number == 3:
                evaluate()
        if place == "between":
            evaluate()
    assert counted(client) == (12, 48, 6, 12)
    assert train_seconds(client) < 0.25


@pytest.mark.parametrize("wrapped", [True, False])
def test_sampling_between_steps_is_no_training(client: torchperfd.Client, wrapped: bool) -> None:
    model, optimizer = make(wrapped=wrapped)
    inner = model.module if wrapped else model
    inputs, targets = torch.ones(4, 4), torch.ones(4, 2)
    for number in range(20):
        if number % 5 == 0:
            inner.eval()
            inner.sample(0.2)
            inner.train()
        step(model, optimizer, (inputs, targets))
    assert counted(client)[::2] == (20, 0)
    assert train_seconds(client) < 0.3


def test_frozen_part_in_evaluation_mode_is_training(client: torchperfd.Client) -> None:
    """Its statistics must not move, while the whole trains."""
    model, optimizer = make()
    inputs, targets = torch.ones(4, 4), torch.ones(4, 2)
    for _ in range(5):
        model.train()
        model.frozen.eval()
        time.sleep(0.05)
        step(model, optimizer, (inputs, targets))
    assert counted(client)[::2] == (5, 0)
    assert train_seconds(client) > 0.2


def test_evaluation_ahead_of_training_is_validation(client: torchperfd.Client) -> None:
    model, optimizer = make()
    inputs, targets = torch.ones(4, 4), torch.ones(4, 2)
    for number in range(8):
        if number % 4 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(inputs)
                    time.sleep(0.05)
            model.train()
        step(model, optimizer, (inputs, targets))
    assert counted(client)[::2] == (8, 6)
    assert train_seconds(client) < 0.3


def test_train_is_torchs_own_while_nothing_evaluates(client: torchperfd.Client) -> None:
    """``Module.train`` calls itself for every module within."""
    original = vars(nn.Module)["train"]
    model, optimizer = make()
    step(model, optimizer, (torch.ones(4, 4), torch.ones(4, 2)))
    model.eval()
    assert vars(nn.Module)["train"] is not original
    model.train()
    assert model.body.training
    assert vars(nn.Module)["train"] is original
    model.eval()
    client.detach()
    assert vars(nn.Module)["train"] is original
    assert not model.body.training


def test_modules_in_a_dict_have_their_forward_seen(client: torchperfd.Client) -> None:
    models = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)}
    optimizer = torch.optim.SGD([each for model in models.values() for each in model.parameters()], lr=0.01)
    for inputs, targets in batches(5):
        optimizer.zero_grad()
        output = models["second"](models["first"](inputs))
        nn.functional.mse_loss(output, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert counted(client) == (5, 20, 0, 0)
    assert "forward: not seen" not in client.report().to_text()


def train_functionally(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (inputs,)), targets)

    for inputs, targets in batches(5):
        gradients = torch.func.grad(loss)(parameters, inputs, targets)
        if optimizer is None:
            parameters = {name: each - 0.01 * gradients[name] for name, each in parameters.items()}
            continue
        for name, each in model.named_parameters():
            each.grad = gradients[name].detach()
        optimizer.step()


def test_functional_gradients_have_steps_and_samples(client: torchperfd.Client) -> None:
    train_functionally(*reversed(make()))
    assert counted(client) == (5, 20, 0, 0)


def test_functional_training_gets_advice_on_steps(client: torchperfd.Client) -> None:
    train_functionally(None, make()[0])
    assert counted(client) == (0, 0, 0, 0)
    assert "client.step(samples=...)" in client.advice


def test_model_of_methods_is_reported_as_unseen(client: torchperfd.Client) -> None:
    model, optimizer = make()
    for inputs, targets in batches(5):
        optimizer.zero_grad()
        output = model.body(model.frozen(inputs))
        nn.functional.mse_loss(output, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert counted(client) == (5, 20, 0, 0)
    assert "forward: not seen" in client.report().to_text()
