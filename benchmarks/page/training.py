"""What an open page costs a training thread: ``python -m benchmarks.page.training [--rounds 8]``.

One process trains beside a daemon. Blocks of usual reports and of the frequent ones that a page has
alternate; a block is compared with the mean of the two usual ones around it. Two usual blocks that follow
each other give the noise. Printed are the microseconds that frequent reports add to a step, of the training
thread's CPU time, of wall time, and of the flusher's CPU time, during most of which it has the interpreter:
medians over the rounds with their standard errors.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from benchmarks.daemon.watch import thread_cpu_seconds
from tests.support.node import Node, eventually

WIDTH: Final = 64
LAYERS: Final = 6
BLOCK_S: Final = 8.0
"""Of steps below 5 ms a block has two usual reports."""
SLEEPS_S: Final = (0.0, 0.02)
_MEDIANS_ERROR: Final = math.sqrt(math.pi / 2)

KINDS: Final = ("CPU time", "wall time", "flusher's CPU time")


def clocks() -> tuple[float, ...]:
    """Return the time by each of the three clocks, in seconds."""
    flusher = next(each for each in threading.enumerate() if each.name == "torchperfd-flusher")
    return time.thread_time(), time.perf_counter(), thread_cpu_seconds(os.getpid(), flusher.native_id or 0)


def block(step: Callable[[], None]) -> list[float]:
    """Return what a step takes by each of the three clocks, in microseconds."""
    count, began = 0, clocks()
    while time.perf_counter() - began[1] < BLOCK_S:
        for _ in range(10):
            step()
        count += 10
    return [1e6 * (after - before) / count for before, after in zip(began, clocks(), strict=True)]


def measure(rounds: int) -> None:
    """Print the figures for each length of step."""
    # Now that the daemon's socket is in the environment.
    import torch

    import torchperfd.link.outbox

    torch.set_num_threads(1)
    # Soon, and not only after ten thousand steps.
    torchperfd.link.outbox._FIRST_STEPS = 200  # type: ignore[misc]
    client = torchperfd.attach(run="bench")
    flusher = client.parts.flusher
    eventually(lambda: client.parts.stream.connected, 30)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.ones(32, WIDTH)
    row = "{:<24} {:<18} {:>12} {:>18} {:>18}"
    print(row.format("step", "", "µs per step", "page adds", "noise"))
    for sleep in SLEEPS_S:

        def step(sleep: float = sleep) -> None:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if sleep:
                time.sleep(sleep)

        block(step)
        usual, frequent = [block(step)], []
        for _ in range(rounds):
            flusher.report_frequently(60)
            frequent.append(block(step))
            flusher.report_frequently(0)
            usual.append(block(step))
        for column, kind in enumerate(KINDS):
            plain = [each[column] for each in usual]
            pairs = list(itertools.pairwise(plain))
            added = [
                each[column] - (before + after) / 2
                for each, (before, after) in zip(frequent, pairs, strict=True)
            ]
            noise = [after - before for before, after in pairs]
            name = f"busy, then {1000 * sleep:.0f} ms asleep" if sleep else "busy"
            print(
                row.format(
                    name, kind, f"{statistics.median(plain):.1f}", _with_error(added), _with_error(noise)
                )
            )
    client.detach()


def _with_error(values: list[float]) -> str:
    error = _MEDIANS_ERROR * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.median(values):+.2f} ± {error:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8)
    rounds: int = parser.parse_args().rounds
    node = Node()
    try:
        node.start_daemon()
        os.environ.update({name: value for name, value in node.env.items() if name.startswith("TORCHPERFD_")})
        measure(rounds)
    finally:
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
