"""Fetching a capture through a daemon: what broke off goes on, and nothing counts before it is verified."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Final

import click

from torchperfd.v1 import control_pb2, control_pb2_grpc
from torchperfd_daemon.captures import RankTrace, manifest
from torchperfd_daemon.captures.folder import is_file_name
from torchperfd_daemon.documents import DamagedError
from torchperfd_daemon.errors import TorchperfdError

_LEAST_SPEED: Final = 1_000_000.0  # bytes a second; a daemon that sends less is taken for stuck
_PATIENCE_S: Final = 60.0
_MOST_MANIFEST_BYTES: Final = 16 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024


def fetch(daemon: control_pb2_grpc.ControlStub, capture_id: str, target: Path) -> None:
    """Download a capture into a directory, whose manifest comes last: with it the capture is whole.

    Traces that are there already are verified and left alone, parts of traces are gone on with.

    Raises:
        TorchperfdError: The directory holds another capture, a trace is not what its manifest
            says, or nothing can be written.
        NoSuchTargetError: The daemon has no such capture.
    """
    document = _manifest(daemon, capture_id)
    try:
        record = manifest.decode(document)
    except DamagedError as error:
        raise TorchperfdError(f"the daemon's manifest of {capture_id} is none: {error}") from error
    try:
        target.mkdir(parents=True, exist_ok=True)
        final = target / manifest.FILE_NAME
        if final.exists():
            raise TorchperfdError(f"{target} exists", "choose another directory with --output")
        for trace in record.ranks:
            if trace.file:
                _fetch_trace(daemon, capture_id, trace, target)
        part = target / f".{final.name}.part"
        # Left by a download that broke off, or put there by somebody else: it is not written through.
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            file.write(document)
        part.replace(final)
    except OSError as error:
        raise TorchperfdError(f"cannot write to {target}: {error.strerror}") from error


def _manifest(daemon: control_pb2_grpc.ControlStub, capture_id: str) -> bytes:
    request = control_pb2.DownloadRequest(capture_id=capture_id, file=manifest.FILE_NAME)
    document = b""
    digest = ""
    for piece in daemon.Download(request, timeout=_PATIENCE_S):
        document += piece.data
        digest = piece.sha256
        if len(document) > _MOST_MANIFEST_BYTES:
            break
    if hashlib.sha256(document).hexdigest() != digest:
        raise TorchperfdError(f"the manifest of {capture_id} came damaged", "try again")
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
            # What lay there was something else, or damaged.
            file.truncate(0)
            whole = _receive(daemon, capture_id, trace, file) and _is(file, trace)
    if not whole:
        part.unlink()
        raise TorchperfdError(
            f"{trace.file} of {capture_id} is not what its manifest says, so it was not kept",
            "look at its disk on the daemon's node",
        )
    part.replace(final)


def _opened(part: Path) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(part, flags, 0o644), "r+b")  # noqa: PTH123


def _receive(daemon: control_pb2_grpc.ControlStub, capture_id: str, trace: RankTrace, file: BinaryIO) -> bool:
    """Append what is missing of a trace; return whether it came as it was sent, and not too much."""
    offset = file.seek(0, os.SEEK_END)
    request = control_pb2.DownloadRequest(capture_id=capture_id, file=trace.file, offset=offset)
    sent = hashlib.sha256()
    claimed = ""
    timeout = _PATIENCE_S + (trace.bytes - offset) / _LEAST_SPEED
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
