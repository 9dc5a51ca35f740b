"""The workers of a DataLoader as its iterator sees them: their starts, and one that holds the others up."""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_REMEMBERED: Final = 32
_MIN_SAMPLES: Final = 6
_MOST_OF: Final = 0.75
_DEVIATIONS: Final = 3.0
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
        self._durations: deque[int] = deque(maxlen=_REMEMBERED)

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
            iterator._next_data = FirstDraw(self, iterator, time.perf_counter_ns() - began_ns)

    def drawn(self, duration_ns: int) -> None:
        """Add a start: what the making of the iterator and its first draw took."""
        if self.count > 1:
            self._durations.append(duration_ns)


class FirstDraw:
    """Replaces an iterator's method for the next batch, once, and measures it.

    Args:
        starts: Takes the duration.
        iterator: Whose first batch it is.
        spent_ns: What the making of the iterator took.
    """

    def __init__(self, starts: WorkerStarts, iterator: Any, spent_ns: int) -> None:
        self._starts = starts
        self._iterator = iterator
        self._spent_ns = spent_ns
        self._original = iterator._next_data

    def __call__(self) -> Any:
        """Return the first batch."""
        vars(self._iterator).pop("_next_data", None)
        began = time.perf_counter_ns()
        batch = self._original()
        self._starts.drawn(self._spent_ns + time.perf_counter_ns() - began)
        return batch


class SlowWorker:
    """Samples for which worker the others wait.

    Batches are delivered in order: the training thread waits for one, and keeps those that came earlier. The
    others wait if they have finished all that was asked of them meanwhile. In a loader whose workers are
    equally fast, they are at work on the next batches then.
    """

    def __init__(self) -> None:
        self._awaited: deque[int] = deque(maxlen=_REMEMBERED)
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
        if total < _MIN_SAMPLES:
            return None
        worker, times = samples.most_common(1)[0]
        by_chance = 1 / max(2, self._workers)
        least = total * by_chance + _DEVIATIONS * math.sqrt(total * by_chance * (1 - by_chance))
        return worker if times >= max(_MOST_OF * total, least) else None


def has_all_indices(iterator: Any) -> bool:
    """Return whether an iterator has nothing more to hand to its workers: its last batches are being made."""
    outstanding = getattr(iterator, "_tasks_outstanding", None)
    factor = getattr(iterator, "_prefetch_factor", None)
    if outstanding is None or factor is None:
        return False
    # One may be on its way from one batch to the next.
    return bool(outstanding < iterator._num_workers * factor - 1)
