"""What a rank of the suite's jobs does at each place where a fault may strike: the base of all injections."""

import io
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.faults.catalog import (
    SIMULATED,
    USUAL_STEP_SECONDS,
    VALIDATION_BATCHES,
    VALIDATION_STEPS,
    Plan,
)
from benchmarks.simulated_device import Device, installed
from torch import nn

END_FILE: Final = "end"
"""Whose fault has begun and finds this file in the job's directory has it no more."""
BATCH: Final = 16
"""Samples in a batch."""


class Injection:
    """No fault: what a healthy rank does at each of the places where a fault may strike.

    Args:
        plan: The job.
        rank: This process's.
        directory: For files of its own.

    Attributes:
        workers: How many processes of each loader make batches.
        prefetches: Whether a thread draws the batches ahead.
        epoch_steps: Batches in an epoch of the loader; 0: one epoch without an end.
        micro_batches: How many batches are run forward and backward for one step.
        validates: Whether the job validates now and then.
    """

    workers = 0
    prefetches = False
    epoch_steps = 0
    micro_batches = 1
    validates = False

    def __init__(self, plan: Plan, rank: int, directory: Path) -> None:
        self.plan = plan
        self.rank = rank
        self.directory = directory
        self._step = 0
        self._over = False
        self._end_file = directory / END_FILE
        self._spent_ns = 0
        self._healthy_ns: list[int] = []
        self._lock = threading.Lock()  # the script's own, not torchperfd's: communication threads spend, too

    @classmethod
    def before_groups(cls) -> None:
        """Prepare, before the process groups are made."""

    def prepare(self, model: nn.Module) -> None:
        """Prepare, before the first step."""

    def begin(self, step: int) -> None:
        self._step = step
        if step > self.plan.onset and not self._over and self._end_file.exists():
            self._over = True
            self.end()

    def load(self, step: int) -> None:
        """A batch is being made, in the process that makes them."""

    def rows(self) -> int:
        """Return how many samples the batch that is being made has."""
        return BATCH

    def start_worker(self, worker: int) -> None:
        """A worker process of the loader starts."""

    @property
    def keeps_workers(self) -> bool:
        """Whether the workers of the epoch that begins are kept for the next one."""
        return True

    def compute(self) -> None:
        """The forward is under way."""

    def in_place_of_average(self, step: int) -> str:
        """Return which fault keeps this rank from averaging its metric; empty: none."""
        return ""

    def save(self, state: dict[str, Any]) -> None:
        torch.save(state, io.BytesIO())

    def validation_batches(self, step: int) -> int:
        """Return how many batches to validate on after a step; 0 for none."""
        return VALIDATION_BATCHES if self.validates and step % VALIDATION_STEPS == VALIDATION_STEPS - 1 else 0

    def wait_for(self, device: Device) -> None:
        """Wait until the device is at the end of the step, as ``loss.item()`` does."""
        device.compute.synchronize()

    def finish(self) -> None:
        """The step is nearly over."""

    def end(self) -> None:
        """The fault ends: undo what would go on by itself."""

    def learn(self, lasted_ns: int) -> None:
        """The step has taken so long."""
        if self._step < self.plan.onset:
            self._healthy_ns.append(lasted_ns)

    @cached_property
    def seconds(self) -> float:
        """The seconds added to a culprit's step: as planned, or more where steps are long."""
        return self.plan.seconds * max(1.0, self.usual_step_seconds / USUAL_STEP_SECONDS)

    @property
    def usual_step_seconds(self) -> float:
        """What the rank's healthy steps have taken."""
        return statistics.median(self._healthy_ns[len(self._healthy_ns) // 4 :] or [0]) / 1e9

    def take_spent_ns(self) -> int:
        with self._lock:
            spent, self._spent_ns = self._spent_ns, 0
        return spent

    @property
    def strikes(self) -> bool:
        return self._step >= self.plan.onset and not self._over and self.plan.has_fault(self.rank)

    @property
    def begins(self) -> bool:
        """Whether this is the first step in which this rank has it."""
        return self._step == self.plan.onset and self.plan.has_fault(self.rank)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is done within as injected."""
        began = time.perf_counter_ns()
        yield
        with self._lock:
            self._spent_ns += time.perf_counter_ns() - began

    def work(self, seconds: float) -> None:
        """Compute: on the simulated device if there is one, else by waiting as for a device."""
        if self.plan.device == SIMULATED:
            installed().compute.launch_kernel(seconds)
        else:
            time.sleep(seconds)

    def spend(self, seconds: float) -> None:
        """Count time on the device as injected."""
        with self._lock:
            self._spent_ns += int(seconds * 1e9)

    def pause(self, seconds: float) -> None:
        with self.timed():
            time.sleep(seconds)


def allow_cpus(pid: int, cpus: set[int]) -> None:
    """Bind all threads of a process to these CPUs."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus)


def burn(seconds: float) -> None:
    """Use CPU time of this thread, in Python."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class SlowFile(io.BytesIO):
    """A file whose close takes long, as that of a busy share does."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self._pause: Callable[[], None] | None = pause

    def write(self, data: Any) -> int:
        """Write; only the first time takes long."""
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause()
        return super().write(data)
