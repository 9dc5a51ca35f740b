"""The captures of a command: in the directory named, the daemon's, or this user's own.

The directory of a service is the daemon's alone; its captures are listed, and downloaded, through the daemon.
Interrupted downloads resume, and every file is verified.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

import click

from torchperfd.v1 import contract, control_pb2, control_pb2_grpc
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._output import note
from torchperfd_daemon.captures import manifest
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.folder import ANALYSIS, is_file_name, is_id
from torchperfd_daemon.captures.index import Listed, Listing, Query
from torchperfd_daemon.captures.manifest import CaptureRecord, RankTrace, Upload
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, explained
from torchperfd_daemon.untrusted_files import DamagedError, decode_clean

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
            note(f"{trace.file}: going on after {begun / 1e6:.1f} MB")
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


_ANSWER_S: Final = 30.0
_DELETION_S: Final = 300.0
_ANALYSIS_S: Final = 120.0
_LISTED: Final = "list them with `torchperfd captures list`"


class DaemonCatalog:
    """The captures that the daemon lets the caller read, with the methods of ``Catalog`` that commands use.

    Each raises what that of ``Catalog`` does, and TorchperfdError if the daemon does not answer.

    Args:
        directory: The daemon's captures directory, for messages.
        socket: The daemon's socket; the usual places when None.
    """

    def __init__(self, directory: Path, socket: str | None = None) -> None:
        self.directory = directory
        self._socket = socket

    @cached_property
    def _messages(self) -> list[control_pb2.ListedCapture]:
        with connect(self._socket) as daemon:
            return [*daemon.ListCaptures(control_pb2.ListCapturesRequest(), timeout=_ANSWER_S)]

    @property
    def uploads(self) -> bool:
        return any(message.uploads for message in self._messages)

    def ids(self) -> tuple[str, ...]:
        with contextlib.suppress(TorchperfdError):
            return tuple(listed.record.capture_id for listed in self.list().captures)
        return ()

    def folder(self, capture_id: str) -> Path:
        if not is_id(capture_id):
            raise NoSuchTargetError(f"{capture_id[:80]!r} is no capture id", _LISTED)
        return self.directory / capture_id

    def list(self, query: Query | None = None) -> Listing:
        query = query or Query()
        found = [
            listed
            for listed in map(_listed, self._messages)
            if query.since <= listed.record.requested_at < query.before
            and query.run in ("", listed.record.run)
            and query.state in (None, listed.record.state)
        ]
        return Listing(found[: query.limit or None], len(found))

    def has_analysis(self, capture_id: str) -> bool:
        return any(
            message.analysed and _listed(message).record.capture_id == capture_id
            for message in self._messages
        )

    def analysis(self, capture_id: str) -> bytes:
        request = control_pb2.DownloadRequest(capture_id=capture_id, file=ANALYSIS)
        with connect(self._socket) as daemon:
            return b"".join(piece.data for piece in daemon.Download(request, timeout=_ANALYSIS_S))

    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        request = control_pb2.PinCaptureRequest(capture_id=capture_id, pinned=pinned)
        with connect(self._socket) as daemon:
            daemon.PinCapture(request, timeout=_ANSWER_S)

    def remove(self, capture_id: str, *, dry_run: bool = False) -> None:
        request = control_pb2.RemoveCaptureRequest(capture_id=capture_id, dry_run=dry_run)
        with connect(self._socket) as daemon:
            daemon.RemoveCapture(request, timeout=_DELETION_S)

    def check_removable(self, capture_id: str) -> None:
        self.remove(capture_id, dry_run=True)

    def fetch(self, capture_id: str, target: Path) -> None:
        with connect(self._socket) as daemon:
            fetch(daemon, capture_id, target)

    def fetched(self, capture_id: str) -> Path:
        """Return a directory with a capture's files, until the command ends."""
        directory = tempfile.mkdtemp(prefix="torchperfd-capture-")
        click.get_current_context().call_on_close(lambda: shutil.rmtree(directory, ignore_errors=True))
        target = Path(directory, capture_id)
        self.fetch(capture_id, target)
        return target


def _listed(message: control_pb2.ListedCapture) -> Listed:
    try:
        record = decode_clean(message.manifest, CaptureRecord)
        return Listed(record, message.disk_bytes, message.pinned, Upload(message.upload))
    except (DamagedError, ValueError) as error:
        raise TorchperfdError(f"the daemon's list of captures is invalid: {error}") from error


_DIRECTORY_ANSWER_S: Final = 1.0

captures_dir_option = click.option(
    "--captures-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_CAPTURES_DIR",
    help="The captures directory; by default that of the daemon that answers, else this user's own.",
)


def open_catalog(named: Path | None) -> Catalog | DaemonCatalog:
    """Return the captures to read.

    Captures that a service coordinated are the service's, so its answer comes before this user's own
    directory. A directory of the daemon's that this user cannot read is read through the daemon.

    Args:
        named: The directory that the user named; None for none.
    """
    if named is not None:
        return Catalog(named)
    directory = _directory_of_daemon()
    if directory is None:
        return Catalog(own_directory())
    is_readable = os.access(directory, os.R_OK | os.X_OK)
    return Catalog(directory) if is_readable else DaemonCatalog(directory)


def own_directory() -> Path:
    """Return this user's captures directory when no daemon names another."""
    return Path(contract.user_captures_dir())


def _directory_of_daemon() -> Path | None:
    with contextlib.suppress(TorchperfdError), connect(None, answer_seconds=_DIRECTORY_ANSWER_S) as daemon:
        info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_DIRECTORY_ANSWER_S)
        directory = Path(info.captures_dir)
        if directory.is_absolute():
            return directory
    return None
