"""What waits to be sent: bounded, and it says what it threw away."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Between the threads that make messages and the one that sends them.

    Three kinds of message: batches weigh something (steps), and of them the outbox keeps the
    newest ``capacity``; of a message with a topic only the newest is kept; all others (capture
    results, a goodbye) are few and are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[tuple[T, int]] = deque()
        self._topics: dict[str, T] = {}
        self._held = 0
        self._closed = False
        self._ready = threading.Condition(threading.Lock())
        self.dropped = 0
        """Weight thrown away so far."""

    def put(self, item: T, weight: int = 0) -> None:
        """Add a message, at the cost of the oldest batches when there is no room."""
        with self._ready:
            self._items.append((item, weight))
            self._held += weight
            while self._held > self._capacity:
                self._forget_oldest_batch()
            self._ready.notify()

    def put_newest(self, topic: str, item: T) -> None:
        """Replace the message of a topic; it is sent after all that was put before it."""
        with self._ready:
            self._topics[topic] = item
            self._ready.notify()

    def take(self, timeout: float, most: int = 1) -> list[T]:
        """Take up to ``most`` messages, in order.

        None when none came within ``timeout`` seconds, or nothing more will come.
        """
        with self._ready:
            if not self._items and not self._topics and not self._closed:
                self._ready.wait(timeout)
            taken: list[T] = []
            while self._items and len(taken) < most:
                item, weight = self._items.popleft()
                self._held -= weight
                taken.append(item)
            while self._topics and len(taken) < most:
                taken.append(self._topics.pop(next(iter(self._topics))))
            return taken

    def close(self) -> None:
        """Wake up whoever waits; what is held may still be taken."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def __len__(self) -> int:
        return len(self._items) + len(self._topics)

    def _forget_oldest_batch(self) -> None:
        for position, (_, weight) in enumerate(self._items):
            if weight:
                del self._items[position]
                self._held -= weight
                self.dropped += weight
                return
