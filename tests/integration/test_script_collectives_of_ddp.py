"""Real ranks: collectives that the script starts itself, beside those of DDP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS = 20

DDP_SCRIPT = f"""
import json, sys
import torch, torch.distributed as dist
import torchperfd

client = torchperfd.attach()
dist.init_process_group("gloo")
torch.set_num_threads(1)
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({STEPS}):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for _ in range(3):
        dist.all_reduce(loss.detach().clone())
    gathered = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(gathered, loss.detach())
model.eval()
for _ in range(5):
    dist.all_reduce(torch.zeros(()))
lines = client.parts.instruments.hooks.links.script_collectives.longest()
if dist.get_rank() == 0:
    print(json.dumps([[each.call, each.line, each.calls, each.ns > 0] for each in lines]))
dist.destroy_process_group()
"""


def test_collectives_of_metrics_are_counted_beside_those_of_ddp(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DDP_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=180, check=True)
    lines = DDP_SCRIPT.splitlines()
    reduces = lines.index("        dist.all_reduce(loss.detach().clone())") + 1
    gathers = lines.index("    dist.all_gather(gathered, loss.detach())") + 1
    found = {tuple(each) for each in json.loads(ended.stdout.splitlines()[-1])}
    assert found == {
        ("all_reduce", reduces, 3 * STEPS, True),
        ("all_gather", gathers, STEPS, True),
    }
