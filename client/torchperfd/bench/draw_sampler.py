"""Samples draws while ``bench`` measures a loader without workers: what the rule on workers depends on."""

import time
from collections.abc import Iterator
from typing import Any, Final

from torchperfd.bench.batch_shape import BatchShape
from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.steps.cpus import available_cpus, thread_queued_ns

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
        """Return the means of the samples.

        Args:
            shape: Of a batch.
        """
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
