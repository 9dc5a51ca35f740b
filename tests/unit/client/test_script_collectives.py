"""Collectives that the script starts itself, on one process: which count, and at which lines."""

import sys
from collections.abc import Iterator
from time import perf_counter_ns

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchperfd
from torchperfd.client import Client
from torchperfd.hooks.script_collectives import ScriptCollectives
from torchperfd.model.source_lines import TimedLine


@pytest.fixture
def client() -> Iterator[Client]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    client = torchperfd.attach()
    try:
        yield client
    finally:
        client.detach()
        dist.destroy_process_group()


def own_lines(client: Client) -> tuple[TimedLine, ...]:
    return client.parts.instruments.script_collectives.longest()


def test_collectives_of_metrics_count_at_their_line(client: Client) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(8, 4)).sum()
        loss.backward()
        optimizer.step()
        for _ in range(4):
            dist.all_reduce(loss.detach().clone())
        work = dist.all_reduce(loss.detach().clone(), async_op=True)
        assert work is not None
        work.wait()
    number = sys._getframe().f_lineno - 4
    lines = {line.line: line for line in own_lines(client)}
    assert (lines[number].call, lines[number].calls) == ("all_reduce", 12)
    assert (lines[number + 1].call, lines[number + 1].calls) == ("all_reduce", 3)
    assert {each.file for each in lines.values()} == {__file__}
    assert all(each.ns > 0 for each in lines.values())
    assert lines.keys() <= {number, number + 1, number + 3}


def test_gradients_averaged_by_hand_do_not_count(client: Client) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        flat = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        dist.all_reduce(flat)
        optimizer.step()
    # The models are known from the optimizer's first step on.
    assert all(line.calls <= 2 for line in own_lines(client))


def test_large_and_inner_collectives_do_not_count(client: Client) -> None:
    class Split(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(inputs)
            return inputs

    for _ in range(3):
        Split()(torch.zeros(4))
        dist.all_reduce(torch.zeros(1 << 20))
        dist.barrier()
    (line,) = own_lines(client)
    assert (line.call, line.calls) == ("barrier", 3)


def test_lines_are_bounded() -> None:
    collectives = ScriptCollectives()

    def method(name: str) -> None:
        collectives.note(name, (), perf_counter_ns())

    for number in range(1000):
        exec(f"def at_{number}(method): method('barrier')\nat_{number}(method)", {}, {"method": method})
    assert len(collectives.longest()) == 8
    collectives.note("barrier", (), perf_counter_ns() - 10**12)
    # There is no room for another line, however long it takes.
    assert all(line.ns < 10**12 for line in collectives.longest())
