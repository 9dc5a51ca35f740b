"""The faults' injections into a rank. Each times itself where it can."""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from benchmarks.faults.arm_injections import ARM_INJECTIONS
from benchmarks.faults.catalog import (
    CHECKPOINT_STEPS,
    NEEDLESS_SYNCHRONISATION,
    RECOMPILE_STEPS,
    STAGES,
    THROTTLED_GPU,
    VALIDATION_STEPS,
    Plan,
)
from benchmarks.faults.control_injections import CONTROL_INJECTIONS, Validation
from benchmarks.faults.injection import Injection, SlowFile, allow_cpus
from benchmarks.faults.quota import Quota
from benchmarks.simulated_device import Device, installed
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

LONG_CHECKPOINT_SECONDS: Final = 12.0
LONG_SAVE_EVERY_SECONDS: Final = 60.0
LONG_VALIDATION_STEP: Final = 20 * VALIDATION_STEPS - 1
LONG_VALIDATION_BATCHES: Final = 1_200
DEGREE: Final = 80
"""Of what is compiled: the time that it takes grows with it."""
LEAK_FILLS_SECONDS: Final = 600.0
"""So soon a leak would fill the memory that the machine has left."""
HOGS: Final = 4
STAGGER_STEPS: Final = 20
"""A rank of a job whose ranks collect at different steps does so once in as many."""
SERIALIZE_SECONDS: Final = 0.015
WRITE_SECONDS: Final = 0.005
"""A save in the background does one and the other in turns."""
IMBALANCE_SECONDS: Final = 0.02
"""By so much the kernels of an unbalanced pipeline's last stage are longer in a step."""
LOGGING_SECONDS: Final = 0.03
"""The host's work after a step, which the device hides unless the host has waited for it."""
QUOTA: Final = 0.1
"""Of one processor."""

_TANGLE: Final = 10_000
_LARGE_TANGLE: Final = 400_000
_DISK_BYTES: Final = 2**26
_DISK_READ: Final = 2**22


class _SavesALot(Validation):
    """Checkpoints of 10 to 200 ms, one of 20 s each minute, one of a minute, and a validation of a minute."""

    def prepare(self, model: nn.Module) -> None:
        self._chance = random.Random(self.plan.seed)
        self._began = time.monotonic()
        self._long = iter([20.0, 60.0, *[20.0] * 100])
        self._next_long = LONG_SAVE_EVERY_SECONDS

    def save(self, state: dict[str, Any]) -> None:
        seconds = self._chance.uniform(0.01, 0.2)
        if time.monotonic() - self._began > self._next_long:
            seconds = next(self._long)
            self._next_long += LONG_SAVE_EVERY_SECONDS
        torch.save(state, SlowFile(lambda: time.sleep(seconds)))

    def validation_batches(self, step: int) -> int:
        return LONG_VALIDATION_BATCHES if step == LONG_VALIDATION_STEP else super().validation_batches(step)


class _SlowLoader(Injection):
    def load(self, step: int) -> None:
        if self.strikes:
            self.pause(self.seconds)


class _SlowCompute(Injection):
    def compute(self) -> None:
        if self.strikes:
            self.pause(self.seconds)


class _SlowMatmuls(Injection):
    def compute(self) -> None:
        if self.strikes:
            matrix = torch.ones(64, 64)
            with self.timed():
                until = time.perf_counter() + self.seconds
                while time.perf_counter() < until:
                    torch.mm(matrix, matrix)


class _GarbageCollection(Injection):
    def prepare(self, model: nn.Module) -> None:
        # torch's own objects take a tenth of a second to walk through: more than a step's share.
        gc.collect()
        gc.freeze()
        self._tangle = [[number] for number in range(_TANGLE)]

    def compute(self) -> None:
        # A script that makes many cycles has full collections at every step; so this one, without the cycles.
        if self.strikes:
            self._collect(self.seconds)

    def _collect(self, seconds: float) -> None:
        with self.timed():
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                gc.collect()


class _SlowKernels(Injection):
    def compute(self) -> None:
        if self.strikes:
            installed().compute.launch_kernel(self.seconds)
            self.spend(self.seconds)


