"""Loops of every shape, with real torch: the hooks' calls, the counts, and the times."""

import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.scenarios.accounts import PAUSE_S, Watch, assert_accounted, calls, train_tallies
from tests.scenarios.spy import Events
from tests.unit.client.training import loader, open_phases, per_step, tiny_model, tiny_training
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchperfd

BATCH = torch.ones(2, 4), torch.ones(2, 2)
STEPS = 30


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.01)


def loss_of(model: nn.Module, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# Plain.


def test_plain(client: torchperfd.Client, events: Events) -> None:
    model, optimizer = tiny_training()
    for batch in loader(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    step = "data() zero() forward() backward() optimizer()"
    assert events.take() == f"{step} {step} data(end)"
    assert calls(client) == per_step(2)
    assert train_tallies(client) == (2, 0)


def test_plain_takes_as_long_as_the_script_says(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()

    def run(watch: Watch) -> None:
        for batch in watch.over(loader(STEPS)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            time.sleep(PAUSE_S)
        for batch in watch.over(loader(STEPS // 2)):
            with torch.no_grad():
                loss_of(model, batch)
            time.sleep(PAUSE_S)

    assert_accounted(client, run)


def test_training_validation_and_training_again(client: torchperfd.Client, events: Events) -> None:
    model, optimizer = tiny_training()
    for _ in range(2):
        for batch in loader(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in loader(3):
                loss_of(model, batch)
        model.train()
    step = "data() zero() forward() backward() optimizer()"
    epoch = f"{step} {step} data(end) {'data() evaluate() ' * 3}data(end)"
    assert events.take() == f"{epoch} {epoch}"
    assert calls(client) == per_step(4)
    assert calls(client, "validate") == {"steps": 6, "data": 6, "forward": 6, "loss": 6, "other": 6}


# Accumulation, and batches that come to nothing.


def test_accumulation(client: torchperfd.Client, events: Events) -> None:
    model, optimizer = tiny_training()
    for number, batch in enumerate(loader(8)):
        loss_of(model, batch).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    micro = "data() forward() backward() "
    assert events.take() == f"{micro * 4}optimizer() zero() " * 2 + "data(end)"
    assert calls(client) == per_step(2, data=8, forward=8, loss=8, backward=8)
    assert train_tallies(client) == (8, 0)


def test_accumulation_takes_as_long_as_the_script_says(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()

    def run(watch: Watch) -> None:
        for number, batch in enumerate(watch.over(loader(STEPS))):
            loss_of(model, batch).backward()
            time.sleep(PAUSE_S)
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    assert_accounted(client, run)


def test_leftover_micro_batches_join_next_epoch_without_pauses(
    client: torchperfd.Client,
) -> None:
    model, optimizer = tiny_training()
    number = 0
    for _ in range(2):
        for batch in loader(3):
            loss_of(model, batch).backward()
            number += 1
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for batch in loader(2):
                loss_of(model, batch)
        time.sleep(0.5)
    assert calls(client) == per_step(3, data=6, forward=6, loss=6, backward=6)
    assert calls(client, "validate")["steps"] == 4
    assert client.report().totals.train.ns < 0.5e9
    assert train_tallies(client) == (6, 0)


def scaled(model: nn.Module, batches: Any, bad: set[int]) -> None:
    """Train with a scaler; the batches whose numbers are bad have infinite gradients."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (float("inf") if number in bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_steps_that_a_scaler_skips_are_steps_and_counted(client: torchperfd.Client, events: Events) -> None:
    scaled(tiny_model(), loader(4), bad={0, 2})
    begin = "data() zero() forward() backward() "
    assert events.take() == (f"{begin}optimizer(called off) {begin}optimizer(optimizer()) " * 2 + "data(end)")
    # The scaler's unscaling and its look for infinities are the optimizer's time.
    assert calls(client) == per_step(4)
    assert train_tallies(client) == (4, 2)


def test_steps_that_a_scaler_skips_without_a_loader(client: torchperfd.Client) -> None:
    model = tiny_model()
    torchperfd.attach(model=model)
    scaled(model, [BATCH] * 6, bad={0, 1, 4})
    client.finish()
    assert calls(client)["steps"] == 6
    assert train_tallies(client) == (6, 3)


def test_a_disabled_scaler_changes_nothing(client: torchperfd.Client, events: Events) -> None:
    model, optimizer = tiny_training()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for batch in loader(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert calls(client) == per_step(3)
    assert train_tallies(client) == (3, 0)


def test_a_scaler_that_is_called_wrongly_leaves_its_phase(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    scaler = torch.amp.GradScaler("cpu")
    for batch in loader(3):
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        scaler.update()
        assert open_phases(client) == 0
    assert calls(client)["steps"] == 3


@pytest.mark.parametrize("at_once", [True, False])
def test_batches_that_the_script_skips(client: torchperfd.Client, at_once: bool) -> None:
    """It throws their gradients away, at once or ahead of the next batch."""
    model, optimizer = tiny_training()
    for number, batch in enumerate(loader(6)):
        if not at_once:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        if number % 3 != 1:
            optimizer.step()
        if at_once:
            optimizer.zero_grad()
    assert calls(client) == per_step(6, optimizer=4)
    assert train_tallies(client) == (6, 2)


# Optimizers.


def test_a_closure(client: torchperfd.Client, events: Events) -> None:
    model = tiny_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, max_eval=2)
    for batch in loader(2):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    step = "data() optimizer(zero() forward() backward() zero() forward() backward())"
    assert events.take() == f"{step} {step} data(end)"
    expected = per_step(2, forward=4, backward=4, zero_grad=4)
    del expected["loss"]  # in the closure, that is the optimizer's time
    assert calls(client) == expected
    assert train_tallies(client) == (2, 0)


def test_a_closure_that_draws(client: torchperfd.Client, events: Events) -> None:
    """Full-batch LBFGS."""
    model = tiny_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, max_eval=2)

    def closure() -> Any:
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in loader(2):
            loss = loss_of(model, batch)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    evaluation = "zero() data() forward() backward() data() forward() backward() data(end)"
    assert events.take().endswith(f"optimizer({evaluation} {evaluation})")
    counted = calls(client)
    assert (counted["steps"], counted["optimizer"], counted["data"]) == (3, 3, 18)
    assert open_phases(client) == 0


def gan(batches: Any, *, sample_without_gradients: bool = False) -> None:
    """Train a generator and a critic on each batch."""
    generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    of_generator, of_critic = sgd(generator), sgd(critic)
    for inputs, targets in batches:
        of_critic.zero_grad()
        (critic(targets).mean() - critic(generator(inputs).detach()).mean()).backward()
        of_critic.step()
        if sample_without_gradients:
            with torch.no_grad():
                generator(inputs)
        of_generator.zero_grad()
        critic(generator(inputs)).mean().backward()
        of_generator.step()
        time.sleep(PAUSE_S)


def test_two_optimizers_are_one_step_per_batch(client: torchperfd.Client, events: Events) -> None:
    gan(loader(3))
    of_critic = "zero() forward() forward() forward() backward() optimizer()"
    of_generator = "zero() forward() forward() backward() optimizer()"
    assert events.take() == f"data() {of_critic} {of_generator} " * 3 + "data(end)"
    assert calls(client) == per_step(3, forward=15, loss=15, backward=6, optimizer=6, zero_grad=6)
    assert train_tallies(client) == (3, 0)


def test_two_optimizers_without_loader_are_one_step_per_batch(client: torchperfd.Client) -> None:
    gan([BATCH] * 5)
    counted = calls(client)
    assert (counted["steps"], counted["backward"], counted["optimizer"]) == (5, 10, 10)
    assert train_tallies(client) == (5, 0)


def test_forward_without_gradients_within_batch_is_no_validation(
    client: torchperfd.Client,
) -> None:
    gan(loader(3), sample_without_gradients=True)
    assert calls(client) == per_step(3, forward=18, loss=15, backward=6, optimizer=6, zero_grad=6)
    assert calls(client, "validate") == {"steps": 0}


@pytest.mark.parametrize("drawn", [True, False])
def test_two_optimizers_take_as_long_as_the_script_says(client: torchperfd.Client, drawn: bool) -> None:
    def run(watch: Watch) -> None:
        gan(watch.over(loader(STEPS) if drawn else [BATCH] * STEPS))

    assert_accounted(client, run, has_loader=drawn)


def test_several_critic_steps_per_generator_step(client: torchperfd.Client) -> None:
    """Without a loader, an optimizer that steps again has begun another step.

    The critic's ends it; the generator's belongs to the critic's step before.
    """
    generator, critic = sgd(nn.Linear(4, 2)), sgd(nn.Linear(2, 1))
    for _ in range(4):
        for _ in range(3):
            critic.step()
        generator.step()
    client.finish()
    assert calls(client)["steps"] == 12
    assert calls(client)["optimizer"] == 16


def in_backward(model: nn.Module) -> None:
    """Give each parameter an optimizer that steps once its gradient is there."""
    optimizers = {each: torch.optim.SGD([each], lr=0.01) for each in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("drawn", [True, False])
def test_optimizers_in_the_backward(client: torchperfd.Client, events: Events, drawn: bool) -> None:
    model = tiny_model()
    torchperfd.attach(model=model)
    in_backward(model)
    for batch in loader(3) if drawn else [BATCH] * 3:
        loss_of(model, batch).backward()
    within = " ".join(["optimizer() zero()"] * 4)
    step = f"{'data() ' if drawn else ''}forward() backward({within})"
    assert events.take() == " ".join([step] * 3 + ["data(end)"] * drawn)
    client.finish()
    counted = calls(client)
    assert (counted["steps"], counted["forward"], counted["backward"]) == (3, 3, 3)
    assert (counted["optimizer"], counted["zero_grad"]) == (12, 12)
    assert train_tallies(client) == (3, 0)


def test_optimizers_in_backward_have_the_scripts_durations(client: torchperfd.Client) -> None:
    model = tiny_model()
    in_backward(model)

    def run(watch: Watch) -> None:
        for batch in watch.over(loader(STEPS)):
            loss_of(model, batch).backward()
            time.sleep(PAUSE_S)

    assert_accounted(client, run)


# Activation checkpointing.


class Checkpointed(nn.Module):
    """Computes its blocks again in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
        self._reentrant = reentrant

    def forward(self, inputs: Any) -> Any:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=self._reentrant)
        return inputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(client: torchperfd.Client, events: Events, reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    optimizer = sgd(model)
    for inputs, targets in loader(3):
        optimizer.zero_grad()
        loss_of(model, (inputs.requires_grad_(), targets)).backward()
        optimizer.step()
    # A reentrant one goes backward within the backward, once per block: still one call.
    nested = "backward() backward()" if reentrant else ""
    assert events.take() == f"data() zero() forward() backward({nested}) optimizer() " * 3 + "data(end)"
    assert calls(client) == per_step(3)
    assert train_tallies(client) == (3, 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_checkpointed_as_a_whole(
    client: torchperfd.Client, events: Events, reentrant: bool
) -> None:
    model, optimizer = tiny_training()
    for inputs, targets in loader(3):
        optimizer.zero_grad()
        outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
        nn.functional.mse_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    # The reentrant kind computes forward without gradients, and with them in the backward. The
    # other kind stops computing as soon as it has what it needs, with an exception.
    first, again = ("evaluate()", "forward() backward()") if reentrant else ("forward()", "forward()")
    assert events.take() == f"data() zero() {first} backward({again}) optimizer() " * 3 + "data(end)"
    expected = per_step(3, forward=6)
    if reentrant:
        del expected["loss"]  # as far as is seen, the first forward is no part of what is trained
    assert calls(client) == expected
    assert calls(client, "validate") == {"steps": 0}


# Loaders.


def test_two_loaders_side_by_side(client: torchperfd.Client, events: Events) -> None:
    model, optimizer = tiny_training()
    for batch, _ in zip(loader(3), loader(5), strict=False):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert events.take() == "data() data() zero() forward() backward() optimizer() " * 3 + "data(end)"
    assert calls(client) == per_step(3, data=6)
    assert train_tallies(client) == (3, 0)


def test_a_short_loader_that_starts_over_beside_a_long_one(client: torchperfd.Client) -> None:
    def again_and_again() -> Iterator[Any]:
        while True:
            yield from loader(2)

    model, optimizer = tiny_training()
    for batch, _ in zip(loader(5), again_and_again(), strict=False):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    counted = calls(client)
    assert (counted["steps"], counted["forward"], counted["optimizer"]) == (5, 5, 5)
    assert counted["data"] == 5 + 5 + 2  # the short one has ended twice, in the middle of a step


def test_a_cycle_remembers_its_batches(client: torchperfd.Client) -> None:
    """Once round, nothing is drawn: the rest of the loop is followed by its optimizer."""
    model, optimizer = tiny_training()
    for batch, _ in zip(cycle(loader(3)), range(8), strict=False):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    counted = calls(client)
    assert (counted["steps"], counted["forward"], counted["backward"]) == (8, 8, 8)


def test_a_loader_within_a_loop_over_another(client: torchperfd.Client) -> None:
    """Tasks, and the batches of each."""
    model, optimizer = tiny_training()
    for _ in loader(2):
        for batch in loader(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert calls(client) == per_step(6, data=6 + 2)


def test_a_loop_over_something_else(client: torchperfd.Client, events: Events) -> None:
    model, optimizer = tiny_training()
    torchperfd.attach(model=model)
    for batch in client.wrap([BATCH] * 3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert events.take() == "data() zero() forward() backward() optimizer() " * 3 + "data(end)"
    assert calls(client) == per_step(3)


@pytest.mark.parametrize("wrapped", [True, False])
def test_loop_over_other_iterable_has_the_scripts_durations(client: torchperfd.Client, wrapped: bool) -> None:
    model, optimizer = tiny_training()

    def run(watch: Watch) -> None:
        for batch in watch.over(client.wrap([BATCH] * STEPS) if wrapped else [BATCH] * STEPS):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            time.sleep(PAUSE_S)
            optimizer.step()

    assert_accounted(client, run, has_loader=wrapped)


# When and how often.


def test_attaching_late(events: Events) -> None:
    model, optimizer = tiny_training()
    for number, batch in enumerate(loader(6)):
        if number == 2:
            client = torchperfd.attach()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if number == 3:
            assert torchperfd.attach(model=model) is client
        optimizer.step()
    # The batch in hand when we came had been drawn, and its model was not known yet.
    plain = "data() zero() forward() backward() optimizer()"
    assert events.take() == f"zero() backward() optimizer() {plain} {plain} {plain} data(end)"
    assert calls(client) == per_step(4, data=3, forward=3, loss=3)


def test_attaching_between_a_backward_and_its_optimizer() -> None:
    model, optimizer = tiny_training()
    for number, batch in enumerate(loader(4)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if number == 1:
            client = torchperfd.attach()
        optimizer.step()
    assert calls(client) == per_step(3, data=2, zero_grad=2, forward=2, loss=2, backward=2)
