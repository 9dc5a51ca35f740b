"""The daemon's metrics about itself: its process, its calls, and the errors in its log."""

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.exposition import PREFIX


@dataclass(slots=True)
class CallCounts:
    """The calls on the daemon's socket and on the fleet's port that have ended.

    Attributes:
        ended: By method, such as ``Control/ListRuns``, and the name of the gRPC status.
        seconds: Time from each call's arrival to its end, summed by method.
    """

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class _ErrorCount(logging.Handler):
    """Counts records of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record; logging calls this under the handler's lock."""
        self.errors += 1


class DaemonHealth:
    """A metrics source over the daemon itself.

    Args:
        proc: Where the kernel's facts on processes are.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self.calls = CallCounts()
        self._process = ProcessCollector(f"{PREFIX}daemon", proc=proc, registry=None)
        self._log = _ErrorCount()

    @contextlib.contextmanager
    def counting_errors(self) -> Iterator[None]:
        """Count the errors that any logger writes within the block."""
        root = logging.getLogger()
        root.addHandler(self._log)
        try:
            yield
        finally:
            root.removeHandler(self._log)

    def families(self) -> Iterator[Family | Metric]:
        """Return the process's families, then those of calls and of the log."""
        yield from self._process.collect()
        calls = Family(
            "daemon_calls", "Calls of clients and peers that have ended.", "counter", ("method", "code")
        )
        for (method, code), count in self.calls.ended.items():
            calls.add(count, method, code)
        seconds = Family("daemon_call_seconds", "Time of these calls.", "counter", ("method",))
        for method, total in self.calls.seconds.items():
            seconds.add(total, method)
        errors = Family("daemon_logged_errors", "Errors that the daemon logged.", "counter")
        errors.add(self._log.errors)
        yield from (calls, seconds, errors)