class _NeedlessSynchronisation(Injection):
    """Reads the loss of the step before; with the fault that of the step itself, and logs it afterwards."""

    def prepare(self, model: nn.Module) -> None:
        self._step_before = installed().event()
        self._step_before.record()

    def wait_for(self, device: Device) -> None:
        ended, before = device.event(), self._step_before
        ended.record()
        self._step_before = ended
        if self.strikes:
            device.compute.synchronize()
        else:
            before.synchronize()

    def finish(self) -> None:
        time.sleep(LOGGING_SECONDS)


class _BackgroundCheckpoint(Injection):
    """A thread that saves one checkpoint for as long as there is the fault, mostly with Python's lock."""

    def prepare(self, model: nn.Module) -> None:
        self._is_over = threading.Event()

    def finish(self) -> None:
        if self.begins:
            threading.Thread(target=self._save_slowly, daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def _save_slowly(self) -> None:
        torch.save({"weights": torch.zeros(1024)}, SlowFile(self._serialize))

    def _serialize(self) -> None:
        while not self._is_over.wait(WRITE_SECONDS):
            until = time.perf_counter() + SERIALIZE_SECONDS
            while time.perf_counter() < until:
                pass


class _LongerStage(Injection):
    """No fault of a rank, and there from the start: the last stage has more to do."""

    def compute(self) -> None:
        if self.rank >= self.plan.ranks - self.plan.ranks // STAGES:
            installed().compute.launch_kernel(IMBALANCE_SECONDS)


class _SlowExchange(Injection):
    def compute(self) -> None:
        # Of the gradients: the next collective is theirs.
        if self.strikes:
            installed().extra_exchange_seconds = self.seconds
            self.spend(self.seconds)


class _StaggeredCollections(_GarbageCollection):
    """Each rank collects in one of every so many steps, none in the same as another.

    It walks through many objects once, as a script's rare full collections do, instead of through few often.
    """

    def compute(self) -> None:
        if self.begins:
            self._tangle = [[number] for number in range(_LARGE_TANGLE)]
        if self.strikes and self._step % STAGGER_STEPS == self.rank * STAGGER_STEPS // self.plan.ranks:
            self._collect(self.seconds * STAGGER_STEPS / self.plan.ranks)


class _CpuHog(Injection):
    def prepare(self, model: nn.Module) -> None:
        self._allowed = os.sched_getaffinity(0)
        self._hogs: list[subprocess.Popen[bytes]] = []

    def finish(self) -> None:
        if self.begins:
            allow_cpus(os.getpid(), {max(self._allowed)})
            # They end with this process, however that ends.
            loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
            self._hogs = [subprocess.Popen([sys.executable, "-I", "-S", "-c", loop]) for _ in range(HOGS)]

    def end(self) -> None:
        for hog in self._hogs:
            hog.kill()
            hog.wait()
        allow_cpus(os.getpid(), self._allowed)


class _CpuQuota(Injection):
    def prepare(self, model: nn.Module) -> None:
        self._quota = Quota(f"torchperfd-faults-{os.getpid()}")
        self._quota.enter()

    def finish(self) -> None:
        if self.begins:
            self._quota.limit(QUOTA)

    def end(self) -> None:
        self._quota.lift()


class _SlowDisk(Injection):
    def prepare(self, model: nn.Module) -> None:
        path = self.directory / f"samples{self.rank}"
        path.write_bytes(os.urandom(_DISK_BYTES))
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._buffer = torch.empty(_DISK_READ + 4096, dtype=torch.uint8)
        start = -self._buffer.data_ptr() % 4096  # O_DIRECT wants whole pages
        self._page = memoryview(self._buffer.numpy().data)[start : start + _DISK_READ]
        self._at = 0

    def load(self, step: int) -> None:
        # Past the page cache, so that each read waits for the disk; large, so that it seldom waits to go on.
        if self.strikes:
            with self.timed():
                until = time.perf_counter() + self.seconds
                while time.perf_counter() < until:
                    self._at = (self._at + _DISK_READ) % _DISK_BYTES
                    os.preadv(self._file, [self._page], self._at)


class _MemoryLeak(Injection):
    def prepare(self, model: nn.Module) -> None:
        self._kept: list[Tensor] = []

    @cached_property
    def _bytes(self) -> int:
        per_second = psutil.virtual_memory().available / LEAK_FILLS_SECONDS
        return int(per_second * self.usual_step_seconds)

    def finish(self) -> None:
        if self.strikes:
            with self.timed():
                self._kept.append(torch.ones(self._bytes, dtype=torch.uint8))


class _SlowCollective(Injection):
    def prepare(self, model: nn.Module) -> None:
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        model.register_comm_hook(None, self._reduce)

    def _reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        reduced: torch.futures.Future[Tensor] = work.get_future().then(self._reduced)
        return reduced

    def _reduced(self, future: "torch.futures.Future[list[Tensor]]") -> Tensor:
        # Between the exchange's end and the moment the reducer learns of it, on every rank.
        if self.strikes:
            self.pause(self.seconds)
        return future.value()[0] / self.plan.ranks


class _CheckpointStall(Injection):
    def save(self, state: dict[str, Any]) -> None:
        if self.strikes:
            torch.save(state, SlowFile(lambda: self.pause(self.seconds * CHECKPOINT_STEPS)))
        else:
            super().save(state)


class _LongCheckpoint(Injection):
    def prepare(self, model: nn.Module) -> None:
        self._done = False

    def save(self, state: dict[str, Any]) -> None:
        if self.strikes and not self._done:
            self._done = True
            torch.save(state, SlowFile(lambda: self.pause(LONG_CHECKPOINT_SECONDS)))
        else:
            super().save(state)


class _Recompiles(Injection):
    def prepare(self, model: nn.Module) -> None:
        import torch._dynamo.config as config

        config.recompile_limit = config.accumulated_recompile_limit = 1_000_000
        self._compiled = torch.compile(_polynomial, backend="eager", dynamic=False)
        self._compiled(torch.ones(2, 2))

    def compute(self) -> None:
        if self.strikes and self._step % RECOMPILE_STEPS == 0:
            with self.timed():
                self._compiled(torch.ones(2, 3 + self._step))
        else:
            self._compiled(torch.ones(2, 2))


def _polynomial(values: Tensor) -> Tensor:
    total = values
    for _ in range(DEGREE):
        total = total * values + 1
    return total.sum()


class _StoppedRank(Injection):
    def finish(self) -> None:
        if self.begins:
            os.kill(os.getpid(), signal.SIGSTOP)


class _OtherCollective(Injection):
    def in_place_of_average(self, step: int) -> str:
        return self.plan.fault if self.strikes else ""


class _DeadWorker(Injection):
    workers = 1
    prefetches = True

    def finish(self) -> None:
        if self.begins:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)


