"""The outbox of messages that wait to be sent, and the schedule of the flushes that fill it.

The outbox is bounded and counts the steps that it drops; the schedule is pure.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

REPORT_S: Final = 1.0
SHORT_STEPS_S: Final = 4.0
"""Beside short steps: each flush delays one of them by about its own length."""
SHORT_STEP_S: Final = 0.005
WATCHED_S: Final = 0.5
"""While a live page shows the run: a step is to be on the screen within a second."""
_FIRST_STEPS: Final = 10_000
"""Flushes stay frequent for so many steps: users wait for the first ones to show up."""


@dataclass(frozen=True, slots=True)
class FlushState:
    """What the time until the next flush depends on.

    Attributes:
        unix_seconds: The wall clock.
        steps: Training steps so far.
        step_seconds: Their recent mean; 0 before the first.
        is_live: Whether the training thread reads its events itself, as during a capture.
        is_watched: Whether a live page shows the run.
    """

    unix_seconds: float
    steps: int = 0
    step_seconds: float = 0.0
    is_live: bool = False
    is_watched: bool = False


@dataclass(frozen=True, slots=True)
class NextFlush:
    """When to flush next.

    Attributes:
        seconds: Until then, above 0 and at most the interval.
        is_extra: Whether it lies between two regular flushes, for a live page only.
    """

    seconds: float
    is_extra: bool = False


def flush_interval(state: FlushState) -> float:
    """Return the seconds from one regular flush to the next."""
    is_short = 0 < state.step_seconds < SHORT_STEP_S and state.steps >= _FIRST_STEPS
    return SHORT_STEPS_S if is_short and not state.is_live else REPORT_S


def next_flush(state: FlushState) -> NextFlush:
    """Return when to flush next.

    Flushes are aligned to the wall clock, so that all ranks pay the cost at the same moment instead of
    delaying each other.
    """
    regular = _until_multiple_of(flush_interval(state), state.unix_seconds)
    extra = _until_multiple_of(WATCHED_S, state.unix_seconds)
    if state.is_watched and extra < regular:
        return NextFlush(extra, is_extra=True)
    return NextFlush(regular)


def _until_multiple_of(interval: float, unix_seconds: float) -> float:
    return interval - unix_seconds % interval


T = TypeVar("T")


class Outbox(Generic[T]):
    """Between the threads that make messages and the one that sends them.

    Three kinds of message: batches weigh something (steps), and of them the outbox keeps the
    newest ``capacity``; of a message with a topic only the newest is kept; all others (capture
    results, a goodbye) are few and are kept.

    A signal handler may interrupt the main thread in the middle of a ``put`` and come to another one. So the
    main thread only appends a message, without a lock; other threads sort it in. Batches are no concern: only
    a flush puts them, and a flush is not begun within another one.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._arrived: deque[tuple[str | None, T, int]] = deque()
        self._items: deque[tuple[T, int]] = deque()
        self._topics: dict[str, T] = {}
        self._held = 0
        self._closed = False
        self._lock = threading.Lock()
        self._ready: SimpleQueue[None] = SimpleQueue()
        self.dropped = 0
        """Weight thrown away so far."""

    def put(self, item: T, weight: int = 0) -> None:
        """Add a message, at the cost of the oldest batches when there is no room."""
        self._arrive(None, item, weight)

    def put_newest(self, topic: str, item: T) -> None:
        """Replace the message of a topic; it is sent after all that was put before it."""
        self._arrive(topic, item, 0)

    def take(self, timeout: float, most: int = 1) -> list[T]:
        """Take up to ``most`` messages, in order; not on the main thread.

        None when none came within ``timeout`` seconds, or nothing more will come.
        """
        deadline = time.monotonic() + timeout
        while not (self._items or self._topics or self._arrived or self._closed):
            try:
                self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
        with self._lock:
            self._sort()
            taken: list[T] = []
            while self._items and len(taken) < most:
                item, weight = self._items.popleft()
                self._held -= weight
                taken.append(item)
            while self._topics and len(taken) < most:
                taken.append(self._topics.pop(next(iter(self._topics))))
            return taken

    def close(self) -> None:
        """Wake up the thread that waits; what is held may still be taken."""
        self._closed = True
        self._ready.put(None)

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        arrived = tuple(self._arrived)
        topics = {*self._topics, *(topic for topic, _, _ in arrived if topic is not None)}
        return len(self._items) + len(topics) + sum(topic is None for topic, _, _ in arrived)

    def _arrive(self, topic: str | None, item: T, weight: int) -> None:
        self._arrived.append((topic, item, weight))
        if weight or threading.get_ident() != threading.main_thread().ident:
            with self._lock:
                self._sort()
        if self._ready.empty():
            self._ready.put(None)

    def _sort(self) -> None:
        while self._arrived:
            topic, item, weight = self._arrived.popleft()
            if topic is not None:
                self._topics[topic] = item
                continue
            self._items.append((item, weight))
            self._held += weight
            while self._held > self._capacity:
                self._forget_oldest_batch()

    def _forget_oldest_batch(self) -> None:
        for position, (_, weight) in enumerate(self._items):
            if weight:
                del self._items[position]
                self._held -= weight
                self.dropped += weight
                return
