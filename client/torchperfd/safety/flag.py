"""An event for threads that a signal handler may set or wait for in the middle of doing just that.

``threading.Event`` takes a lock in both. A handler that interrupts one on the main thread and comes to the
same event waits for that lock, and the interrupted code never gets to release it.
"""

from queue import Empty, SimpleQueue

from torchperfd.safety.interrupts import is_from_script


class Flag:
    """Is set once, and stays set."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[SimpleQueue[None]] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Wake up every thread that waits, and let no later one wait."""
        self._is_set = True
        for queue in tuple(self._waiting):
            queue.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for ``timeout`` seconds; return whether it is."""
        if self._is_set:
            return True
        queue: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(queue)
        try:
            if not self._is_set:
                queue.get(timeout=timeout)
        except Empty as error:
            if is_from_script(error):
                raise
        finally:
            self._waiting.remove(queue)
        return self._is_set
