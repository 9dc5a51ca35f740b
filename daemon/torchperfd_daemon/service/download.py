"""Downloads: a capture's file in pieces, from any offset on."""

import asyncio
import hashlib
import io
import os
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.captures.folder import ANALYSIS
from torchperfd_daemon.captures.manifest import FILE_NAME
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.service.audit import AuditLine
from torchperfd_daemon.service.permissions import Rights

_PIECE_BYTES: Final = 1024 * 1024


async def pieces(
    catalog: Catalog, request: control_pb2.DownloadRequest, rights: Rights, line: AuditLine
) -> AsyncIterator[control_pb2.DownloadPiece]:
    """Yield a file of a capture from the offset asked for to its end.

    The manifest is built from the capture's record, so that there is one even where only ranks wrote
    theirs. Every other file is one that the manifest names.

    Raises:
        NotAllowedError: The capture is of another user's run.
        NoSuchTargetError: There is no such capture, or it has no such file.
        UsageError: The offset is beyond the file's end.
        TorchperfdError: The file is another user's.
    """
    # On a thread: reading may wait for a disk, and hashing takes a millisecond per piece.
    file, users = await asyncio.to_thread(_open, catalog, request.capture_id, request.file, rights)
    try:
        size = file.seek(0, os.SEEK_END)
        if request.offset > size:
            raise UsageError(
                f"{request.file[:80]!r} has {size} bytes, fewer than the offset {request.offset}",
                "delete the partial file and download it anew",
            )
        file.seek(request.offset)
        line.allowed(users)
        digest = hashlib.sha256()
        while data := await asyncio.to_thread(_next, file, digest):
            yield control_pb2.DownloadPiece(data=data, size=size)
        yield control_pb2.DownloadPiece(size=size, sha256=digest.hexdigest())
    finally:
        file.close()


def _open(catalog: Catalog, capture_id: str, name: str, rights: Rights) -> tuple[BinaryIO, set[int]]:
    record = catalog.get(capture_id)
    # Manifests of older versions name no users: only administrators may download those captures.
    rights.check(f"capture {capture_id}", record.users)
    if name == FILE_NAME:
        return io.BytesIO(record.encode()), record.users
    if name == ANALYSIS:
        return io.BytesIO(catalog.analysis(capture_id)), record.users
    if not name or name not in {trace.file for trace in record.ranks}:
        raise NoSuchTargetError(
            f"capture {capture_id} has no file {name[:80]!r}", "its manifest names those it has"
        )
    return catalog.open_own(capture_id, name), record.users


def _next(file: BinaryIO, digest: "hashlib._Hash") -> bytes:
    data = file.read(_PIECE_BYTES)
    digest.update(data)
    return data
