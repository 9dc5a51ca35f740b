"""Measures how fast a DataLoader gives batches under one setting, and what a batch holds. Imports torch.

Without workers, draws are sampled meanwhile: what the rule on workers depends on.
"""

import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from torchperfd.errors import TorchperfdError
from torchperfd.hooks.loader_use import describe_batches
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.process import available_cpus, thread_queued_ns
from torchperfd_cli.bench.loader_process import DEFAULT_PREFETCH, LoaderDescription, LoaderSetting, Speed

_MAX_PARTS: Final = 256


class BatchShape(NamedTuple):
    """What a batch holds.

    Attributes:
        samples: In the first dimension of its first tensor; one where that cannot be seen.
    """

    samples: int
    tensors: int
    size: int


def batch_shape(batch: Any) -> BatchShape:
    """Return what a batch of lists, tuples and dicts of tensors holds."""
    samples = tensors = size = 0
    parts = [batch]
    for _ in range(_MAX_PARTS):
        if not parts:
            break
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            samples = samples or (part.shape[0] if part.ndim else 0)
            tensors += 1
            size += part.nbytes
        elif isinstance(part, (list, tuple)):
            parts += reversed(part)
        elif isinstance(part, dict):
            parts += reversed(list(part.values()))
    return BatchShape(samples or 1, tensors, size)


_EVERY_NS: Final = 20_000_000
"""A sample takes some 50 µs, which is to be lost in a draw of any length."""


class DrawSampler:
    """Draws batches, and samples a draw and the rest of its step now and then.

    Args:
        about: The loader's batch size (0: not its own), whether its dataset is indexable, whether shuffled.
        has_step: Whether the rest of a training step follows each draw.
    """

    def __init__(self, about: tuple[int, bool, bool], *, has_step: bool) -> None:
        self._about = about
        self._has_step = has_step
        self._due = 0
        self._ended: tuple[int, int, int, int] | None = None
        # Sums of all samples, in ns.
        self._draw = self._draw_cpu = 0
        self._rest = self._rest_cpu = 0
        self._queued = self._own_cpu = 0

    def draw(self, batches: Iterator[Any]) -> Any:
        """Return the next batch."""
        now = time.perf_counter_ns()
        if self._ended is not None:
            self._add_rest(now, *self._ended)
            self._ended = None
        if now < self._due:
            return next(batches)
        self._due = now + _EVERY_NS
        queued, cpu = thread_queued_ns(), time.thread_time_ns()
        began = time.perf_counter_ns()
        batch = next(batches)
        took = time.perf_counter_ns() - began
        self._draw_cpu += time.thread_time_ns() - cpu
        self._draw += max(1, took - (thread_queued_ns() - queued))
        self._ended = (time.perf_counter_ns(), time.process_time_ns(), queued, cpu)
        return batch

    def _add_rest(self, now: int, ended: int, process_cpu: int, queued: int, cpu: int) -> None:
        self._rest += now - ended
        self._rest_cpu += time.process_time_ns() - process_cpu
        self._queued += thread_queued_ns() - queued
        self._own_cpu += time.thread_time_ns() - cpu

    def facts(self, shape: BatchShape) -> LoaderFacts:
        """Return the means of the samples."""
        batch_size, is_indexable, is_shuffled = self._about
        runnable = self._queued + self._own_cpu
        return LoaderFacts(
            cpus=available_cpus(),
            draw_cpu=min(1.0, self._draw_cpu / self._draw) if self._draw else None,
            rest_cpus=self._rest_cpu / self._rest if self._has_step and self._rest else None,
            batch_tensors=shape.tensors,
            batch_bytes=shape.size,
            batch_size=batch_size,
            indexable=is_indexable,
            shuffles=is_shuffled,
            batches_per_step=1.0,
            queued=self._queued / runnable if runnable else None,
        )


Step = Callable[[Any], Any]
"""The rest of a training step: takes a batch."""

_MIN_BLOCKS: Final = 5
# A loader whose batches take seconds is measured for longer, up to this many times as long as asked for.
_MAX_FACTOR: Final = 5.0


def loader_description(loader: "DataLoader[Any]", *, has_step: bool) -> LoaderDescription:
    """Return what a loader is like, without drawing from it."""
    batcher = loader.batch_sampler
    context = loader.multiprocessing_context
    method = context.get_start_method() if loader.num_workers and context is not None else ""
    current = LoaderSetting(
        workers=loader.num_workers,
        batch_size=batcher.batch_size if type(batcher) is BatchSampler else None,
        prefetch=(loader.prefetch_factor or DEFAULT_PREFETCH) if loader.num_workers else 0,
        pin_memory=loader.pin_memory,
        start_method=method,
    )
    return LoaderDescription(
        current=current,
        can_batch=current.batch_size is not None,
        has_step=has_step,
        cpus=available_cpus(),
        has_device=torch.cuda.is_available(),
    )


