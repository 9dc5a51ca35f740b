"""A training that captures itself several times, in a process of its own, and what that did to its steps.

    python -m benchmarks.gpu_proof.captured_training CAPTURES eager|graphs [rehearsal]

Prints one line of JSON: step times before the first capture and after each, and what each trace holds.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu_proof.analysed_capture import attached
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import Training, resnet18

from torchperfd.client import Client
from torchperfd_daemon import analysis

CAPTURED: Final = 5
_ON_DEVICE: Final = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES: Final = ("LaunchKernel", "GraphLaunch")
_LONGEST_SECONDS: Final = 30.0


class Laps:
    """Steps of a loop, each timed to where the device has done it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._batches = training.batches(1 << 20)

    def lap(self) -> float:
        """Train one step; return its milliseconds."""
        began = time.perf_counter()
        inputs, targets = next(self._batches)
        self._training.step(inputs, targets)
        self._training.machine.wait()
        return (time.perf_counter() - began) * 1e3

    def usual(self, steps: int) -> float:
        """Return the median of some steps."""
        return statistics.median(self.lap() for _ in range(steps))


def captured(client: Client, laps: Laps, usual_ms: float) -> dict[str, Any]:
    """Make one capture while training goes on; return what it cost and what its trace holds."""
    capture = client.capture(steps=CAPTURED)
    until = time.monotonic() + _LONGEST_SECONDS
    recorded: list[float] = []
    began = time.monotonic()
    while capture.state not in ("complete", "failed") and time.monotonic() < until:
        recorded.append(laps.lap())
    trace = capture.wait(_LONGEST_SECONDS)
    return {
        "longest_ms": max(recorded),
        "over_usual_ms": sum(lap - usual_ms for lap in recorded),
        "seconds": time.monotonic() - began,
        "pause_ms": capture.pause_seconds * 1e3,
        **held_by(trace),
    }


def held_by(path: Path) -> dict[str, Any]:
    """Return what a trace holds, and the device's busy time by the analyser and by counting it anew."""
    summary = analysis.summarise(analysis.load(path))
    events = json.loads(path.read_text())["traceEvents"]
    return {
        "kernels": sum(event.get("cat") == "kernel" for event in events),
        "launches": sum(
            event.get("cat") in ("cuda_runtime", "cuda_driver")
            and any(launch in event.get("name", "") for launch in _LAUNCHES)
            for event in events
        ),
        "analysed_busy_us": summary.breakdown.busy_ns / 1e3,
        "counted_busy_us": busy_us(events),
        "analysed_kernels_us": sum(kernel.sum_ns for kernel in summary.kernels) / 1e3,
        "counted_kernels_us": sum(event["dur"] for event in events if event.get("cat") == "kernel"),
        "bytes": path.stat().st_size,
    }


def busy_us(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the microseconds in which anything ran on the device, from its starts and ends alone."""
    edges = sorted(
        edge
        for event in events
        if event.get("cat") in _ON_DEVICE
        for edge in ((event["ts"], 1), (event["ts"] + event["dur"], -1))
    )
    busy, running, since = 0.0, 0, 0.0
    for at, change in edges:
        if running:
            busy += at - since
        running += change
        since = at
    return busy


def launch_us(machine: Machine) -> float:
    """Return what launching a short kernel takes on the host: the fastest tenth of many, little disturbed."""
    tensor = torch.zeros(64, device=machine.device)
    costs = []
    for number in range(machine.amount(4000, 40)):
        if not number % 200:
            machine.wait()
        began = time.perf_counter_ns()
        tensor.add_(1)
        costs.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.quantiles(costs, n=10)[0]


def main() -> int:
    """Train, capture, and print what happened."""
    captures, mode, *rest = sys.argv[1:]
    machine = Machine(is_rehearsal=bool(rest))
    training = Training(
        resnet18(machine),
        machine,
        wrap=lambda model: torch.compile(model, backend="cudagraphs") if mode == "graphs" else model,
    )
    laps = Laps(training)
    quiet = machine.amount(60, 3)
    with attached(training.workload.model) as client:
        laps.usual(machine.amount(60, 2))
        launch_before = launch_us(machine)
        before = laps.usual(quiet)
        made, after = [], []
        for _ in range(int(captures)):
            made.append(captured(client, laps, before))
            after.append(laps.usual(quiet))
        if not made:
            after = [laps.usual(quiet) for _ in range(5)]
        launches_us = [launch_before, launch_us(machine)]
    print(json.dumps({"before_ms": before, "after_ms": after, "launches_us": launches_us, "captures": made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
