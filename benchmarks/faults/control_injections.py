"""Loops of many shapes in which nothing is wrong."""

import random
import threading
import time
from typing import Any, Final

import torch
from benchmarks.faults.catalog import PERIOD_STEPS
from benchmarks.faults.injection import Injection, SlowFile, burn
from torch import nn

QUICK_CHECKPOINT_SECONDS: Final = 0.005
COMPUTE_SECONDS: Final = 0.03
"""CPU time of a step that only computes."""
KEPT_UP_SECONDS: Final = 0.02
"""What a worker needs for a batch, while a step takes several times as long."""
UNUSUAL_STEPS: Final = (0.5, 1.5)
"""Where the work of all ranks differs from step to step, it is so many times the usual."""
METRIC_STEPS: Final = 50


class Validation(Injection):
    """Validates now and then, and saves checkpoints of 5 ms."""

    validates = True

    def save(self, state: dict[str, Any]) -> None:
        torch.save(state, SlowFile(lambda: time.sleep(QUICK_CHECKPOINT_SECONDS)))


class _QuickCheckpoints(Validation):
    validates = False


class _OnlyComputes(Injection):
    def compute(self) -> None:
        burn(COMPUTE_SECONDS)


class _Accumulation(Injection):
    micro_batches = 4


class _WorkersThatKeepUp(Injection):
    workers = 2

    def load(self, step: int) -> None:
        time.sleep(KEPT_UP_SECONDS)


class _Epochs(Injection):
    """Short epochs, whose workers are kept."""

    workers = 1
    epoch_steps = 5 * PERIOD_STEPS


class _EqualLengths(Injection):
    """Steps differ, and the ranks do not: their batches are of equal length."""

    def compute(self) -> None:
        chance = random.Random(f"{self.plan.seed}/{self._step}")
        self.work(self.plan.pace_seconds * chance.uniform(*UNUSUAL_STEPS))


class _IdleThread(Injection):
    """A thread of the script that mostly sleeps."""

    def prepare(self, model: nn.Module) -> None:
        threading.Thread(target=self._poll, daemon=True).start()

    def _poll(self) -> None:
        while True:
            time.sleep(0.1)
            burn(0.0005)


class _SeldomMetrics(Injection):
    """Logs for a moment at every 50th step."""

    def finish(self) -> None:
        if self._step % METRIC_STEPS == METRIC_STEPS - 1:
            time.sleep(0.01)


CONTROL_INJECTIONS: Final[dict[str, type[Injection]]] = {
    "healthy": Injection,
    "healthy, validation": Validation,
    "healthy, one rank": Injection,
    "healthy, two ranks": Injection,
    "healthy, only computes": _OnlyComputes,
    "healthy, small steps": Injection,
    "healthy, long steps": Injection,
    "healthy, accumulation": _Accumulation,
    "healthy, workers that keep up": _WorkersThatKeepUp,
    "healthy, epochs": _Epochs,
    "healthy, quick checkpoints": _QuickCheckpoints,
    "healthy, equal lengths": _EqualLengths,
    "healthy, idle thread": _IdleThread,
    "healthy, seldom metrics": _SeldomMetrics,
}
