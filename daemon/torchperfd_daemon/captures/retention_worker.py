"""A thread that keeps the captures directory within its quota."""

import contextlib
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.index import Index
from torchperfd_daemon.captures.manifest import Upload
from torchperfd_daemon.captures.retention import Kept, Reason, Removal, plan
from torchperfd_daemon.errors import TorchperfdError

log = logging.getLogger("torchperfd.captures")

_INTERVAL_S: Final = 60.0
_PURGE_EVERY: Final = 60


@dataclass(slots=True)
class RetentionCounts:
    """Usage of the directory, and removals since the daemon started; read by the metrics page."""

    captures: int = 0
    bytes: int = 0
    disk_free_bytes: int = 0
    disk_size_bytes: int = 0
    """Of the disk that holds the directory; 0 while there is no directory."""
    removed: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Reason})


class RetentionWorker:
    """Enforces the quota every minute, on its own thread since deleting large files takes time.

    Args:
        catalog: The directory, and its quota.
        uploads: Captures are uploaded: those that have not been yet stay, as long as the disk has room.
    """

    def __init__(self, catalog: Catalog, *, uploads: bool = False) -> None:
        self._catalog = catalog
        self._uploads = uploads
        self._passes = 0
        self._refused: set[str] = set()
        self._stop = threading.Event()
        self.counts = RetentionCounts()
        self.health = WorkerHealth("retention")

    def start(self) -> None:
        threading.Thread(target=self._run, name="torchperfd-retention", daemon=True).start()

    def stop(self) -> None:
        """Start no further pass; the process may exit safely during one."""
        self._stop.set()

    def enforce(self) -> None:
        """Remove captures beyond the quota, and count the rest. A step that fails does not keep the next one.

        Raises:
            TorchperfdError: The directory cannot be read.
            OSError: The remains of an interrupted deletion cannot be deleted.
        """
        is_purge_due = self._passes % _PURGE_EVERY == 0
        self._passes += 1
        with contextlib.ExitStack() as steps:
            # In reverse order; each runs whatever the others raise.
            steps.callback(self.measure_disk)
            steps.callback(self._keep_to_quota)
            if is_purge_due:
                steps.callback(self._catalog.purge_trash)

    def _keep_to_quota(self) -> None:
        kept = self._kept()
        if self._is_beyond(kept):
            kept = self._remove(kept)
        self.counts.captures, self.counts.bytes = len(kept), sum(each.bytes for each in kept)
        log.debug("captures directory: %d captures, %d bytes", self.counts.captures, self.counts.bytes)

    def measure_disk(self) -> None:
        """Note the free bytes and the size of the disk; 0 where there is no directory yet."""
        try:
            free, size = self._catalog.disk()
        except OSError:  # no capture has been made yet, or the disk is not mounted
            free = size = 0
        self.counts.disk_free_bytes, self.counts.disk_size_bytes = free, size

    def _run(self) -> None:
        while True:
            try:
                self.enforce()
                self.health.succeeded(self._catalog.wall())
            except Exception as error:
                # Any file may lie in the directory: the daemon goes on, and the next pass tries again.
                expected = isinstance(error, (TorchperfdError, OSError))
                if self.health.failed() or expected:
                    trace = None if expected else error
                    log.warning("the quota of captures is not enforced: %s", error, exc_info=trace)
            if self._stop.wait(_INTERVAL_S):
                return

    def _kept(self) -> list[Kept]:
        return Index(self._catalog.directory, self._catalog.wall()).kept()

    def _is_beyond(self, kept: Sequence[Kept]) -> bool:
        quota = self._catalog.quota
        oldest = min((each.requested_at for each in kept), default=math.inf)
        return bool(
            (quota.count and len(kept) > quota.count)
            or (quota.bytes and sum(each.bytes for each in kept) > quota.bytes)
            or (quota.age_seconds and self._catalog.wall() - oldest > quota.age_seconds)
        )

    def _remove(self, kept: Sequence[Kept]) -> list[Kept]:
        """Remove by plan, and return what is left.

        Where a folder cannot be removed, plan again, so that the next oldest is.
        """
        kept_back: set[str] = set()
        while True:
            protected = [
                replace(
                    each,
                    protected=each.protected or each.capture_id in kept_back,
                    unconfirmed=each.unconfirmed and self._uploads,
                )
                for each in kept
            ]
            self._refused &= {each.capture_id for each in kept}
            removals = plan(protected, self._catalog.quota, self._catalog.wall(), self._catalog.lacking())
            stayed = {each.capture_id for each in removals if not self._remove_one(each)}
            kept = self._kept()
            if not stayed:
                return kept
            kept_back |= stayed

    def _remove_one(self, removal: Removal) -> bool:
        """Remove a capture if its folder, not only the index, allows it."""
        capture_id = removal.capture_id
        try:
            found = self._catalog.found(capture_id)
            if found is None:
                return True
            if not found.managed or found.pinned or found.in_progress(self._catalog.wall()):
                return False
            unconfirmed = self._uploads and found.upload is Upload.PENDING
            if unconfirmed and removal.reason is not Reason.RESERVE:
                return False
            self._catalog.remove(capture_id)
        except Exception as error:
            # One capture that cannot be removed must not keep the others.
            if capture_id not in self._refused:
                self._refused.add(capture_id)
                trace = None if isinstance(error, (TorchperfdError, OSError)) else error
                log.warning(
                    "capture %s stays although the quota is used up: %s", capture_id, error, exc_info=trace
                )
            return False
        self.counts.removed[removal.reason.value] += 1
        if removal.reason is Reason.RESERVE:
            log.warning(
                "removed capture %s, which had not been uploaded: the disk has too little room left",
                capture_id,
            )
        else:
            log.info("removed capture %s to keep to the quota (%s)", capture_id, removal.reason.value)
        return True
