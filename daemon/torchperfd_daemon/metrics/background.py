"""The health of the daemon's background workers, as metrics."""

from collections.abc import Iterator, Sequence

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.collectors.base import Family


class BackgroundMetrics:
    """A metrics source about the daemon's background workers."""

    def __init__(self, workers: Sequence[WorkerHealth]) -> None:
        self._workers = workers

    def families(self) -> Iterator[Family]:
        """Return each worker's failures, and the time of its last success."""
        failures = Family(
            "background_failures", "Rounds that a background worker could not finish.", "counter", ("worker",)
        )
        for each in self._workers:
            failures.add(each.failures, each.worker)
        yield failures
        success = Family(
            "background_last_success_timestamp_seconds",
            "When a background worker last finished a round.",
            "gauge",
            ("worker",),
        )
        for each in self._workers:
            if each.last_success_unix_seconds:
                success.add(each.last_success_unix_seconds, each.worker)
        yield success
