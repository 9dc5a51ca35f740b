"""Two ranks on gloo: each has its own account, in step with the other's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import node
from tests.support.node import Node, torchrun
from tests.unit.client.training import per_step

pytestmark = pytest.mark.slow

__all__ = ["node"]

COMMON = """
import json, os, sys, time, torch, torch.distributed as dist, torchperfd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
client = torchperfd.attach()
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(128, 32), torch.randint(0, 4, (128,)))
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

def run(model, optimizer, batches):
    iterator = iter(batches)
    began = ended = time.perf_counter()
    for inputs, targets in iterator:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        time.sleep(0.01)
        ended = time.perf_counter()
    return ended - began

def report(model, optimizer):
    run(model, optimizer, DataLoader(data, batch_size=64))
    before = client.report().totals.train
    watched = run(model, optimizer, DataLoader(data, batch_size=4))
    train = client.report().totals.train.minus(before)
    names = client.parts.instruments.names
    calls = {names.name(slot): train.phases[slot].calls for slot in range(len(names))}
    with open(f"{sys.argv[1]}/rank{dist.get_rank()}.json", "w") as file:
        json.dump({
            "calls": {"steps": train.steps, **{name: count for name, count in calls.items() if count}},
            "adds up": sum(phase.ns for phase in train.phases) == train.ns,
            "ratio": train.ns / 1e9 / watched, "samples": train.samples,
            "faults": client.parts.instruments.faults.counts(),
        }, file)
    dist.destroy_process_group()
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
report(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""

FSDP2 = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
report(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(kind: str, node: Node, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(COMMON + {"ddp": DDP, "fsdp2": FSDP2}[kind])
    command = [
        *torchrun(2),
        *(str(script), str(tmp_path)),
    ]
    with node.running(*command, PYTHONPATH=os.environ.get("PYTHONPATH", "")) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    for rank in range(2):
        reported: dict[str, Any] = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert reported["faults"] == {}
        assert reported["adds up"]
        # One reduction; or two layers, each gathered twice and scattered once, issued and waited for.
        assert reported["calls"] == per_step(32, collective_wait=32 * {"ddp": 1, "fsdp2": 12}[kind])
        assert reported["samples"] == 128
        assert reported["ratio"] == pytest.approx(1, abs=0.02)
