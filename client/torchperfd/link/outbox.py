"""Messages that wait to be sent: bounded, with a count of dropped steps."""

import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

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
        """Whether nothing more will come."""
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
