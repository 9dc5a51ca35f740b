"""A thread that sends one thing at a time: the other side may be slow or dead, and nothing waits for it."""

import threading
from collections.abc import Callable
from typing import Final

_JOIN_S: Final = 1.0


class Sender:
    """Runs one job at a time on a thread of its own. There is no queue: a busy sender takes no job.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run a job; call it only while the sender is not busy."""
        self._thread = threading.Thread(target=job, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait within a job; return whether the sender ends, and the job with it."""
        return self._ending.wait(seconds)

    def close(self) -> None:
        """End waits, and wait up to a second for the job; one that hangs is left behind."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
