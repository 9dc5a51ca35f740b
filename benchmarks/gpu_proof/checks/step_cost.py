"""What the client costs a step: the same loop with it and without, in alternation."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch
from benchmarks.gpu_proof.analysed_capture import attached
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.workloads import WARM_UP, Training, gpt, resnet18, resnet50

TITLE: Final = "Step time with the client and without"
SECONDS: Final = 150

CHANGE_BELOW: Final = 0.005
TURN_SECONDS: Final = 0.4
ROUNDS: Final = 8
_PROCESS_STEPS: Final = 10


@dataclass(slots=True)
class Turns:
    """Step times of all turns of one loop: in each round one with the client and one without."""

    wall_us: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    cpu_us: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def add(self, is_attached: bool, wall_us: float, cpu_us: float) -> None:
        self.wall_us[is_attached].append(wall_us)
        self.cpu_us[is_attached].append(cpu_us)


def run(machine: Machine) -> Outcome:
    """Measure ResNet-50 and a GPT, a loop that the host bounds, and the GPT compiled to CUDA graphs."""
    outcome = Outcome(["loop", "step without", "with the client", "median change", "training thread's CPU"])
    for make in (resnet50, gpt, resnet18):
        training = Training(make(machine), machine)
        _add(outcome, f"{training.workload.name}, eager", _by_turns(training), machine)
        del training
        torch.cuda.empty_cache()
    if machine.is_rehearsal:
        outcome.notes.append("CUDA graphs are compiled on a GPU only.")
    else:
        _add(outcome, "GPT, compiled to CUDA graphs", _by_processes(machine), machine)
        outcome.notes.append(
            "All in bfloat16. Changes are those of pairs of neighbouring turns, with their quartiles. CUDA"
            ' graphs are made by `torch.compile(backend="cudagraphs")`.'
        )
    return outcome


def _by_turns(training: Training) -> Turns:
    """Train alternately, attaching and detaching in one process."""
    training.run(WARM_UP)
    each, _ = training.timed(WARM_UP)
    steps = training.machine.amount(max(5, round(TURN_SECONDS / each)), 2)
    turns = Turns()
    for is_attached in _order(training.machine):
        with attached(training.workload.model) if is_attached else nullcontext():
            wall, cpu = training.timed(steps)
        turns.add(is_attached, wall * 1e6, cpu * 1e6)
    return turns


def _by_processes(machine: Machine) -> Turns:
    """Train alternately in two processes, one with the client."""
    turns = Turns()
    with ExitStack() as stack:
        workers = {
            is_attached: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu_proof.turns_worker", name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for is_attached, name in ((False, "bare"), (True, "attached"))
        }
        for worker in workers.values():
            assert worker.stdout is not None
            worker.stdout.readline()
        for is_attached in _order(machine):
            wall, cpu = _asked(workers[is_attached], _PROCESS_STEPS)
            turns.add(is_attached, wall * 1e6, cpu * 1e6)
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
    return turns


def _order(machine: Machine) -> Iterator[bool]:
    """Yield whether the next turn is with the client; each round has both, in changing order."""
    for number in range(machine.amount(ROUNDS, 2)):
        yield from (False, True) if number % 2 else (True, False)


def _asked(worker: "subprocess.Popen[str]", steps: int) -> tuple[float, float]:
    """Have a process train; return the seconds of a step by the wall clock and of CPU."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{steps}\n")
    worker.stdin.flush()
    wall, cpu = json.loads(worker.stdout.readline())
    return wall, cpu


def _add(outcome: Outcome, name: str, turns: Turns, machine: Machine) -> None:
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
