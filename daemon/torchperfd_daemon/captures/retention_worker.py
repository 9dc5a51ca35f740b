"""A thread that keeps the captures directory within its quota."""

import logging
import sqlite3
import threading
from dataclasses import dataclass, field, replace
from typing import Final

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.index import Holding, Index
from torchperfd_daemon.captures.receipt import Upload
from torchperfd_daemon.captures.retention import Reason, Removal, plan
from torchperfd_daemon.errors import TorchperfdError

log = logging.getLogger("torchperfd.captures")

_INTERVAL_S: Final = 60.0
# Changes within folders of ended captures are searched for once an hour: that reads every folder.
_THOROUGH_EVERY: Final = 60


@dataclass(slots=True)
class RetentionCounts:
    """Usage of the directory, and removals since the daemon started; read by the metrics page."""

    captures: int = 0
    bytes: int = 0
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
        """Start the thread."""
        threading.Thread(target=self._run, name="torchperfd-retention", daemon=True).start()

    def stop(self) -> None:
        """Start no further pass; the process may exit safely during one."""
        self._stop.set()

    def enforce(self) -> None:
        """Remove captures beyond the quota, and count the rest.

        Raises:
            TorchperfdError: The directory cannot be read.
        """
        thorough = self._passes % _THOROUGH_EVERY == 0
        self._passes += 1
        if thorough:
            self._catalog.purge_trash()
        with Index(self._catalog.directory, self._catalog.wall) as index:
            index.refresh(thorough=thorough)
            holding = index.holding()
            if self._is_beyond(holding):
                self._remove(index)
                holding = index.holding()
        self.counts.captures, self.counts.bytes = holding.count, holding.bytes
        log.debug("captures directory: %d captures, %d bytes", holding.count, holding.bytes)

    def _run(self) -> None:
        while True:
            try:
                self.enforce()
                self.health.succeeded(self._catalog.wall())
            except Exception as error:
                # Any file may lie in the directory: the daemon goes on, and the next pass tries again.
                expected = isinstance(error, (TorchperfdError, OSError, sqlite3.Error))
                if self.health.failed() or expected:
                    trace = None if expected else error
                    log.warning("the quota of captures is not enforced: %s", error, exc_info=trace)
            if self._stop.wait(_INTERVAL_S):
                return

    def _is_beyond(self, holding: Holding) -> bool:
        quota = self._catalog.quota
        return bool(
            (quota.count and holding.count > quota.count)
            or (quota.bytes and holding.bytes > quota.bytes)
            or (quota.age_seconds and self._catalog.wall() - holding.oldest > quota.age_seconds)
        )

    def _remove(self, index: Index) -> None:
        """Remove by plan; where a folder cannot be removed, plan again, so that the next oldest is."""
        kept_back: set[str] = set()
        while True:
            kept = [
                replace(
                    each,
                    protected=each.protected or each.capture_id in kept_back,
                    unconfirmed=each.unconfirmed and self._uploads,
                )
                for each in index.kept()
            ]
            self._refused &= {each.capture_id for each in kept}
            removals = plan(kept, self._catalog.quota, self._catalog.wall(), self._catalog.lacking())
            stayed = {each.capture_id for each in removals if not self._remove_one(each)}
            index.refresh(also=stayed)
            if not stayed:
                return
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
        except TorchperfdError as error:
            if capture_id not in self._refused:
                self._refused.add(capture_id)
                log.warning("capture %s stays although the quota is used up: %s", capture_id, error)
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
