"""Downloads a capture through a daemon: interrupted downloads resume, and every file is verified."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Final

import click

from torchperfd.v1 import control_pb2, control_pb2_grpc
from torchperfd_daemon.captures import CaptureRecord, RankTrace, manifest
from torchperfd_daemon.captures.folder import is_file_name
from torchperfd_daemon.documents import DamagedError, decode_clean
from torchperfd_daemon.errors import TorchperfdError, explained

_MIN_SPEED: Final = 1_000_000.0  # bytes per second; a daemon that sends less is assumed to be stuck
_PATIENCE_S: Final = 60.0
_MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024


def fetch(daemon: control_pb2_grpc.ControlStub, capture_id: str, target: Path) -> None:
    """Download a capture into a directory; the manifest comes last, so that with it the capture is complete.

    Existing traces are verified and kept, partial ones are resumed.

    Raises:
        TorchperfdError: The directory holds another capture, a trace differs from its manifest, or
            nothing can be written.
        NoSuchTargetError: The daemon has no such capture.
    """
    document = _manifest(daemon, capture_id)
    try:
        record = decode_clean(document, CaptureRecord)
    except DamagedError as error:
        raise TorchperfdError(f"the daemon's manifest of {capture_id} is invalid: {error}") from error
    with explained(f"cannot write to {target}"):
        target.mkdir(parents=True, exist_ok=True)
        final = target / manifest.FILE_NAME
        if final.exists():
            raise TorchperfdError(f"{target} exists", "choose another directory with --output")
        for trace in record.ranks:
            if trace.file:
                _fetch_trace(daemon, capture_id, trace, target)
        part = target / f".{final.name}.part"
        # Left by an interrupted download, or created by another user: it is not written through.
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            file.write(document)
        part.replace(final)


def _manifest(daemon: control_pb2_grpc.ControlStub, capture_id: str) -> bytes:
    request = control_pb2.DownloadRequest(capture_id=capture_id, file=manifest.FILE_NAME)
    document = b""
    digest = ""
    for piece in daemon.Download(request, timeout=_PATIENCE_S):
        document += piece.data
        digest = piece.sha256
        if len(document) > _MAX_MANIFEST_BYTES:
            break
    if hashlib.sha256(document).hexdigest() != digest:
        raise TorchperfdError(f"the manifest of {capture_id} was damaged in transfer", "try again")
    return document


def _fetch_trace(
    daemon: control_pb2_grpc.ControlStub, capture_id: str, trace: RankTrace, target: Path
) -> None:
    if not is_file_name(trace.file) or trace.file == manifest.FILE_NAME:
        raise TorchperfdError(f"the manifest of {capture_id} names {trace.file[:80]!r}, which is no trace")
    final = target / trace.file
    if final.exists():
        with final.open("rb") as file:
            if not _is(file, trace):
                raise TorchperfdError(
                    f"{final} exists and is another file", "choose another directory with --output"
                )
        return
    part = target / f".{trace.file}.part"
    with _opened(part) as file:
        begun = file.seek(0, os.SEEK_END)
        if begun:
            click.echo(f"{trace.file}: going on after {begun / 1e6:.1f} MB", err=True)
        whole = begun <= trace.bytes and _receive(daemon, capture_id, trace, file) and _is(file, trace)
        if not whole and begun:
            # The partial file was of another trace, or damaged.
            file.truncate(0)
            whole = _receive(daemon, capture_id, trace, file) and _is(file, trace)
    if not whole:
        part.unlink()
        raise TorchperfdError(
            f"{trace.file} of {capture_id} differs from its manifest, so it was not kept",
            "check the disk on the daemon's node",
        )
    part.replace(final)


def _opened(part: Path) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(part, flags, 0o644), "r+b")  # noqa: PTH123


def _receive(daemon: control_pb2_grpc.ControlStub, capture_id: str, trace: RankTrace, file: BinaryIO) -> bool:
    """Append the missing part of a trace; return whether it arrived intact and with the right size."""
    offset = file.seek(0, os.SEEK_END)
    request = control_pb2.DownloadRequest(capture_id=capture_id, file=trace.file, offset=offset)
    sent = hashlib.sha256()
    claimed = ""
    timeout = _PATIENCE_S + (trace.bytes - offset) / _MIN_SPEED
    for piece in daemon.Download(request, timeout=timeout):
        offset += len(piece.data)
        if piece.size != trace.bytes or offset > trace.bytes:
            return False
        file.write(piece.data)
        sent.update(piece.data)
        claimed = piece.sha256
    return claimed == sent.hexdigest()


def _is(file: BinaryIO, trace: RankTrace) -> bool:
    """Return whether a file is the trace that the manifest describes."""
    if file.seek(0, os.SEEK_END) != trace.bytes:
        return False
    file.seek(0)
    digest = hashlib.sha256()
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest() == trace.sha256
