"""Real ranks: the lag of a device, and collectives that the script starts itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.node import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys, time
from benchmarks.simulated_device import install
device = install()
import torch, torchperfd

kernel_seconds, host_seconds, syncs = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "sync"
client = torchperfd.attach()
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def launch(*_):
    for _ in range(8):
        device.compute.launch_kernel(kernel_seconds)

model.register_forward_pre_hook(launch)
inputs, until = torch.randn(4, 8), time.monotonic() + 5
while time.monotonic() < until:
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
    time.sleep(host_seconds)
    if syncs:
        device.compute.synchronize()
totals = client.parts.flusher.totals
lag = totals.device_lag
print(json.dumps([lag.calls, lag.ns / max(1, lag.calls) / 1e9, totals.train.mean_seconds]))
"""


def lag_of(*arguments: object) -> tuple[float, float]:
    """Return by how much the device is behind, and the mean step; seconds."""
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    samples, lag, step = json.loads(ended.stdout.splitlines()[-1])
    assert samples >= 2, ended.stderr
    return lag, step


def test_lag_of_a_device_that_bounds_the_loop_is_many_steps() -> None:
    lag, step = lag_of(0.004, 0.0, "free")
    assert lag > 3 * step


@pytest.mark.parametrize(("kernel_seconds", "how"), [(0.0004, "free"), (0.004, "sync")])
def test_lag_of_a_device_that_waits_for_the_host_is_short(kernel_seconds: float, how: str) -> None:
    """Also of one for which the host waits in each step."""
    lag, step = lag_of(kernel_seconds, 0.01, how)
    assert lag < 0.7 * step


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
lines = client.parts.instruments.script_collectives.longest()
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
