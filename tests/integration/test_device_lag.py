"""Loops on the simulated device: how far it is behind shows whether it or the host bounds a loop."""

import json
import subprocess
import sys

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
