"""Training that takes a millisecond: real torch, tiny models."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchperfd

torch.set_num_threads(1)


def tiny_model(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def tiny_training() -> tuple[nn.Module, torch.optim.SGD]:
    """Return a tiny model and its optimizer."""
    model = tiny_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loader(batches: int = 3, batch_size: int = 2, **options: Any) -> "DataLoader[Any]":
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batches * batch_size, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2]), batch_size=batch_size, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    """Run a plain loop; return the losses."""
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module, batches: Iterable[Any]) -> None:
    model.eval()
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)
    model.train()


def calls(client: torchperfd.Client, kind: str = "train") -> dict[str, int]:
    """Return how often each phase occurred, and ``steps``."""
    totals = client.report().to_dict()[kind]
    return {"steps": totals["steps"], **{name: phase["calls"] for name, phase in totals["phases"].items()}}


def open_phases(client: torchperfd.Client) -> int:
    """Return how deep phases are nested after all that has happened so far."""
    client.report()
    return client.parts.instruments.replay.recorder.depth


def per_step(steps: int, **other: int) -> dict[str, int]:
    """Return the calls of a plain loop, with what differs from one of each per step."""
    phases = ("steps", "data", "forward", "loss", "backward", "optimizer", "zero_grad", "other")
    return {**dict.fromkeys(phases, steps), **other}
