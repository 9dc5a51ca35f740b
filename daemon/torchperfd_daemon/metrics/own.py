"""The daemon's own health, as metrics."""

import platform
from collections.abc import Iterator

from torchperfd._version import __version__
from torchperfd_daemon.captures import CaptureCounts, RetentionCounts
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.store import Store


class OwnMetrics:
    """A metrics source about the daemon itself and its captures."""

    def __init__(self, store: Store, captures: CaptureCounts, kept: RetentionCounts) -> None:
        self._store = store
        self._captures = captures
        self._kept = kept

    def families(self) -> Iterator[Family]:
        """Return build, ingest and capture families."""
        build = Family("build_info", "Versions.", "gauge", ("version", "python_version"))
        build.add(1, __version__, platform.python_version())
        yield build
        clients = Family("clients", "Training processes connected now.", "gauge")
        clients.add(self._store.connected())
        yield clients
        ingested = Family("ingest_events", "Steps received.", "counter")
        ingested.add(self._store.ingested_steps)
        yield ingested
        dropped = Family("ingest_dropped_events", "Steps lost on their way, by where.", "counter", ("where",))
        for where, count in {"ring": 0, "outbox": 0, **self._store.dropped()}.items():
            dropped.add(count, where)
        yield dropped
        requests = Family("capture_requests", "Captures that ended.", "counter", ("trigger", "result"))
        for (trigger, result), count in self._captures.requests.items():
            requests.add(count, trigger, result)
        yield requests
        size = Family("capture_bytes", "Bytes of traces captured.", "counter")
        size.add(self._captures.bytes)
        yield size
        active = Family("capture_active", "Captures in progress.", "gauge")
        active.add(self._captures.active)
        yield active
        if self._captures.last_success_unix_seconds:
            last = Family("capture_last_success_timestamp_seconds", "When a capture last completed.", "gauge")
            last.add(self._captures.last_success_unix_seconds)
            yield last
        kept = Family("captures", "Captures in the captures directory.", "gauge")
        kept.add(self._kept.captures)
        yield kept
        kept_size = Family("captures_bytes", "What the captures directory takes on the disk.", "gauge")
        kept_size.add(self._kept.bytes)
        yield kept_size
        removed = Family(
            "captures_removed", "Captures removed to keep to the quota, by its limit.", "counter", ("reason",)
        )
        for reason, count in self._kept.removed.items():
            removed.add(count, reason)
        yield removed
