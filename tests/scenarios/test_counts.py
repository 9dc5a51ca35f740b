"""Loops of known numbers: steps, samples, micro-batches and validations are what a person would count."""

import copy
import sys
import time
from collections.abc import Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchperfd
from torchperfd.steps.phases import FORWARD


def batches(count: int, size: int = 4, **options: Any) -> DataLoader[Any]:
    inputs = torch.arange(count * size * 4.0).reshape(-1, 4) / 100
    return DataLoader(TensorDataset(inputs, inputs[:, :2].clone()), batch_size=size, **options)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def counted(client: torchperfd.Client) -> tuple[int, int, int, int, int]:
    """Return training steps, their samples and micro-batches, validation steps and their samples."""
    client.finish()
    account = client.report().totals
    train, validate = account.train, account.validate
    assert client.parts.instruments.faults.counts() == {}
    for totals in (train, validate):
        assert sum(phase.ns for phase in totals.phases) == totals.ns
    return train.steps, train.samples, train.micro_batches, validate.steps, validate.samples


def train_seconds(client: torchperfd.Client) -> float:
    return client.report().totals.train.ns / 1e9


# Validation.


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("which", ["inner", "averaged"])
def test_validation_of_another_model_is_no_training(client: torchperfd.Client, mode: str, which: str) -> None:
    class Task(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    model, optimizer = make()
    task = Task(model)
    averaged = copy.deepcopy(model)
    for _ in range(2):
        task.train()
        for batch in batches(5):
            optimizer.zero_grad()
            task(batch).backward()
            optimizer.step()
        task.eval()
        with getattr(torch, mode)():
            for batch in batches(3):
                (model if which == "inner" else averaged)(batch[0])
                time.sleep(0.1)
    assert counted(client) == (10, 40, 10, 6, 24)
    assert train_seconds(client) < 0.5


def train_and_validate_a_part(*, gradients: bool) -> None:
    """Train two epochs; validation calls a part of the model, with gradients or without."""
    model, optimizer = make()
    for _ in range(2):
        model.train()
        for batch in batches(5):
            step(model, optimizer, batch)
        model.eval()
        for batch in batches(3):
            with torch.set_grad_enabled(gradients):
                model.get_submodule("0")(batch[0])


def test_validation_in_evaluation_mode_needs_no_forward(client: torchperfd.Client) -> None:
    """Its forward is no call of the model's: a method, or a framework's own way."""
    train_and_validate_a_part(gradients=False)
    assert counted(client) == (10, 40, 10, 6, 24)


def test_validation_beside_a_model_never_stepped_is_seen(client: torchperfd.Client) -> None:
    """A model of earlier work that is still there, in training mode, with its optimizer."""
    leftover = make()
    train_and_validate_a_part(gradients=True)
    assert counted(client) == (10, 40, 10, 6, 24)
    assert leftover[0].training


def test_validation_within_an_accumulation_leaves_it_whole(client: torchperfd.Client) -> None:
    model, optimizer = make()
    for number, batch in enumerate(batches(8)):
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        if number == 1:
            model.eval()
            with torch.no_grad():
                for other in batches(3):
                    model(other[0])
            model.train()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert counted(client) == (2, 32, 8, 3, 12)


def test_several_validation_loaders_and_a_test_afterwards(client: torchperfd.Client) -> None:
    model, optimizer = make()

    def evaluate(loader: Any) -> None:
        model.eval()
        with torch.inference_mode():
            for batch in loader:
                model(batch[0])
        model.train()

    evaluate(islice(batches(5), 2))  # a sanity check
    for _ in range(2):
        for batch in batches(4):
            step(model, optimizer, batch)
        evaluate(batches(2))
        evaluate(batches(3))
    evaluate(batches(4))
    assert counted(client) == (8, 32, 8, 2 + 10 + 4, 64)


@pytest.mark.parametrize("first", [True, False])
def test_limited_validation_leaves_no_batch_to_training(client: torchperfd.Client, first: bool) -> None:
    """It draws one batch more than it uses, or stops behind the last one that it uses."""
    model, optimizer = make()
    for _ in range(2):
        for batch in batches(4):
            step(model, optimizer, batch)
        with torch.no_grad():
            for number, batch in enumerate(batches(6)):
                if first and number == 3:
                    break
                model(batch[0])
                if not first and number == 2:
                    break
    assert counted(client) == (8, 32, 8, 6, 24)


def test_tests_of_a_loop_without_a_loader_are_validation(client: torchperfd.Client) -> None:
    model, optimizer = make()
    batch = torch.ones(4, 4), torch.ones(4, 2)
    for _ in range(20):
        model.train()
        step(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            model(batch[0])
            time.sleep(0.02)
    steps, _, micro, validated, _ = counted(client)
    assert (steps, micro, validated) == (20, 20, 20)
    assert train_seconds(client) < 0.2
    assert client.report().totals.train.phases[FORWARD].calls == 20


@pytest.mark.parametrize("by_method", [True, False])
def test_acting_of_an_agent_is_no_validation(client: torchperfd.Client, by_method: bool) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, seen: Any) -> Any:
            return self.net(seen)

        def evaluate_actions(self, seen: Any) -> Any:
            return self.net(seen)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters())
    for _ in range(3):
        policy.train(not by_method)
        for _ in range(8):
            with torch.no_grad():
                policy(torch.ones(1, 4))
        policy.train()
        for _ in range(4):
            optimizer.zero_grad()
            (policy.evaluate_actions if by_method else policy)(torch.ones(4, 4)).sum().backward()
            optimizer.step()
    steps, _, _, validated, _ = counted(client)
    assert (steps, validated) == (12, 0)


