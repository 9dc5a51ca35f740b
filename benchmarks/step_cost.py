"""What a step costs: writing on the ring buffer, on the training thread, and reading it, on the flusher's.

    make bench-step

Writes the ten events of a plain training step in a tight loop, with both halves of the ring buffer,
and reads them, event by event and as steps that go like the one before them; prints CPU time
per step: median and spread over interleaved rounds, beside the clock that each event has to
read. Between torch's own operators a hook costs more than in a tight loop, since nothing of it
is left in the caches: `make bench-overhead` measures that.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

from benchmarks.plain_step import EVENTS, plain_step

from torchperfd.events import NATIVE, EventBuffer, codes
from torchperfd.safety.logs import Faults
from torchperfd.steps import templates as step_templates
from torchperfd.steps.replay import Replay

ROUNDS: Final = 40
STEPS: Final = 2000


def cpu_ns(action: Callable[[], object], times: int = STEPS) -> float:
    """Return this thread's CPU nanoseconds per step of ``STEPS``."""
    began = time.thread_time_ns()
    for _ in range(times):
        action()
    return (time.thread_time_ns() - began) / STEPS


def main() -> int:
    kinds: dict[str, Any] = {"in Python": codes.EventBuffer}
    if NATIVE:
        kinds["in C"] = EventBuffer
    measured: dict[str, list[float]] = {"perf_counter_ns, ten times": []}
    room = 1 << ((len(EVENTS) + 1) * STEPS).bit_length()
    replays = {name: Replay(kind(room), STEPS, Faults()) for name, kind in kinds.items()}
    for _ in range(ROUNDS):
        measured["perf_counter_ns, ten times"].append(cpu_ns(time.perf_counter_ns, len(EVENTS) * STEPS))
        for name, replay in replays.items():
            buffer = replay._buffer
            measured.setdefault(f"write {name}", []).append(cpu_ns(lambda buffer=buffer: plain_step(buffer)))  # type: ignore[misc]
            with mock.patch.object(step_templates, "AVAILABLE", False):
                measured.setdefault(f"read what was written {name}", []).append(cpu_ns(replay.drain, 1))
            cpu_ns(lambda buffer=buffer: plain_step(buffer))  # type: ignore[misc]
            measured.setdefault(f"the same, steps alike {name}", []).append(cpu_ns(replay.drain, 1))
    print(f"{'':<32} {'median':>10} {'p10':>10} {'p90':>10}")
    for name, times in measured.items():
        deciles = statistics.quantiles(times, n=10)
        print(f"{name:<32} {statistics.median(times):>7.0f} ns {deciles[0]:>7.0f} ns {deciles[8]:>7.0f} ns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