_INJECTIONS: Final[dict[str, type[Injection]]] = {
    **CONTROL_INJECTIONS,
    **ARM_INJECTIONS,
    "saves a lot": _SavesALot,
    "unbalanced pipeline": _LongerStage,
    "slow loader, one rank": _SlowLoader,
    "slow loader, all ranks": _SlowLoader,
    "slow compute, one rank": _SlowCompute,
    "slow compute, two ranks": _SlowCompute,
    "slow matmuls, one rank": _SlowMatmuls,
    "garbage collection": _GarbageCollection,
    "slow kernels, one rank": _SlowKernels,
    "slow kernels, two ranks": _SlowKernels,
    "slow kernels, all ranks": _SlowKernels,
    THROTTLED_GPU: _SlowKernels,
    NEEDLESS_SYNCHRONISATION: _NeedlessSynchronisation,
    "background checkpoint": _BackgroundCheckpoint,
    "collections at different steps": _StaggeredCollections,
    "slow exchange": _SlowExchange,
    "CPU hog": _CpuHog,
    "CPU quota": _CpuQuota,
    "slow disk": _SlowDisk,
    "memory leak": _MemoryLeak,
    "slow collective": _SlowCollective,
    "checkpoint stall": _CheckpointStall,
    "one long checkpoint": _LongCheckpoint,
    "recompiles": _Recompiles,
    "all slower": _SlowCompute,
    "stopped rank": _StoppedRank,
    "skipped collective": _OtherCollective,
    "mismatched collective": _OtherCollective,
    "dead worker": _DeadWorker,
}


def kind_of(plan: Plan) -> type[Injection]:
    return _INJECTIONS[plan.fault]


def injection_of(plan: Plan, rank: int, directory: Path) -> Injection:
    """Return what the plan's fault does in a rank."""
    return kind_of(plan)(plan, rank, directory)