# One draw, many steps, and batches that are not used.


def test_one_batch_is_trained_on_many_times(client: torchperfd.Client) -> None:
    model, optimizer = make()
    batch = next(iter(batches(5)))
    for _ in range(30):
        step(model, optimizer, batch)
    assert counted(client) == (30, 4, 30, 0, 0)


def test_a_loader_of_chunks_is_cut_up_outside_of_it(client: torchperfd.Client) -> None:
    def cut_up() -> Iterator[Any]:
        for inputs, targets in batches(5, size=16):
            yield from zip(inputs.split(4), targets.split(4), strict=True)

    model, optimizer = make()
    for batch in cut_up():
        step(model, optimizer, batch)
    assert counted(client) == (20, 80, 20, 0, 0)


def test_critic_steps_on_one_draw_are_one_step(client: torchperfd.Client) -> None:
    (generator, of_generator), (critic, of_critic) = make(), make()
    for batch in batches(6):
        for _ in range(3):
            step(critic, of_critic, batch)
        step(generator, of_generator, batch)
    assert counted(client) == (6, 24, 6, 0, 0)


@pytest.mark.parametrize("by_name", [True, False])
def test_loader_read_without_training_is_no_step(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    model, optimizer = make()
    iterator = iter(batches(5))
    next(iterator)
    if by_name:
        monkeypatch.setitem(globals(), "data_iterator", iterator)
    del iterator
    for number, _ in enumerate(batches(5)):
        if number == 2:
            break
    time.sleep(0.3)
    for batch in batches(5):
        step(model, optimizer, batch)
    assert counted(client) == (5, 20, 5, 0, 0)
    assert train_seconds(client) < 0.3


def test_batches_skipped_on_resuming_are_no_samples(client: torchperfd.Client) -> None:
    model, optimizer = make()
    dataset = torch.utils.data.Subset(batches(5).dataset, range(18))
    for number, batch in enumerate(DataLoader(dataset, batch_size=4)):
        if number >= 2:
            step(model, optimizer, batch)
    assert counted(client) == (3, 10, 3, 0, 0)


def test_a_zip_that_draws_once_too_often_counts_what_is_used(client: torchperfd.Client) -> None:
    model, optimizer = make()
    for _ in range(2):
        for batch, _ in zip(batches(8), range(5), strict=False):
            step(model, optimizer, batch)
    assert counted(client) == (10, 40, 10, 0, 0)


@pytest.mark.parametrize("interrupt", [True, False])
def test_a_pause_after_a_loop_left_early_is_no_step(client: torchperfd.Client, interrupt: bool) -> None:
    model, optimizer = make()

    def fit(stop: int) -> None:
        for number, batch in enumerate(batches(6)):
            if number == stop:
                nn.functional.mse_loss(model(batch[0]), batch[1])
                if interrupt:
                    raise KeyboardInterrupt
                break
            step(model, optimizer, batch)

    failure: BaseException | None = None
    try:
        fit(3)
    except KeyboardInterrupt as error:
        failure = error  # keeps the loop's frame, as a notebook does
    time.sleep(0.5)
    fit(99)
    assert (failure is not None) == interrupt
    assert counted(client) == (9, 36, 9, 0, 0)
    assert train_seconds(client) < 0.5


@pytest.mark.parametrize("every", [1, 2])
def test_batches_drawn_ahead_are_all_counted(client: torchperfd.Client, every: int) -> None:
    def ahead() -> Iterator[Any]:
        drawn = None
        for batch in batches(6):
            if drawn is not None:
                yield drawn
            drawn = batch
        yield drawn

    model, optimizer = make()
    for _ in range(2):
        for number, batch in enumerate(ahead()):
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            if number % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
    assert counted(client) == (12 // every, 48, 12, 0, 0)


def test_a_wrapped_loader_or_prefetcher_counts_once(client: torchperfd.Client) -> None:
    model, optimizer = make()
    for batch in client.wrap(batches(5)):
        step(model, optimizer, batch)
    for batch in client.wrap(pair for pair in [*batches(3)]):
        step(model, optimizer, batch)
    assert counted(client) == (8, 32, 8, 0, 0)


# Many optimizers.


def test_every_clients_model_is_seen_from_its_first_forward(client: torchperfd.Client) -> None:
    """Federated learning: 40 copies of a model, each with an optimizer of its own."""
    model, _ = make()
    for _ in range(40):
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
        for batch in batches(3):
            step(local, optimizer, batch)
    assert counted(client) == (120, 480, 120, 0, 0)
    assert client.report().totals.train.phases[FORWARD].calls == 120


def test_sums_of_gradients_kept_elsewhere_are_not_thrown_away(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Opacus keeps them: every micro-batch zeroes its gradients, and only the last one's step is real."""
    monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))
    model, optimizer = make()
    for number, batch in enumerate(batches(8)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.summed_grad = None if number % 4 == 3 else parameter.grad  # type: ignore[attr-defined]
        if number % 4 == 3:
            optimizer.step()
    assert counted(client) == (2, 32, 8, 0, 0)
    assert client.report().totals.train.skipped == 0
