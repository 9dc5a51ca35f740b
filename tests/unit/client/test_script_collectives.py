"""Collectives that the script starts itself, and functional ones."""

import json
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchperfd
from torchperfd.client import Client
from torchperfd.hooks.line_times import ScriptCollectives
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
    return client.parts.instruments.hooks.links.script_collectives.longest()


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


_SCRIPT = """
import json, sys
{first}
import torch
import torch.distributed as dist
import torchperfd

name = "torch.distributed._functional_collectives"
client = torchperfd.attach()
imported = name in sys.modules
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
followed = functional.wait_tensor
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def reduced(values):
    return functional.wait_tensor(functional.all_reduce(values, "sum", dist.group.WORLD)) + 1

compiled = torch.compile(reduced, fullgraph=True, backend="eager")
for _ in range(3):
    optimizer.zero_grad()
    out = model(torch.ones(1, 2))
    reduced(out.detach())
    compiled(out.detach())
    out.sum().backward()
    optimizer.step()
from torch._dynamo.utils import counters

totals = client.report().totals
waits = totals.train.phases[client.parts.instruments.names.slot("collective_wait")].calls
client.detach()
print(json.dumps({{
    "imported": imported,
    "waits": waits,
    "graphs": counters["stats"]["unique_graphs"],
    "breaks": sum(counters["graph_break"].values()),
    "restored": functional.wait_tensor is not followed and functional.wait_tensor is followed.__wrapped__,
}}))
"""


def outcome(first: str) -> dict[str, Any]:
    script = _SCRIPT.format(first=first)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    ("first", "imported"),
    [("", False), ("import torch.distributed._functional_collectives", True)],
    ids=["imported after us", "imported before us"],
)
def test_functional_waits_are_counted_and_add_no_graph_break(first: str, imported: bool) -> None:
    found = outcome(first)
    assert found == {"imported": imported, "waits": 3, "graphs": 1, "breaks": 0, "restored": True}
