"""What a step costs the training thread where the device runs behind the host, on the simulated device.

    make bench-device

One rank trains on benchmarks/simulated_device, 18 steps a second: a small model under
DistributedDataParallel, and 24 blocks under FSDP2. Steps that the client records and steps that its hooks let
pass alternate, each for about a second; a step's cost is the difference of the CPU time that the training
thread uses for it. Prints the median over the rounds with its standard error, and exits with 1 if one is
above its bound by more than two of these.
"""

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.simulated_device import BACKEND, install
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchperfd

BLOCKS: Final = 24
WIDTH: Final = 16
ROUNDS: Final = 24
STEPS: Final = 20
"""Of each kind in a round: as long as there is one report of the client's, with its number of CUDA events."""
WARM_STEPS: Final = 60
"""After so many, device times have begun: they do once the first steps are reported."""
KERNEL_SECONDS: Final = 0.05
_MEDIANS_ERROR: Final = math.sqrt(math.pi / 2)
"""The standard error of a median of normal values, as a multiple of the mean's."""


def replicated() -> nn.Module:
    """Return a small model under DistributedDataParallel."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))


def sharded() -> nn.Module:
    """Return blocks that are each sharded by FSDP2."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


CASES: Final[tuple[tuple[str, Callable[[], nn.Module], float], ...]] = (
    ("DistributedDataParallel", replicated, 30.0),
    (f"FSDP2, {BLOCKS} blocks", sharded, 100.0),
)
"""What is trained, and the microseconds that a step may cost."""


def measure(build: Callable[[], nn.Module]) -> list[float]:
    device = install()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.ones(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        device.compute.launch_kernel(KERNEL_SECONDS)
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()
        device.compute.synchronize()

    def cpu_us() -> float:
        """Return the training thread's CPU time per step."""
        began = time.thread_time_ns()
        for _ in range(STEPS):
            step()
        return (time.thread_time_ns() - began) / 1e3 / STEPS

    client = torchperfd.attach(model=model)
    buffer = client.parts.instruments.buffer
    recorded = buffer.thread
    for _ in range(WARM_STEPS):
        step()
    costs = []
    for _ in range(ROUNDS):
        buffer.thread = 0
        passed = cpu_us()
        buffer.thread = recorded
        costs.append(cpu_us() - passed)
    client.detach()
    return costs


def main() -> int:
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # without a daemon
        install()
        store: Any = vars(dist)["HashStore"]()
        dist.init_process_group(BACKEND, store=store, rank=0, world_size=1)
        print(f"{'CPU time of the training thread per step':<42} {'median':>10} {'error':>10} {'bound':>10}")
        for name, build, bound in CASES:
            costs = measure(build)
            median = statistics.median(costs)
            error = _MEDIANS_ERROR * statistics.stdev(costs) / math.sqrt(len(costs))
            print(f"{name:<42} {median:>7.1f} µs {error:>7.1f} µs {bound:>7.0f} µs", flush=True)
            failed |= median - 2 * error > bound
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
