"""Scenarios run alone, too, and their loop's events are written down."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.scenarios.spy import Events, spy_on_loops
from tests.unit.client.conftest import alone

import torchperfd

__all__ = ["alone"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What happens to every loop that is made from here on."""
    return spy_on_loops(monkeypatch)


@pytest.fixture(scope="session")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have gloo make what it keeps for as long as the process lives: a socket that it listens on."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def group(gloo: None, tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()
    gc.collect()


@pytest.fixture
def client(alone: None, events: Events) -> Iterator[torchperfd.Client]:
    """An attached client without faults, before and after."""
    gc.collect()  # models and optimizers of an earlier test, in cycles, would be taken for the loop's
    client = torchperfd.attach()
    yield client
    assert client.parts.instruments.faults.counts() == {}
