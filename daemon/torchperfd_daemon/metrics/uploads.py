"""Uploads of captures, as metrics; only of a daemon that uploads."""

from collections.abc import Iterator

from torchperfd_daemon.captures import UploadCounts
from torchperfd_daemon.collectors.base import Family


class UploadMetrics:
    """A metrics source about the uploads of captures."""

    def __init__(self, counts: UploadCounts) -> None:
        self._counts = counts

    def families(self) -> Iterator[Family]:
        """Return what has been uploaded, and what waits."""
        uploads = Family("captures_uploads", "Tries to upload a capture, by outcome.", "counter", ("result",))
        for result, count in self._counts.results.items():
            uploads.add(count, result)
        yield uploads
        pending = Family("captures_upload_pending", "Captures that wait to be uploaded.", "gauge")
        pending.add(self._counts.pending)
        yield pending
        size = Family("captures_upload_bytes", "Bytes of captures uploaded.", "counter")
        size.add(self._counts.bytes)
        yield size
        if self._counts.last_success_unix_seconds:
            last = Family(
                "captures_upload_last_success_timestamp_seconds", "When a capture was last uploaded.", "gauge"
            )
            last.add(self._counts.last_success_unix_seconds)
            yield last
