"""The injections of the arm *causes*: faults of the kind that owners of training scripts report."""

import math
import multiprocessing
import os
import random
import statistics
import threading
import time
from typing import Final

import torch
import torch.distributed as dist
from benchmarks.faults.catalog import PERIOD_STEPS
from benchmarks.faults.injection import Injection, allow_cpus, burn
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, GradBucket, set_debug_level
from torch.utils.data import get_worker_info

DECODE_SECONDS: Final = 0.1
"""CPU time of a worker of a pinned job for a batch: two workers keep up on two CPUs, and not on one."""
THREADED_OPERATIONS: Final = 12
THREADED_SIZE: Final = 200_000
"""Elements of an operation that several threads share."""
KEPT_FLOATS: Final = 4_096
"""What a step that keeps its graph adds to it."""
CHECKED_PARTS: Final = 16
"""Collectives of a step whose groups are checked."""
GROWN_STEPS: Final = 200
"""Steps that grow are longer by the plan's seconds after so many."""

_SPREAD: Final = 0.7
"""The standard deviation of the logarithm of a rank's work."""
_SHORT: Final = (4, 16)
_LONG: Final = (32, 64)
_LONG_SHARE: Final = 0.3
"""Batches have these lengths, and this share of them is long."""
_DRAWS: Final = 4_000


class UnevenWork(Injection):
    """The work of a step is shared out unevenly among the ranks, without the fault equally.

    Its sum over the ranks is the same with the fault and without. ``plan.seconds`` is by how much the mean of
    the largest share exceeds the mean share.
    """

    def prepare(self, model: nn.Module) -> None:
        """Find the unit of work with which the fault costs what the plan says."""
        chance = random.Random(0)
        drawn = [self.draw(chance) for _ in range(_DRAWS)]
        excess = statistics.fmean(max(each) - statistics.fmean(each) for each in drawn)
        self._unit = self.plan.seconds / excess

    def draw(self, chance: random.Random) -> list[float]:
        """Return the work of each rank in one step, in any unit."""
        raise NotImplementedError

    def shares(self, step: int) -> list[float]:
        """Return the work of each rank in a step, in the unit of :meth:`draw`; all ranks draw alike."""
        works = self.draw(random.Random(f"{self.plan.seed}/{step}"))
        return works if self.strikes else [statistics.fmean(works)] * len(works)

    def compute(self) -> None:
        """Do this rank's share."""
        self.work(self._unit * self.shares(self._step)[self.rank])


class _RotatingWork(UnevenWork):
    """In each step one rank does all of it."""

    def draw(self, chance: random.Random) -> list[float]:
        late = chance.randrange(self.plan.ranks)
        return [float(rank == late) for rank in range(self.plan.ranks)]


class _LognormalWork(UnevenWork):
    def draw(self, chance: random.Random) -> list[float]:
        return [math.exp(chance.gauss(0.0, _SPREAD)) for _ in range(self.plan.ranks)]


class _UnsortedLengths(UnevenWork):
    """Batches are as long as their longest sample. Sorted by length, those of a step are equally long."""

    def draw(self, chance: random.Random) -> list[float]:
        return [
            float(chance.randint(*(_LONG if chance.random() < _LONG_SHARE else _SHORT)))
            for _ in range(self.plan.ranks)
        ]

    def rows(self) -> int:
        return round(self.shares(self._step)[self.rank])


class _HeldInterpreter(Injection):
    """A thread of the script turns its records into text for as long as there is the fault."""

    def prepare(self, model: nn.Module) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serialize, daemon=True)

    def finish(self) -> None:
        if self.begins:
            self._thread.start()

    def end(self) -> None:
        self._is_over.set()

    def _serialize(self) -> None:
        rows = [{"step": number, "loss": number / 3} for number in range(2_000)]
        while not self._is_over.is_set():
            for row in rows:
                str(row)


class _RespawnedWorkers(Injection):
    """Each epoch starts its workers anew, and each opens its index again."""

    workers = 1
    epoch_steps = PERIOD_STEPS

    def start_worker(self, worker: int) -> None:
        time.sleep(self.plan.seconds * self.epoch_steps)

    @property
    def keeps_workers(self) -> bool:
        return not self.strikes


