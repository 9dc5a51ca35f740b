"""What step templates (templates.py) save a training loop of millisecond steps.

    python -m benchmarks.step_templates [--seconds S] [--seed N]

Blocks of half a second with templates and without them alternate in one process; a flush falls into each.
Two figures compare a pair of blocks. The first is wall time, which a busy machine blurs. The second is the
time for which the training thread slept, which is its wait for the interpreter while the flusher reads:
wall time without CPU time and without the wait for a processor, as a part of the step's CPU time.
"""

import argparse
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import torch

import torchperfd
from torchperfd.link import outbox
from torchperfd.steps import templates as step_templates

BLOCK_S: Final = 0.5
WARM_STEPS: Final = 12_000
"""From the 10,000th step on the flusher takes them for short ones."""


@dataclass(frozen=True, slots=True)
class Block:
    """Microseconds per step: by the clock, on the CPU, and asleep."""

    wall: float
    cpu: float
    asleep: float


def training() -> Iterator[None]:
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(7)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(32 * 64, 128))
    while True:
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=32):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            yield


def measure(step: Callable[[], object], *, templates: bool) -> Block:
    """Make steps until half a block after the next flush."""
    with mock.patch.object(step_templates, "AVAILABLE", templates):
        end = (time.time() // BLOCK_S + 1.5) * BLOCK_S
        began, cpu, waited = time.perf_counter_ns(), *_scheduled()
        steps = 0
        while time.time() < end:
            step()
            steps += 1
        ended, cpu_after, waited_after = time.perf_counter_ns(), *_scheduled()
    wall, cpu, waited = ended - began, cpu_after - cpu, waited_after - waited
    return Block(*(ns / steps / 1e3 for ns in (wall, cpu, wall - cpu - waited)))


def _scheduled() -> tuple[int, int]:
    """Return the ns for which this thread has run, and has waited for a processor."""
    fields = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return int(fields[0]), int(fields[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--seed", type=int, default=0, help="of the order within pairs")
    options = parser.parse_args()
    if not step_templates.AVAILABLE:
        parser.error("step templates are not compiled here")
    torch.set_num_threads(1)
    order = random.Random(options.seed)
    client = torchperfd.attach()
    steps = training()
    for _ in itertools.islice(steps, WARM_STEPS):
        pass
    pairs: list[tuple[Block, Block]] = []
    with mock.patch.object(outbox, "SHORT_STEPS_S", BLOCK_S):
        client.report()  # wakes the flusher up: from here on it waits for so long
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            first = order.random() < 0.5
            blocks = {kind: measure(steps.__next__, templates=kind) for kind in (first, not first)}
            pairs.append((blocks[True], blocks[False]))
    client.detach()
    with_them, without = ([pair[kind] for pair in pairs] for kind in (0, 1))
    for name, found in (("with templates", with_them), ("without", without)):
        wall, cpu, asleep = (
            statistics.median(column)
            for column in zip(*((b.wall, b.cpu, b.asleep) for b in found), strict=True)
        )
        print(f"{name:<16} wall {wall:7.1f} µs   CPU {cpu:7.1f} µs   asleep {asleep:5.1f} µs a step")
    _print("wall time", [off.wall / on.wall - 1 for on, off in pairs])
    _print("wait for the interpreter", [(off.asleep - on.asleep) / on.cpu for on, off in pairs])
    return 0


def _print(name: str, saved: list[float]) -> None:
    error = statistics.stdev(saved) / len(saved) ** 0.5
    print(f"saved, {name}: {statistics.fmean(saved):+.2%} ± {error:.2%}")


if __name__ == "__main__":
    sys.exit(main())
