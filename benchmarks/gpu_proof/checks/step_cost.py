"""What the client costs a step: the same loop with it and without, by turns."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.workloads import Training, Workload, gpt, resnet18, resnet50
from torch import nn

import torchperfd

TITLE: Final = "Step time with the client and without"
SECONDS: Final = 150

CHANGE_BELOW: Final = 0.005
TURN_SECONDS: Final = 0.5
ROUNDS: Final = 16
_WARM_UP: Final = 3


@dataclass(slots=True)
class Turns:
    """Step times of all turns of one loop: in each round one with the client and one without."""

    wall_us: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    cpu_us: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def add(self, is_attached: bool, wall_us: float, cpu_us: float) -> None:
        """Add a turn."""
        self.wall_us[is_attached].append(wall_us)
        self.cpu_us[is_attached].append(cpu_us)


def run(machine: Machine) -> Outcome:
    """Measure ResNet-50 and a GPT, eager and in CUDA graphs, and a loop that the host bounds."""
    outcome = Outcome(["loop", "step without", "with the client", "median change", "training thread's CPU"])
    loops: list[tuple[str, Callable[[Machine], Workload], Callable[[nn.Module], Any]]] = [
        ("ResNet-50, bf16, eager", resnet50, _eager),
        ("GPT, bf16, eager", gpt, _eager),
        ("ResNet-18, bf16, eager", resnet18, _eager),
    ]
    if not machine.is_rehearsal:
        loops[2:2] = [
            ("ResNet-50, bf16, compiled to CUDA graphs", resnet50, _in_cuda_graphs),
            ("GPT, bf16, compiled to CUDA graphs", gpt, _in_cuda_graphs),
        ]
    for name, make, wrap in loops:
        torch._dynamo.reset()
        _add(outcome, name, _measured(Training(make(machine), machine, wrap=wrap)), machine)
    outcome.notes.append(
        "Changes are those of pairs of neighbouring turns, with their quartiles. CUDA graphs are made by"
        ' `torch.compile(backend="cudagraphs")`.'
    )
    return outcome


def _eager(model: nn.Module) -> Any:
    return model


def _in_cuda_graphs(model: nn.Module) -> Any:
    return torch.compile(model, backend="cudagraphs")


def _measured(training: Training) -> Turns:
    """Train by turns of half a second."""
    training.run(2 * _WARM_UP)
    began = time.perf_counter()
    training.run(_WARM_UP)
    each = (time.perf_counter() - began) / _WARM_UP
    steps = training.machine.amount(max(5, round(TURN_SECONDS / each)), 2)
    turns = Turns()
    for number in range(training.machine.amount(ROUNDS, 2)):
        for is_attached in (False, True) if number % 2 else (True, False):
            with _watched(training, is_attached):
                training.run(_WARM_UP)
                wall, cpu = time.perf_counter(), time.thread_time()
                training.run(steps)
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            turns.add(is_attached, wall / steps * 1e6, cpu / steps * 1e6)
    return turns


@contextmanager
def _watched(training: Training, is_attached: bool) -> Iterator[None]:
    """Attach for the while, or do not."""
    client = torchperfd.attach(model=training.workload.model) if is_attached else None
    try:
        yield
    finally:
        if client is not None:
            client.detach()


def _add(outcome: Outcome, name: str, turns: Turns, machine: Machine) -> None:
    """Add a loop's row and its bound."""
    changes = [ours / bare - 1 for ours, bare in zip(turns.wall_us[True], turns.wall_us[False], strict=True)]
    cpu = [ours - bare for ours, bare in zip(turns.cpu_us[True], turns.cpu_us[False], strict=True)]
    low, median, high = _quartiles(changes)
    outcome.rows.append(
        [
            name,
            f"{statistics.median(turns.wall_us[False]) / 1e3:.3f} ms",
            f"{statistics.median(turns.wall_us[True]) / 1e3:.3f} ms",
            f"{median:+.2%} ({low:+.2%} to {high:+.2%})",
            "{1:+.0f} µs ({0:+.0f} to {2:+.0f})".format(*_quartiles(cpu)),
        ]
    )
    text = f"{name}: the step is at most {CHANGE_BELOW:.1%} longer; median {median:+.2%}"
    outcome.bounds.append(Bound(text, None if machine.is_rehearsal else median <= CHANGE_BELOW))


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high
