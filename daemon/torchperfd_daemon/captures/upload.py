"""Uploads one capture: its traces, and last its manifest, so that an upload with a manifest is complete."""

import asyncio
import errno
import hashlib
import io
from dataclasses import dataclass
from typing import BinaryIO, Final

from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import ChangedError, Destination, UploadError
from torchperfd_daemon.captures.folder import Found
from torchperfd_daemon.captures.manifest import FILE_NAME, CaptureState, RankTrace
from torchperfd_daemon.captures.receipt import Receipt, Upload
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
