"""Waits of functional collectives: counted where the training thread waits, and never in compiled graphs."""

import json
import subprocess
import sys
from typing import Any

import pytest

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
