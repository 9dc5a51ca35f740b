"""A training process that captures itself repeatedly, in one way, and prints its steps' times.

    python -m benchmarks.capture.worker WAY CAPTURES STEPS DIRECTORY

One JSON document per capture on standard output; times in milliseconds, memory in MiB.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil
import torch
from benchmarks.capture.ways import DONE, ENDING, RUNNING, WAITING, WAYS, Way, events
from torch import nn

QUIET_STEPS: Final = 60
LAYERS: Final = 14
"""Makes for about 1,000 events a step."""


class Loop:
    """A small model's training; each step is timed from the end of the one before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(32, 32), nn.ReLU())]
        self._model = nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
        self._inputs = torch.randn(16, 32)
        self._last = time.perf_counter()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()

    def lap(self) -> float:
        """Return the milliseconds since this was last asked."""
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        return lap * 1e3

    def quiet(self) -> list[float]:
        """Train without a capture; return what the steps took."""
        laps = []
        self.lap()
        for _ in range(QUIET_STEPS):
            self.step()
            laps.append(self.lap())
        return laps


def capture(loop: Loop, way: Way, steps: int, directory: Path) -> dict[str, float]:
    """Make one capture; return what it cost.

    ``start`` is by how much the first step of the capture was longer than a step without, so it
    has the cost of being recorded in it; ``end`` is the longest step from the end of the
    capture until the trace was on disk and its memory freed.
    """
    before = loop.quiet()
    laps: dict[str, list[float]] = {WAITING: [], RUNNING: [], ENDING: [], DONE: []}
    loop.lap()
    way.begin(steps, directory)
    while len(laps[DONE]) < QUIET_STEPS:
        loop.step()
        state = way.step()
        laps[state].append(loop.lap())
    usual = statistics.median(before)
    return {
        "usual": usual,
        "start": (laps[RUNNING] or laps[ENDING])[0] - usual,
        "running": statistics.median(laps[RUNNING] or [0.0]),
        "end": max(laps[ENDING] + laps[DONE][:10]),
        "exporting": sum(laps[ENDING]),
        "after": statistics.median(laps[DONE][10:]),
        "resident": psutil.Process().memory_info().rss / 2**20,
    }


def main(arguments: list[str]) -> None:
    name, captures, steps, directory = arguments
    torch.set_num_threads(1)
    way = WAYS[name]()
    loop = Loop()
    loop.quiet()
    counted = 0
    for _ in range(int(captures)):
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            found = capture(loop, way, int(steps), Path(folder))
            traces = [path for path in Path(folder).rglob("*.json") if "manifest" not in path.name]
            # Once, since reading a trace takes memory, too.
            counted = counted or sum(map(events, traces))
            found["events"] = counted
        print(json.dumps(found), flush=True)
    way.close()


if __name__ == "__main__":
    main(sys.argv[1:])
