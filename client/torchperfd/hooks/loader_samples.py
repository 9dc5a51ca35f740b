"""Samples of a DataLoader: ready batches, starts of workers, a slow worker, and the stages of a batch.

Without workers, a sampled draw is timed stage by stage. Workers are not timed: about once per second one of
them is asked for its stack, and the shares of the stages among the answers divide the workers' time.
"""

import contextlib
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torchperfd.events import codes
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.patches import keep_out_of_graphs
from torchperfd.hooks.worker_stacks import StackLine, WorkerStacks
from torchperfd.model.source_lines import InputStages
from torchperfd.safety.interrupts import is_from_script


def install_worker_queue(context: HookContext) -> None:
    """Write how many batches are ready ahead of every draw from workers."""
    buffer = context.buffer

    def at_draw(iterator: Any) -> bool:
        if iterator._num_workers:
            buffer.mark(codes.READY, ready_batches(iterator) + 1)
        return False

    for function in (at_draw, ready_batches):
        keep_out_of_graphs(function)
    context.links.before_draw.append(context.guard(at_draw, False))


def ready_batches(iterator: Any) -> int:
    """Return how many batches the workers have ready, -1 where that is unknown."""
    try:
        size: int = iterator._worker_result_queue.qsize()
    except (NotImplementedError, OSError) as error:
        if is_from_script(error):
            raise
        return -1  # macOS has no count; the queue may be closing
    return size


_REMEMBERED_STARTS: Final = 32
_MIN_WAITS: Final = 6
_SLOW_WORKER_SHARE: Final = 0.75
_SLOW_WORKER_DEVIATIONS: Final = 3.0
"""By so many standard deviations of equal workers one of them stands out."""


class WorkerStarts:
    """Times the starts of workers, from the making of an iterator to its first batch.

    Args:
        is_training: Returns whether an iterator that is made now is for training.

    Attributes:
        count: How many there have been.
    """

    def __init__(self, is_training: Callable[[], bool]) -> None:
        self.count = 0
        self._is_training = is_training
        self._durations: deque[int] = deque(maxlen=_REMEMBERED_STARTS)

    @property
    def seconds(self) -> float | None:
        """The mean of the newest starts, without the first, which imports modules; None before a second."""
        durations = list(self._durations)
        return sum(durations) / len(durations) / 1e9 if durations else None

    def begun(self, iterator: Any, began_ns: int) -> None:
        """Have the first draw of an iterator that has started its workers timed.

        Args:
            began_ns: When its making began, on the performance counter.
        """
        if self._is_training():
            self.count += 1
            measure_next(iterator, partial(self._time_first, time.perf_counter_ns() - began_ns))

    def _time_first(self, spent_ns: int, draw: Callable[[], Any]) -> Any:
        began = time.perf_counter_ns()
        batch = draw()
        if self.count > 1:
            self._durations.append(spent_ns + time.perf_counter_ns() - began)
        return batch


def measure_next(iterator: Any, measure: Callable[[Callable[[], Any]], Any]) -> None:
    """Have ``measure`` return an iterator's next batch, once; it is called with what makes the batch."""
    draw = iterator._next_data

    def measured() -> Any:
        vars(iterator).pop("_next_data", None)
        return measure(draw)

    iterator._next_data = keep_out_of_graphs(measured)


class SlowWorker:
    """Samples for which worker the others wait.

    Batches are delivered in order: the training thread waits for one, and keeps those that came earlier. The
    others wait if they have finished all that was asked of them meanwhile. In a loader whose workers are
    equally fast, they are at work on the next batches then.
    """

    def __init__(self) -> None:
        self._awaited: deque[int] = deque(maxlen=_REMEMBERED_STARTS)
        self._workers = 0
        # The number of the batch that the newest draw seen waited for, and its worker.
        self._drawn: tuple[int, int] | None = None

    def clear(self) -> None:
        """Forget the samples: they are of another loader."""
        self._awaited.clear()
        self._drawn = None

    def observe(self, iterator: Any) -> None:
        """Add a sample of an iterator with workers while the training thread may wait for a batch.

        Called on the flushing thread, about once a second.
        """
        with contextlib.suppress(AttributeError, RuntimeError):  # another torch, or changed meanwhile
            tasks = dict(iterator._task_info)
            awaited = tasks.get(iterator._rcvd_idx)
            if awaited is not None:
                self._add(iterator, tasks, awaited[0])

    def at_draw(self, iterator: Any) -> None:
        """Add a sample of the draw before this one, if it was seen as well; called on the training thread.

        What was received while that draw waited has been kept since.
        """
        number, tasks = iterator._rcvd_idx, getattr(iterator, "_task_info", None)
        if tasks is None:  # another torch
            return
        if self._drawn is not None and self._drawn[0] == number - 1:
            self._add(iterator, tasks, self._drawn[1])
        awaited = tasks.get(number)
        self._drawn = (number, awaited[0]) if awaited is not None and len(awaited) == 1 else None

    def _add(self, iterator: Any, tasks: Mapping[int, Sequence[Any]], awaited: int) -> None:
        """Add a sample if the others have finished all that was asked of them, and one worker has not.

        Args:
            tasks: Of each batch that was asked for, its worker's number, and with that the batch once it was
                received.
            awaited: The number of the worker whose batch the training thread waits for.
        """
        self._workers = iterator._num_workers
        unfinished = {task[0] for task in tasks.values() if len(task) == 1}
        if unfinished == {awaited} and any(task[0] != awaited for task in tasks.values()):
            self._awaited.append(int(awaited))

    @property
    def number(self) -> int | None:
        """The worker for which the others wait most often; None if none stands out."""
        samples = Counter(self._awaited)
        total = samples.total()
        if total < _MIN_WAITS:
            return None
        worker, times = samples.most_common(1)[0]
        by_chance = 1 / max(2, self._workers)
        least = total * by_chance + _SLOW_WORKER_DEVIATIONS * math.sqrt(total * by_chance * (1 - by_chance))
        return worker if times >= max(_SLOW_WORKER_SHARE * total, least) else None


