"""Samples of the stages in which a batch is made: times in this process, stacks of workers.

Without workers a sampled draw is timed. Workers are not timed: about once a second one of them is asked for
its stack, and the shares of the stages among the answers divide the time of the workers.
"""

import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from torchperfd.input_stages import InputStages
from torchperfd.worker_stacks import StackLine, WorkerStacks

_REMEMBERED: Final = 128
_MIN_STACKS: Final = 8
_ANSWER_S: Final = 0.1
"""A worker waits for a random moment before it answers."""
_FETCHER: Final = "torch/utils/data/_utils/fetch.py"
_PIN: Final = "torch/utils/data/_utils/pin_memory.py"
_OUTSIDE: Final = {"get": "idle", "put": "send"}


class StageSamples:
    """The samples of one loader.

    Args:
        workers: Reads the stacks of workers.
    """

    def __init__(self, workers: WorkerStacks) -> None:
        self._workers = workers
        # Its own, since the script may have seeded the module's.
        self._chance = random.Random()
        # Of batches made in this process: fetched, collated, pinned; ns.
        self._batches: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)
        self._stacks: deque[str] = deque(maxlen=_REMEMBERED)
        # Whether the thread that pins memory was doing so.
        self._pins: deque[bool] = deque(maxlen=_REMEMBERED)

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
