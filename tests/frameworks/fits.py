"""What every fit is made of, and what is read off the client afterwards."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchperfd

torch.set_num_threads(1)

BATCH = 4
FEATURES = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


def dataset(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(batches * BATCH, FEATURES, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loader(batches: int, **options: Any) -> "DataLoader[Any]":
    return DataLoader(dataset(batches), batch_size=BATCH, **options)


class NoDataLoader:
    """Feeds a loop, and is none of torch's."""

    def __init__(self, batches: int) -> None:
        self._batches = list(loader(batches))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def calls(client: torchperfd.Client | None, kind: str = "train") -> dict[str, int]:
    """Return how often each phase occurred, and ``steps``; phases must sum to the steps exactly."""
    assert client is not None
    report = client.report()
    account = getattr(report.totals, kind)
    assert sum(phase.ns for phase in account.phases) == account.ns
    seen = {
        report.names.name(slot): phase.calls
        for slot, phase in enumerate(account.phases[: len(report.names)])
        if phase.calls
    }
    return {"steps": account.steps, **seen}


def samples(client: torchperfd.Client | None, kind: str = "train") -> int:
    assert client is not None
    count: int = getattr(client.report().totals, kind).samples
    return count


def faults(client: torchperfd.Client | None) -> dict[str, int]:
    assert client is not None
    return client.parts.instruments.faults.counts()


def assert_has(seen: dict[str, int], **wanted: int) -> None:
    assert {name: seen.get(name, 0) for name in wanted} == wanted
