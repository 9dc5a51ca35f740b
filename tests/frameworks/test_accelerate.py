from typing import Any

import pytest
import torch
from tests.frameworks.fits import BATCH, assert_has, calls, faults, loader, model, samples
from torch import nn

import torchperfd

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

TRAIN, VALIDATE, EPOCHS = 6, 3, 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_automatic_hooks_see_a_loop_with_accelerate(accumulate: int) -> None:
    client = torchperfd.attach()
    losses = fit(accumulate)
    client.finish()
    batches, validated = EPOCHS * TRAIN, EPOCHS * VALIDATE
    steps = batches // accumulate
    assert_has(calls(client), steps=steps, forward=batches, backward=batches, optimizer=steps)
    assert_has(calls(client, "validate"), steps=validated, forward=validated, backward=0, optimizer=0)
    assert samples(client) == batches * BATCH
    assert faults(client) == {}
    client.detach()
    assert fit(accumulate) == losses


class PlainTrainer:
    """What people write by hand: a Trainer class of their own."""

    def __init__(self) -> None:
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[float] = []

    def fit(self, train: Any, validate: Any, epochs: int) -> None:
        for _ in range(epochs):
            self.model.train()
            for batch in train:
                self._train_step(*batch)
            self.model.eval()
            with torch.no_grad():
                for inputs, targets in validate:
                    self.losses.append(nn.functional.cross_entropy(self.model(inputs), targets).item())

    def _train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def test_the_automatic_hooks_see_a_trainer_written_by_hand() -> None:
    client = torchperfd.attach()
    PlainTrainer().fit(loader(TRAIN), loader(VALIDATE), EPOCHS)
    client.finish()
    steps, validated = EPOCHS * TRAIN, EPOCHS * VALIDATE
    train = calls(client)
    assert_has(train, steps=steps, data=steps, forward=steps, backward=steps, optimizer=steps)
    assert_has(train, zero_grad=steps)
    assert_has(calls(client, "validate"), steps=validated, data=validated, forward=validated)
    assert samples(client) == steps * BATCH


def fit(accumulate: int) -> list[float]:
    losses = []
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net, optimizer, train, validate = accelerator.prepare(net, optimizer, loader(TRAIN), loader(VALIDATE))
    for _ in range(EPOCHS):
        net.train()
        for inputs, targets in train:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        net.eval()
        for inputs, targets in validate:
            with torch.no_grad():
                predictions = net(inputs)
            accelerator.gather_for_metrics((predictions, targets))
    return losses
