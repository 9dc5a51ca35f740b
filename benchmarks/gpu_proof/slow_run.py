"""A training that runs well for a while, then with one fault, and measures both itself.

    python -m torchperfd run … -m benchmarks.gpu_proof.slow_run FAULT FILE [rehearsal]

Writes ``FILE``: JSON of the mean seconds of a step before the fault and with it; null where there was none.
The device is waited for at the ends of what is measured alone, so that the host runs ahead of it as it would.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import Repeated, Training, gpt, resnet18
from torch import Tensor
from torch.utils.data import DataLoader

HOST_BOUND: Final = "too small a batch"
SYNCHRONISATION: Final = "norms read one by one"
SLOW_LOADER: Final = "slow loader"
COLLECTIONS: Final = "collections"

_WARM_UP_SECONDS: Final = 11.0
"""The daemon leaves out the first ten seconds."""
_WELL_SECONDS: Final = 6.0
_FAULTY_SECONDS: Final = 10.0
_SHORT_BATCH: Final = 8
_LOAD_SECONDS: Final = 0.012
_OBJECTS: Final = 400_000
_COLLECT_EVERY: Final = 4


class Batches(Repeated):
    """The same batch, whose reading takes some time once :attr:`seconds` is set."""

    seconds = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class SlowRun:
    def __init__(self, fault: str, machine: Machine) -> None:
        make = resnet18 if fault == HOST_BOUND else gpt
        self._training = Training(make(machine, _SHORT_BATCH), machine)
        self._batches = Batches(self._training.workload, 1 << 30)
        self._drawn: Iterator[tuple[Tensor, Tensor]] = iter(DataLoader(self._batches, batch_size=None))
        self._fault = fault
        self._is_faulty = False
        self._held: list[list[int]] = []

    def strike(self) -> None:
        self._is_faulty = True
        self._batches.seconds = _LOAD_SECONDS if self._fault == SLOW_LOADER else 0.0
        if self._fault == COLLECTIONS:
            self._held = [[number] for number in range(_OBJECTS)]

    def seconds_of_a_step(self, seconds: float) -> float:
        """Train for some time; return the mean time of a step."""
        self._training.machine.wait()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            self._step(steps)
            steps += 1
        self._training.machine.wait()
        return (time.perf_counter() - began) / steps

    def _step(self, number: int) -> None:
        self._training.step(*next(self._drawn))
        if self._is_faulty and self._fault == SYNCHRONISATION:
            norms = [each.grad.norm().item() for each in self._parameters() if each.grad is not None]
            assert norms
        if self._is_faulty and self._fault == COLLECTIONS and not number % _COLLECT_EVERY:
            gc.collect()

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._training.workload.model.parameters()


def main() -> None:
    fault, path, *rest = sys.argv[1:]
    machine = Machine(is_rehearsal=bool(rest))
    scale = 0.05 if machine.is_rehearsal else 1.0
    run = SlowRun(fault, machine)
    well = None
    run.seconds_of_a_step(scale * _WARM_UP_SECONDS)
    # The model of that one is what is wrong with it.
    if fault != HOST_BOUND:
        well = run.seconds_of_a_step(scale * _WELL_SECONDS)
        run.strike()
    faulty = run.seconds_of_a_step(scale * _FAULTY_SECONDS)
    Path(path).write_text(json.dumps({"well": well, "faulty": faulty}))


if __name__ == "__main__":
    main()
