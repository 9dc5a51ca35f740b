"""Uploads every capture that has ended, with retries while the destination fails.

The traces are uploaded first and the manifest last, so that an upload with a manifest is complete.
"""

import asyncio
import errno
import hashlib
import io
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import ChangedError, Destination, UploadError
from torchperfd_daemon.captures.folder import Found
from torchperfd_daemon.captures.index import Index
from torchperfd_daemon.captures.manifest import FILE_NAME, CaptureState, RankTrace, Receipt, Upload
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

_FILES_AT_ONCE: Final = 2
# Errors that are no fault of the file.
_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Result of an upload: the receipt, not yet written, and the number of bytes sent."""

    receipt: Receipt
    bytes: int


async def upload(catalog: Catalog, destination: Destination, capture_id: str) -> Uploaded:
    """Upload a capture that has ended; files that are there already are not sent again.

    Its keys are its id and the names in its manifest. A capture whose files do not match its
    manifest is refused: a retry would not help.

    Raises:
        NoSuchTargetError: There is no such capture.
        UploadError: The destination did not take it; another try may go on from there.
        TorchperfdError: It is in progress, or has failed: there is nothing to upload.
    """
    found = await asyncio.to_thread(catalog.found, capture_id)
    if found is None or found.record is None:
        raise NoSuchTargetError(
            f"no capture {capture_id} in {catalog.directory}", "list them with `torchperfd captures list`"
        )
    if found.upload is Upload.NONE:
        state = "in progress" if found.in_progress(catalog.wall()) else found.record.state.value
        if state in (CaptureState.COMPLETE.value, CaptureState.PARTIAL.value):
            state = "another user's, with a manifest that no daemon wrote"
        raise TorchperfdError(f"capture {capture_id} is {state}, so it is not uploaded")
    digest = hashlib.sha256(found.document).hexdigest()
    url = f"{destination.url}/{capture_id}"
    try:
        sent = await _send_traces(catalog, destination, capture_id, _traces(found))
        key = f"{capture_id}/{FILE_NAME}"
        sent += await destination.put(key, io.BytesIO(found.document), len(found.document), digest)
    except ChangedError as error:
        if await asyncio.to_thread(catalog.found, capture_id) is None:
            raise NoSuchTargetError(f"capture {capture_id} was removed meanwhile") from error
        receipt = Receipt(Upload.REFUSED, digest, url, catalog.wall(), error.problem)
        return Uploaded(receipt, 0)
    return Uploaded(Receipt(Upload.DONE, digest, url, catalog.wall()), sent)


def _traces(found: Found) -> list[RankTrace]:
    """Return the traces that a manifest names, each file once.

    Raises:
        ChangedError: It names what is no file of a capture.
    """
    assert found.record is not None
    traces = {trace.file: trace for trace in found.record.ranks if trace.file}
    for name in traces:
        if not folder.is_file_name(name) or name == FILE_NAME:
            raise ChangedError(f"{name[:80]!r} is not the name of a trace")
    return list(traces.values())


async def _send_traces(
    catalog: Catalog, destination: Destination, capture_id: str, traces: list[RankTrace]
) -> int:
    """Upload traces, some at a time; the first error ends the upload. Return the bytes sent."""
    slots = asyncio.Semaphore(_FILES_AT_ONCE)

    async def send(trace: RankTrace) -> int:
        async with slots:
            file = await asyncio.to_thread(_opened, catalog, capture_id, trace.file)
            with file:
                return await destination.put(f"{capture_id}/{trace.file}", file, trace.bytes, trace.sha256)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(trace)) for trace in traces]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return sum(task.result() for task in tasks)


def _opened(catalog: Catalog, capture_id: str, name: str) -> BinaryIO:
    try:
        return catalog.open_own(capture_id, name)
    except TorchperfdError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _PASSING:
            raise UploadError(f"{error.problem}: {error.__cause__.strerror}") from error
        raise ChangedError(error.problem) from error


log = logging.getLogger("torchperfd.captures")

SCAN_S: Final = 10.0
FIRST_DELAY_S: Final = 2.0
MAX_DELAY_S: Final = 900.0
_JITTER: Final = 0.5


@dataclass(slots=True)
class UploadCounts:
    """Counts of uploads since the daemon started; read by the metrics page."""

    results: dict[str, int] = field(default_factory=lambda: {"uploaded": 0, "failed": 0, "refused": 0})
    bytes: int = 0
    pending: int = 0
    last_success_unix_seconds: float = 0.0


class Uploader:
    """Uploads captures one by one, oldest first, with exponential backoff while the destination fails.

    Pending uploads are read from the folders, so a restarted daemon continues where it stopped.

    Args:
        chance: Returns a random number in [0, 1), so that many daemons do not retry at the same moment.
    """

    def __init__(
        self,
        catalog: Catalog,
        destination: Destination,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._catalog = catalog
        self._destination = destination
        self._clock = clock
        self._chance = chance
        self._delay = 0.0
        self._not_before = 0.0
        self._failed: dict[str, int] = {}
        self._unrecorded: set[str] = set()
        self.counts = UploadCounts()
        self.health = WorkerHealth("uploads")

    @property
    def url(self) -> str:
        """Where captures go."""
        return self._destination.url

    async def run(self) -> None:
        while True:
            try:
                pause = await self.upload_pending()
                self.health.succeeded(self._catalog.wall())
            except (TorchperfdError, OSError) as error:
                self.health.failed()
                log.warning("captures are not uploaded: %s", error)
                pause = SCAN_S
            except Exception:
                self.health.failed()
                log.exception("captures are not uploaded: a bug of torchperfd or of obstore")
                pause = MAX_DELAY_S
            await asyncio.sleep(pause)

    async def upload_pending(self) -> float:
        """Upload the pending captures; return the seconds until the next scan.

        Raises:
            TorchperfdError: The captures directory cannot be read.
        """
        waiting = await asyncio.to_thread(self._find_pending)
        self.counts.pending = len(waiting)
        self._failed = {each: self._failed[each] for each in waiting if each in self._failed}
        # Fewest failures first: a capture that the destination never takes does not delay the others.
        for capture_id in sorted(waiting, key=lambda each: self._failed.get(each, 0)):
            if self._clock() < self._not_before:
                break
            if await self._upload(capture_id):
                self.counts.pending -= 1
        return min(SCAN_S, max(FIRST_DELAY_S / 2, self._not_before - self._clock()))

    def _find_pending(self) -> list[str]:
        index = Index(self._catalog.directory, self._catalog.wall())
        return [each for each in index.to_upload() if each not in self._unrecorded]

    async def _upload(self, capture_id: str) -> bool:
        """Upload one capture; return whether it need not be tried again."""
        try:
            done = await upload(self._catalog, self._destination, capture_id)
        except UploadError as error:
            self._back_off(capture_id, error)
            return False
        except TorchperfdError:
            # It was removed or has changed: the next scan reads its new state.
            return True
        self._delay = 0.0
        try:
            await asyncio.to_thread(self._catalog.note_upload, capture_id, done.receipt)
        except TorchperfdError as error:
            # The next daemon uploads it again, and finds the files in place.
            self._unrecorded.add(capture_id)
            log.warning("%s", error)
        # Counted last: until its receipt is written it counts as pending, and never as both.
        self._count(capture_id, done)
        return True

    def _count(self, capture_id: str, done: Uploaded) -> None:
        if done.receipt.upload is Upload.REFUSED:
            self.counts.results["refused"] += 1
            log.warning("capture %s is not uploaded and not retried: %s", capture_id, done.receipt.reason)
            return
        self.counts.results["uploaded"] += 1
        self.counts.bytes += done.bytes
        self.counts.last_success_unix_seconds = done.receipt.at
        log.info("uploaded capture %s to %s", capture_id, done.receipt.url)

    def _back_off(self, capture_id: str, error: UploadError) -> None:
        self._failed[capture_id] = self._failed.get(capture_id, 0) + 1
        self._delay = min(MAX_DELAY_S, self._delay * 2 or FIRST_DELAY_S)
        delay = self._delay * (1 - _JITTER * self._chance())
        self._not_before = self._clock() + delay
        self.counts.results["failed"] += 1
        log.warning("capture %s is not uploaded yet: %s; next try in %.0f s", capture_id, error, delay)