def measure_loader(
    loader: "DataLoader[Any]", setting: LoaderSetting, seconds: float, step: Step | None = None
) -> Speed:
    """Draw from a loader under a setting for some seconds, once its workers have started.

    Args:
        loader: Is not changed; the one that is measured shares its dataset.
        seconds: How long, start not included. Up to five times as long where batches take long.

    Raises:
        TorchperfdError: The loader has no batch.
    """
    with operator_threads(setting):
        began = time.perf_counter()
        batches = endless_batches(with_setting(loader, setting))
        try:
            first = next(batches)
            start = time.perf_counter() - began
            # What the workers had ready before the loop asked for it is drawn first.
            for batch in itertools.islice(batches, setting.workers * setting.prefetch):
                if step is not None:
                    step(batch)
                if time.perf_counter() - began - start > seconds:
                    break
            # What workers do cannot be seen from here.
            sampler = None if setting.workers else _sampler(loader, has_step=step is not None)
            return _measure(batches, first, setting, seconds, start, step, sampler)
        finally:
            batches.close()  # type: ignore[attr-defined]  # a generator: ends the workers


@contextlib.contextmanager
def operator_threads(setting: LoaderSetting) -> Iterator[None]:
    """Have torch's operators use a setting's number of threads, where it has one."""
    own = torch.get_num_threads()
    if setting.threads:
        torch.set_num_threads(setting.threads)
    try:
        yield
    finally:
        torch.set_num_threads(own)


def with_setting(loader: "DataLoader[Any]", setting: LoaderSetting) -> "DataLoader[Any]":
    """Return a loader of the same class and dataset with another setting, which never runs out of batches.

    A loader cannot be given another batch size, nor be made anew where it is of a class of the script's own.
    So a copy of it gets the arguments directly, as the loader keeps them.
    """
    changed = copy.copy(loader)
    held = vars(changed)
    held.update(
        num_workers=setting.workers,
        prefetch_factor=setting.prefetch if setting.workers else None,
        pin_memory=setting.pin_memory,
        persistent_workers=False,
    )
    if setting.workers and setting.start_method:
        changed.multiprocessing_context = setting.start_method
    batcher = loader.batch_sampler
    if setting.batch_size is not None and type(batcher) is BatchSampler:
        batcher = BatchSampler(batcher.sampler, setting.batch_size, batcher.drop_last)
        held["batch_size"] = setting.batch_size
    if not isinstance(loader.dataset, IterableDataset):
        # A pass over a small dataset would end within the measurement, and its workers with it.
        if batcher is not None:
            batcher = _Repeated(batcher)
        else:
            held["sampler"] = _Repeated(loader.sampler)
    held["batch_sampler"] = batcher
    return changed


class _Repeated:
    """A sampler again and again."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        # Of indices, also where batches are made of them.
        sampler = getattr(self._sampler, "sampler", self._sampler)
        for epoch in itertools.count():
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
            is_empty = True
            for each in self._sampler:
                is_empty = False
                yield each
            if is_empty:
                return


def endless_batches(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Yield batches without end, over as many passes as it takes.

    Raises:
        TorchperfdError: The loader has no batch.
    """
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise TorchperfdError("the loader has no batch", "give its dataset some items")


def _measure(
    batches: Iterator[Any],
    first: Any,
    setting: LoaderSetting,
    seconds: float,
    start: float,
    step: Step | None,
    sampler: DrawSampler | None,
) -> Speed:
    # Workers give batches in turns, so that only as many as there are workers take as long as the next ones.
    per_block = max(1, setting.workers)
    blocks: list[float] = []
    waits = 0.0
    samples = 0
    if step is not None:
        step(first)
        wait_for_device()
    began = now = time.perf_counter()
    while now - began < seconds or (len(blocks) < _MIN_BLOCKS and now - began < _MAX_FACTOR * seconds):
        block_began = now
        for _ in range(per_block):
            asked = time.perf_counter()
            batch = next(batches) if sampler is None else sampler.draw(batches)
            waits += time.perf_counter() - asked
            samples += batch_shape(batch).samples
            if step is not None:
                step(batch)
                wait_for_device()
        now = time.perf_counter()
        blocks.append((now - block_began) / per_block)
    drawn = len(blocks) * per_block
    quartiles = statistics.quantiles(blocks, n=4) if len(blocks) > 1 else [blocks[0]] * 3
    return Speed(
        samples_per_second=samples / (now - began),
        spread=(quartiles[2] - quartiles[0]) / 2 / max(quartiles[1], 1e-12),
        batch_seconds=(now - began) / drawn,
        wait_seconds=waits / drawn,
        start_seconds=start,
        batches=drawn,
        batch_bytes=batch_shape(batch).size,
        loader=None if sampler is None else sampler.facts(batch_shape(batch)),
    )


def _sampler(loader: "DataLoader[Any]", *, has_step: bool) -> DrawSampler:
    about = describe_batches(loader.batch_sampler, loader.collate_fn, loader.dataset)
    return DrawSampler(about, has_step=has_step)


def wait_for_device() -> None:
    """Wait until the CUDA device, if one is in use, has done its work."""
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        cuda.synchronize()
