"""When gradients were ready is read where torch's own reducer has it in memory."""

import ctypes
import itertools
import os
from typing import Any

import pytest
import torch
from tests.unit.client.training import calls, loader, train
from torch import nn
from torch._C._distributed_c10d import Reducer
from torch.nn.parallel import DistributedDataParallel

import torchperfd
from torchperfd.hooks.backward_stats import find_stats
from torchperfd.tape import NATIVE

pytestmark = pytest.mark.usefixtures("group")


def model(layers: int, bias: bool = True) -> DistributedDataParallel:
    """A model of so many layers."""
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4, bias=bias) for _ in range(layers))))


def read(address: int) -> list[int]:
    """Return the numbers of a vector."""
    begin, end = (ctypes.c_int64 * 2).from_address(address)
    return list((ctypes.c_int64 * ((end - begin) // 8)).from_address(begin))


@pytest.mark.parametrize(("layers", "bias"), [(1, False), (3, True), (200, True)])
def test_it_is_found_once_there_has_been_a_backward_and_stays_there(layers: int, bias: bool) -> None:
    trained = model(layers, bias)
    reducer = trained.reducer
    assert find_stats(reducer) is None
    found, said = set(), []
    for _ in range(5):
        trained(torch.ones(2, 4)).sum().backward()
        address = find_stats(reducer)
        assert address is not None
        assert read(address) == reducer.get_backward_stats()
        found.add(address)
        said.append(read(address))
    assert len(found) == 1
    assert all(one != other for one, other in itertools.pairwise(said))
    assert len(said[0]) == layers * (1 + bias)


def test_each_reducer_has_its_own() -> None:
    models = [model(2) for _ in range(3)]
    for trained in models:
        trained(torch.ones(2, 4)).sum().backward()
    addresses = [find_stats(trained.reducer) for trained in models]
    assert len(set(addresses)) == 3
    assert None not in addresses


class Said:
    """No reducer: of torch it has nothing but what it says."""

    def __init__(self, said: list[int]) -> None:
        self.said = said

    def get_backward_stats(self) -> list[int]:
        """Say it."""
        return self.said


class SaidInSlots:
    """The same, with a number in the place of an address."""

    __slots__ = ("said",)

    get_backward_stats = Said.get_backward_stats

    def __init__(self, said: list[int]) -> None:
        self.said = said


@pytest.mark.parametrize("kind", [Said, SaidInSlots])
@pytest.mark.parametrize("said", [[], [0, 0], [5], [1, 2, 3]])
def test_nothing_is_found_in_what_is_no_reducer(kind: Any, said: list[int]) -> None:
    assert find_stats(kind(said)) is None


def test_nothing_is_found_where_memory_must_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model(1)
    trained(torch.ones(2, 4)).sum().backward()

    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert find_stats(trained.reducer) is None


def test_no_descriptor_is_left_open() -> None:
    trained = model(1)
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        find_stats(trained.reducer)
        trained(torch.ones(2, 4)).sum().backward()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not NATIVE, reason="only the compiled tape reads it")
def test_training_asks_a_reducer_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch, client: torchperfd.Client
) -> None:
    asked, original = 0, Reducer.get_backward_stats

    def count(self: Reducer) -> list[int]:
        nonlocal asked
        asked += 1
        return original(self)

    monkeypatch.setattr(Reducer, "get_backward_stats", count)
    trained = DistributedDataParallel(nn.Linear(4, 2))
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1), loader(40))
    assert asked == 5  # the first time twice, and then it is compared
    assert calls(client)["collective_wait"] == 40
