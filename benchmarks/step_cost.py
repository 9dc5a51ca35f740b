"""What a step costs the training thread: the recorder and loop alone, without torch.

    make bench-step

Feeds the loop the ten calls that the hooks make in a plain training step and prints the
thread's CPU time per step: median and spread over interleaved rounds, beside the clock
that each of them has to read.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Final

from benchmarks.plain_step import plain_step

from torchperfd.loop import Loop
from torchperfd.recorder import Recorder

ROUNDS: Final = 40
STEPS: Final = 2000


def cpu_ns(action: Callable[[], object]) -> float:
    """Return the training thread's CPU nanoseconds per call."""
    began = time.thread_time_ns()
    for _ in range(STEPS):
        action()
    return (time.thread_time_ns() - began) / STEPS


def main() -> int:
    """Measure and print."""
    recorder = Recorder()
    loop = Loop(recorder)

    measured: dict[str, list[float]] = {"empty call": [], "perf_counter_ns": [], "step, five phases": []}
    for _ in range(ROUNDS):
        measured["empty call"].append(cpu_ns(lambda: None))
        measured["perf_counter_ns"].append(cpu_ns(time.perf_counter_ns))
        measured["step, five phases"].append(cpu_ns(lambda: plain_step(loop)))
        recorder.drain()
    print(f"{'':<20} {'median':>10} {'p10':>10} {'p90':>10}")
    for name, times in measured.items():
        deciles = statistics.quantiles(times, n=10)
        print(f"{name:<20} {statistics.median(times):>7.0f} ns {deciles[0]:>7.0f} ns {deciles[8]:>7.0f} ns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