class _SlowWorker(Injection):
    """One of several workers has the slow shard. Batches come in order, so the others wait for it."""

    workers = 3

    def prepare(self, model: nn.Module) -> None:
        self._slow = random.Random(self.plan.seed).randrange(self.workers)
        # The workers are forked before the fault begins.
        self.worker_pause = multiprocessing.Value("d", 0.0, lock=False)

    def load(self, step: int) -> None:
        worker = get_worker_info()
        if worker is not None and worker.id == self._slow:
            time.sleep(self.worker_pause.value)

    def finish(self) -> None:
        if self.begins:
            self.worker_pause.value = self.workers * (self.usual_step_seconds + self.seconds)

    def end(self) -> None:
        self.worker_pause.value = 0.0


class _Pinned(Injection):
    """The process is bound to one CPU, as by an imported library; its workers inherit that."""

    workers = 2

    def prepare(self, model: nn.Module) -> None:
        self._allowed = os.sched_getaffinity(0)
        allow_cpus(os.getpid(), {min(self._allowed)})

    def load(self, step: int) -> None:
        burn(DECODE_SECONDS)

    def end(self) -> None:
        for pid in (os.getpid(), *(worker.pid or 0 for worker in multiprocessing.active_children())):
            allow_cpus(pid, self._allowed)


class _TooManyThreads(Injection):
    """Each rank's operations are shared by as many threads as the node has CPUs."""

    def prepare(self, model: nn.Module) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self._values = torch.ones(THREADED_SIZE)

    def compute(self) -> None:
        for _ in range(THREADED_OPERATIONS):
            torch.sin(self._values)

    def end(self) -> None:
        torch.set_num_threads(1)


class _GrowingSteps(Injection):
    """Each step keeps its part of a graph, and walks through all that is kept."""

    def prepare(self, model: nn.Module) -> None:
        self._kept: list[Tensor] = []

    def compute(self) -> None:
        if self.strikes:
            self._kept.append(torch.ones(KEPT_FLOATS))
            self.pause(self.plan.seconds * len(self._kept) / GROWN_STEPS)

    def end(self) -> None:
        self._kept.clear()


class _AnomalyDetection(Injection):
    def prepare(self, model: nn.Module) -> None:
        torch.autograd.set_detect_anomaly(True)

    def end(self) -> None:
        torch.autograd.set_detect_anomaly(False)


class _DistributedDebug(Injection):
    """Collectives of a group that was made under TORCH_DISTRIBUTED_DEBUG=DETAIL are checked each time.

    The gradients are reduced in parts. Without the fault that is done over a group that is not checked. torch
    2.13 crashes where it makes ``DistributedDataParallel`` on a checked group, so only this hook uses it.
    """

    @classmethod
    def before_groups(cls) -> None:
        set_debug_level(DebugLevel.OFF)

    def prepare(self, model: nn.Module) -> None:
        self._unchecked = dist.new_group()
        set_debug_level(DebugLevel.DETAIL)
        self._checked = dist.new_group()
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        model.register_comm_hook(None, self._reduce)

    def _reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group = self._checked if self.strikes else self._unchecked
        for part in bucket.buffer().chunk(CHECKED_PARTS):
            dist.all_reduce(part, group=group)
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer() / self.plan.ranks)
        return reduced


class _ComputingLoader(Injection):
    """The dataset computes in the training process."""

    def load(self, step: int) -> None:
        if self.strikes:
            with self.timed():
                burn(self.plan.seconds)


class _ComputingScript(Injection):
    """The script computes between its steps' phases, as for metrics in Python."""

    def finish(self) -> None:
        if self.strikes:
            with self.timed():
                burn(self.plan.seconds)


ARM_INJECTIONS: Final[dict[str, type[Injection]]] = {
    "uneven work, rotating": _RotatingWork,
    "uneven work, lognormal": _LognormalWork,
    "uneven work, by length": _UnsortedLengths,
    "interpreter held": _HeldInterpreter,
    "respawned workers": _RespawnedWorkers,
    "one slow worker": _SlowWorker,
    "pinned": _Pinned,
    "more threads than CPUs": _TooManyThreads,
    "growing steps": _GrowingSteps,
    "anomaly detection": _AnomalyDetection,
    "distributed debug": _DistributedDebug,
    "computing loader, all ranks": _ComputingLoader,
    "computing script, all ranks": _ComputingScript,
}
