"""What a turn of the pump does to the training step that it falls into.

    python -m benchmarks.pump_turns [--seconds S]

Trains as benchmarks/overhead does, with steps of a millisecond, all of them recorded, and a daemon that
listens. Every turn is timed, and the steps around it are compared with the median step: how much longer they
take by the clock, and by the thread's own CPU time. What is longer by the clock alone was spent waiting for
the interpreter. The last line says by how much the 99th percentile of all steps is above that of the steps
which no turn touched.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from tests.node import ROOT, Node

import torchperfd
from torchperfd.pump import Pump

SECONDS: Final = 60.0
STEPS: Final = 1500
SHOWN: Final = range(-2, 4)
"""Places of the steps shown, counted from the one in which a turn begins."""


@dataclass(slots=True)
class Turns:
    """The pump's turns: when each began and ended, in ns of the monotonic clock, and whether it reported."""

    times: list[tuple[int, int, bool]] = field(default_factory=list)

    def follow(self) -> None:
        """Time all turns from now on."""
        turn = Pump.turn

        def timed(pump: Pump, **options: Any) -> None:
            began = time.perf_counter_ns()
            turn(pump, **options)
            self.times.append((began, time.perf_counter_ns(), bool(options.get("report"))))

        Pump.turn = timed  # type: ignore[method-assign, assignment]


def train(seconds: float) -> None:
    """Train for so long, in this process, and print what the turns did."""
    from benchmarks.overhead.workload import Workload

    turns = Turns()
    turns.follow()
    torchperfd.attach()
    workload = Workload(STEPS)
    workload.plain(workload.loader)
    ends: list[Any] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        workload.ends.clear()
        workload.plain(workload.loader)
        ends.append(np.array(workload.ends))
    starts = np.concatenate([each[:-1, 1] for each in ends])
    stops = np.concatenate([each[1:, 1] for each in ends])
    cpu_us = np.concatenate([np.diff(each[:, 0]) for each in ends]) / 1e3
    wall_us = (stops - starts) / 1e3
    began, ended, reports = (np.array(column) for column in zip(*turns.times, strict=True))
    lasted = (ended - began) / 1e3
    print(f"{len(wall_us):,} steps, median {np.median(wall_us):.0f} µs; {len(began)} turns")
    print(f"{'':<22} {'turn':>8}  steps from the {-SHOWN[0]}nd before: longer by the clock (of it CPU), µs")
    for name, kind in (("turns", ~reports), ("turns that report", reports)):
        at = np.searchsorted(stops, began[kind])
        at = at[(at + SHOWN[0] >= 0) & (at + SHOWN[-1] < len(stops))]
        longer, busier = (
            [float(np.median(each[at + place] - np.median(each))) for place in SHOWN]
            for each in (wall_us, cpu_us)
        )
        cells = "  ".join(f"{more:+.0f} ({own:+.0f})" for more, own in zip(longer, busier, strict=True))
        print(f"{name:<22} {statistics.median(lasted[kind]):>5.0f} µs  {cells}")
    touched = np.zeros(len(wall_us), np.bool_)
    for first, last in zip(np.searchsorted(stops, began), np.searchsorted(starts, ended), strict=True):
        touched[first:last] = True
    whole, rest = np.percentile(wall_us, 99), np.percentile(wall_us[~touched], 99)
    print(
        f"touched are {touched.mean():.2%} of the steps; 99th percentile {whole:.0f} µs,"
        f" {whole / rest - 1:+.1%} above that of the others"
    )


def main() -> int:
    """Train in a process of its own, beside a daemon."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to train")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        train(options.seconds)
        return 0
    node = Node()
    try:
        node.start_daemon()
        command = [sys.executable, "-m", "benchmarks.pump_turns", "--here", "--seconds", str(options.seconds)]
        return subprocess.run(command, env=node.env | {"PYTHONPATH": os.fspath(ROOT)}, check=False).returncode
    finally:
        node.close()


if __name__ == "__main__":
    sys.exit(main())
