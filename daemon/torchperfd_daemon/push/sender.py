"""A thread that sends one thing at a time, and the counts of what became of all that was sent.

The other side may be slow or dead; nothing waits for it.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from torchperfd_daemon.collectors.base import Family

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


@dataclass(slots=True)
class ExportCounts:
    """Messages over OTLP and their data points; a metrics source.

    Attributes:
        messages: By result: sent, ``failed`` (retried until the next interval), ``refused`` by the endpoint,
            and ``skipped`` while the one before was on its way, or the endpoint asked for time.
        points: By result: sent, ``rejected`` by the endpoint out of a message that it took, and ``dropped``
            with their message.
        last_success_unix_seconds: When a message was last sent; 0 for never.
    """

    messages: dict[str, int] = field(
        default_factory=lambda: {"sent": 0, "failed": 0, "refused": 0, "skipped": 0}
    )
    points: dict[str, int] = field(default_factory=lambda: {"sent": 0, "rejected": 0, "dropped": 0})
    last_success_unix_seconds: float = 0.0

    def families(self) -> Iterator[Family]:
        """Yield the counts; the time of the last success only after one."""
        yield _by_result("otlp_messages", "Messages over OTLP, by result.", self.messages)
        yield _by_result("otlp_points", "Data points in these messages, by result.", self.points)
        last = Family("otlp_last_success_timestamp_seconds", "When a message was last sent.", "gauge")
        if self.last_success_unix_seconds:
            last.add(self.last_success_unix_seconds)
        yield last


def _by_result(name: str, text: str, counts: dict[str, int]) -> Family:
    return Family(
        name, text, "counter", ("result",), [((result,), count) for result, count in counts.items()]
    )


@dataclass(slots=True)
class EventCounts:
    """Events on pods; a metrics source.

    Attributes:
        events: By result: ``created``, ``exists`` (a daemon wrote it before), and failed tries.
    """

    events: dict[str, int] = field(default_factory=lambda: {"created": 0, "exists": 0, "failed": 0})

    def families(self) -> Iterator[Family]:
        """Yield the counts."""
        yield _by_result("kubernetes_events", "Events on pods, by result.", self.events)
