"""Samples of draws: how the training process uses its DataLoader.

A draw is sampled after each flush, about once a second, and costs the training thread some 50 µs.
"""

import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torchperfd.hooks.context import HookContext, HookUnavailableError, own_attribute
from torchperfd.hooks.loader_samples import (
    SlowWorker,
    StageSamples,
    WorkerStarts,
    has_all_indices,
    measure_next,
    ready_batches,
)
from torchperfd.hooks.patches import keep_classes_out_of_graphs, keep_out_of_graphs
from torchperfd.hooks.worker_stacks import WorkerStacks
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.process import available_cpus, thread_queued_ns
from torchperfd.safety.interrupts import is_from_script

_REMEMBERED: Final = 32
"""Samples that the means are over."""
_MIN_WORKER_BATCHES: Final = 4


def install_loader_use(context: HookContext) -> None:
    """Sample draws of the loader, beside the hook that times them."""
    import torch

    sampler, links = context.links.loader_sampler, context.links
    draws = links.draws
    if draws is None:
        raise HookUnavailableError("the hook loader is off")

    def watch() -> None:
        draws.watching = True

    keep_classes_out_of_graphs(LoaderSampler, StageSamples, WorkerStarts)
    sampler.install(watch, torch.is_grad_enabled, describe_loader, torch.Tensor, links.settings.read)

    def at_draw(iterator: Any) -> bool:
        if not iterator._num_workers:
            return sampler.at_draw(iterator, -1)
        if not iterator._num_yielded:
            # What the flushing thread reads of the workers: a torch without it shows here.
            _ = iterator._workers, iterator._rcvd_idx
        return sampler.at_draw(iterator, ready_batches(iterator))

    links.before_draw.append(context.guard(at_draw, False))
    _time_starts(context, context.guard(sampler.starts.begun, None))


def _time_starts(context: HookContext, begun: Callable[[Any, int], None]) -> None:
    """Time how long new workers take to their first batch; persistent workers are started once."""
    from torch.utils.data import dataloader

    workers = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    if workers is None:
        return
    original = own_attribute(workers, "__init__")

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter_ns()
        original(self, *args, **kwargs)
        begun(self, began)

    context.patches.replace(workers, "__init__", keep_out_of_graphs(start))