def has_all_indices(iterator: Any) -> bool:
    """Return whether an iterator has nothing more to hand to its workers: its last batches are being made."""
    outstanding = getattr(iterator, "_tasks_outstanding", None)
    factor = getattr(iterator, "_prefetch_factor", None)
    if outstanding is None or factor is None:
        return False
    # One may be on its way from one batch to the next.
    return bool(outstanding < iterator._num_workers * factor - 1)


_REMEMBERED_BATCHES: Final = 128
_MIN_STACKS: Final = 8
_ANSWER_S: Final = 0.1
"""A worker waits for a random moment before it answers."""
_FETCHER: Final = "torch/utils/data/_utils/fetch.py"
_PIN: Final = "torch/utils/data/_utils/pin_memory.py"
_OUTSIDE: Final = {"get": "idle", "put": "send"}


class StageSamples:
    """The samples of one loader."""

    def __init__(self, workers: WorkerStacks) -> None:
        self._workers = workers
        # Its own, since the script may have seeded the module's.
        self._chance = random.Random()
        # Of batches made in this process: fetched, collated, pinned; ns.
        self._batches: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED_BATCHES)
        self._stacks: deque[str] = deque(maxlen=_REMEMBERED_BATCHES)
        # Whether the thread that pins memory was doing so.
        self._pins: deque[bool] = deque(maxlen=_REMEMBERED_BATCHES)

    def clear(self) -> None:
        """Forget the samples: they are of another loader."""
        self._batches.clear()
        self._stacks.clear()
        self._pins.clear()

    def timed(self, iterator: Any, draw: Callable[[], Any]) -> Any:
        """Return the batch that ``draw`` makes, and time its stages if this process makes it."""
        fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
        collate = getattr(fetcher, "collate_fn", None)
        if collate is None:
            return draw()
        times: list[int] = []

        def timed_collate(items: Any) -> Any:
            times.append(time.perf_counter_ns())
            batch = collate(items)
            times.append(time.perf_counter_ns())
            return batch

        began = time.perf_counter_ns()
        fetcher.collate_fn = timed_collate
        try:
            batch = draw()
        finally:
            fetcher.collate_fn = collate
        if len(times) == 2:
            pinned = time.perf_counter_ns() - times[1] if getattr(iterator, "_pin_memory", False) else 0
            self._batches.append((times[0] - began, times[1] - times[0], pinned))
        return batch

    def sample_workers(self, iterator: Any) -> None:
        """Ask one worker of an iterator for its stack; on the flushing thread.

        Raises:
            AttributeError: This torch has other iterators.
        """
        workers = iterator._workers
        if not workers:
            return
        # One: the stacks of workers are alike at the same moment, and each costs its worker some time.
        pid = self._chance.choice(workers).pid
        self._stacks.extend(stage_of(stack.lines) for stack in self._workers.read(_ANSWER_S, [pid]))
        pinning = getattr(iterator, "_pin_memory_thread", None)
        if pinning is not None:
            self._pins.append(_is_pinning(pinning.ident))

    def means(self, workers: int, worker_seconds: float | None) -> InputStages | None:
        """Return the means of the samples; None with too few.

        Args:
            workers: Worker processes of the loader.
            worker_seconds: The time of all workers for each batch; None while unknown.
        """
        if not workers:
            batches = list(self._batches)
            if not batches:
                return None
            fetch, collate, pin = (sum(column) / len(batches) / 1e9 for column in zip(*batches, strict=True))
            return InputStages(0, len(batches), fetch, collate, None, pin or None)
        stacks, pins = Counter(self._stacks), list(self._pins)
        total = stacks.total()
        if worker_seconds is None or total < _MIN_STACKS:
            return None
        each = worker_seconds / total
        return InputStages(
            workers,
            total,
            stacks["fetch"] * each,
            stacks["collate"] * each,
            stacks["send"] * each,
            # The thread has as much time for a batch as one worker has for its part of it.
            sum(pins) / len(pins) * worker_seconds / workers if pins else None,
            stacks["idle"] / total,
        )


def stage_of(lines: Sequence[StackLine]) -> str:
    """Return what a worker does: ``fetch``, ``collate``, ``send``, ``idle`` or ``other``.

    Args:
        lines: Innermost first; a forked worker's continue with those of the process that started it.
    """
    loop = next((number for number, line in enumerate(lines) if line.function == "_worker_loop"), None)
    if loop is None:
        return "other"
    for line in reversed(lines[:loop]):
        if line.function == "fetch" and line.file.endswith(_FETCHER):
            return "collate" if line.call == "collate_fn" else "fetch"
    return _OUTSIDE.get(lines[loop].call, "other")


def _is_pinning(ident: int | None) -> bool:
    """Return whether a thread is in torch's copy to pinned memory."""
    frames = sys._current_frames()
    try:
        frame = frames.get(ident or 0)
    finally:
        frames.clear()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "pin_memory" and code.co_filename.endswith(_PIN):
            return True
        frame = frame.f_back
    return False