class LoaderSampler:
    """Takes the samples. Its methods run on the training thread, unless documented otherwise."""

    def __init__(self, workers: WorkerStacks | None = None) -> None:
        self.starts = WorkerStarts(lambda: self._is_training())
        self._slow_worker = SlowWorker()
        self._read_settings: Callable[[], None] = lambda: None
        self._stages = StageSamples(workers or WorkerStacks())
        self._due = False
        self._to_see = 0
        """How many more draws are looked at for a worker that holds up the others."""
        self._watch: Callable[[], None] | None = None
        self._is_training: Callable[[], bool] = lambda: True
        self._describe: Callable[[Any], tuple[int, bool, bool]] = lambda _: (0, False, False)
        self._tensor: Any = None
        self._iterator: Callable[[], Any] = lambda: None
        self._workers = 0
        self._cpus = 0.0
        self._about: tuple[int, bool, bool] = (0, False, False)
        self._batch: tuple[int, int] = (0, 0)
        # Of draws in this process: wall time less what was spent in line for a CPU, and CPU time; ns.
        self._draws: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        # Between draws: wall time, and CPU time of the whole process; ns.
        self._rests: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        # From a sampled draw to the next draw, of this thread: time in line for a CPU, and CPU time; ns.
        self._lines: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        # Of draws that found a batch ready: wall time; ns.
        self._received: deque[int] = deque(maxlen=_REMEMBERED)
        # Of the workers, all together: batches, CPU time, time in line for a CPU, their time; ns.
        self._made: deque[tuple[int, int, int, int]] = deque(maxlen=_REMEMBERED)
        self._last: tuple[Any, int, int, int, int] | None = None
        self._ended: tuple[int, int, int, int] | None = None

    def install(
        self,
        watch: Callable[[], None],
        is_training: Callable[[], bool],
        describe: Callable[[Any], tuple[int, bool, bool]],
        tensor: type,
        read_settings: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            watch: Has the next draw come to :meth:`at_draw`, called on any thread.
            is_training: Whether a draw that begins now is for training.
            describe: Returns an iterator's batch size, whether its dataset is indexable, and whether it
                is shuffled.
            tensor: The class of plain tensors.
            read_settings: Reads how many threads an operation of the calling thread may use. Each thread
                has a number of its own; asked elsewhere, torch would set that, and MKL's for all threads.
        """
        self._read_settings = read_settings
        self._watch, self._is_training, self._describe, self._tensor = watch, is_training, describe, tensor
        self._due = True

    def arm(self) -> None:
        """Have the next draw sampled, and sample a worker; called on the flushing thread."""
        if self._watch is not None:
            self._due = True
            self._watch()
        iterator = self._iterator()
        if iterator is not None and self._workers:
            with contextlib.suppress(AttributeError, OSError):
                self._stages.sample_workers(iterator)

    def at_draw(self, iterator: Any, ready: int) -> bool:
        """Take what a draw that begins may show; return whether the draw after it has to come here as well.

        Args:
            iterator: Whose.
            ready: Batches that its workers have ready; -1 without workers.
        """
        if self._ended is not None:
            wall, cpu, queued, own = self._ended
            self._ended = None
            self._lines.append((thread_queued_ns() - queued, time.thread_time_ns() - own))
            self._rests.append((time.perf_counter_ns() - wall, time.process_time_ns() - cpu))
        if self._to_see and self._workers > 1 and self._iterator() is iterator:
            self._to_see -= 1
            self._slow_worker.at_draw(iterator)
        # The first draw of an iterator starts its workers and shuffles.
        if not self._due or not iterator._num_yielded or not self._is_training():
            return self._due or self._to_see > 0
        self._due = False
        if self._iterator() is not iterator:
            workers = iterator._num_workers
            if workers != self._workers:
                self._draws.clear()
                self._rests.clear()
                self._received.clear()
                self._made.clear()
                self._stages.clear()
                self._slow_worker.clear()
            self._iterator, self._workers = weakref.ref(iterator), workers
            self._about = self._describe(iterator)
        # A batch of each worker, and the draw after them.
        self._to_see = self._workers + 1 if self._workers > 1 else 0
        measure_next(iterator, functools.partial(self._sample, iterator, ready))
        return True

    def _sample(self, iterator: Any, ready: int, draw: Callable[[], Any]) -> Any:
        """Return the batch that ``draw`` makes for an iterator, and keep what that took."""
        queued = thread_queued_ns()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        batch = self._stages.timed(iterator, draw)
        took, own = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        try:
            if ready < 0:
                self._draws.append((max(took - (thread_queued_ns() - queued), 1), own))
            elif ready > 0:
                self._received.append(took)
            self._batch = self._size(batch)
            # On this thread: its affinity, which the workers have too, may differ from that of other threads.
            self._cpus = self._cpus or available_cpus()
            self._read_settings()
            self._ended = (time.perf_counter_ns(), time.process_time_ns(), queued, cpu)
        except Exception as error:  # of a batch that is out of the ordinary, for example
            if is_from_script(error):
                raise
        return batch

    @property
    def workers(self) -> int:
        """Worker processes of the training loader; 0 without, or before a draw was sampled."""
        return self._workers

    def _size(self, batch: Any) -> tuple[int, int]:
        """Return how many tensors a batch holds, and of how many bytes; of plain ones in plain containers."""
        tensors = size = 0
        parts = [batch]
        for _ in range(256):
            if not parts:
                break
            part = parts.pop()
            if self._tensor is not None and type(part) is self._tensor:
                tensors += 1
                size += part.nbytes
            elif type(part) in (list, tuple):
                parts += part[:64]
            elif type(part) is dict:
                parts += list(part.values())[:64]
        return tensors, size

    def use(self, batches_per_step: float, steps: int = 0) -> LoaderFacts | None:
        """Return the means of the samples so far, None before the first; called on the flushing thread.

        Args:
            steps: Training steps so far.
        """
        iterator = self._iterator()
        if iterator is not None and self._workers:
            self._follow_workers(iterator)
            self._slow_worker.observe(iterator)
        if self._batch == (0, 0) and not self._draws and not self._received:
            return None
        batches, cpu, queued, spent = (
            (sum(column) for column in zip(*list(self._made), strict=True)) if (self._made) else (0, 0, 0, 0)
        )
        return LoaderFacts(
            workers=self._workers,
            cpus=self._cpus or None,
            draw_cpu=_ratio([(cpu, wall) for wall, cpu in list(self._draws)]),
            rest_cpus=_ratio([(cpu, wall) for wall, cpu in list(self._rests)]),
            batch_tensors=self._batch[0],
            batch_bytes=self._batch[1],
            batch_size=self._about[0],
            receive_seconds=sum(received) / len(received) / 1e9
            if (received := list(self._received))
            else None,
            worker_cpu_seconds=cpu / batches / 1e9 if batches >= _MIN_WORKER_BATCHES else None,
            worker_queued=min(1.0, queued / spent) if spent else None,
            indexable=self._about[1],
            shuffles=self._about[2],
            batches_per_step=batches_per_step,
            queued=_ratio([(queued, queued + own) for queued, own in list(self._lines)]),
            stages=self._stages.means(self._workers, spent / batches / 1e9 if batches else None),
            starts=self.starts.count if self._workers else 0,
            start_seconds=self.starts.seconds if self._workers else None,
            starts_per_step=self.starts.count / steps if steps and self._workers else 0.0,
            slow_worker=self._slow_worker.number if self._workers > 1 else None,
        )

    def _follow_workers(self, iterator: Any) -> None:
        """Add the workers' CPU time since the last call, as counted by the kernel."""
        try:
            spent = [_schedstat(f"/proc/{worker.pid}/schedstat") for worker in iterator._workers]
            received = iterator._rcvd_idx
            is_ending = has_all_indices(iterator)
        except (AttributeError, OSError, ValueError, IndexError):
            self._last = None
            return
        now = time.monotonic_ns()
        cpu, queued = (sum(column) for column in zip(*spent, strict=True))
        last, self._last = self._last, (self._iterator, received, cpu, queued, now)
        if last is None or last[0] is not self._iterator or received <= last[1] or is_ending:
            # Near its end, workers wait while batches are drawn that they have made before.
            return
        self._made.append((received - last[1], cpu - last[2], queued - last[3], (now - last[4]) * len(spent)))


def describe_loader(iterator: Any) -> tuple[int, bool, bool]:
    """Return an iterator's batch size (0: not its own), whether its dataset is indexable, whether shuffled.

    Indexable is a ``TensorDataset`` that can be indexed by all of a batch at once with the same result.
    """
    return describe_batches(iterator._index_sampler, iterator._collate_fn, iterator._dataset)


def describe_batches(batches: Any, collate: Any, dataset: Any) -> tuple[int, bool, bool]:
    """Return the same of a loader's batch sampler, its function that puts batches together, and dataset."""
    from torch.utils.data import (
        BatchSampler,
        RandomSampler,
        SequentialSampler,
        TensorDataset,
        default_collate,
    )

    if type(batches) is not BatchSampler:
        return 0, False, False
    order = batches.sampler
    shuffles = type(order) is RandomSampler and not order.replacement
    usual = shuffles or type(order) is SequentialSampler
    collated = collate is default_collate
    return batches.batch_size, usual and collated and type(dataset) is TensorDataset, shuffles


def _ratio(pairs: list[tuple[int, int]]) -> float | None:
    whole = sum(below for _, below in pairs)
    return sum(above for above, _ in pairs) / whole if whole else None


def _schedstat(path: str) -> tuple[int, int]:
    """Return CPU time and time waiting for a CPU; ns.

    Raises:
        OSError: The kernel has no such file, or the thread is gone.
    """
    fields = Path(path).read_bytes().split()
    return int(fields[0]), int(fields[1])
