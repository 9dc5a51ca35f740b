"""The captures of a service, through its daemon: its directory is the daemon's alone."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

import click

from torchperfd.v1 import control_pb2, control_pb2_grpc
from torchperfd_daemon.captures import CaptureRecord, Listed, Listing, Query, Upload
from torchperfd_daemon.captures.folder import ANALYSIS, is_id
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._download import fetch
from torchperfd_daemon.documents import DamagedError, decode_clean
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

_ANSWER_S: Final = 30.0
_DELETION_S: Final = 300.0
_ANALYSIS_S: Final = 120.0
_LISTED: Final = "list them with `torchperfd captures list`"


class DaemonCatalog:
    """The captures that the daemon lets the caller read, with the methods of ``Catalog`` that commands use.

    Args:
        directory: The daemon's captures directory, for messages.
        socket: The daemon's socket; the usual places when None.
    """

    def __init__(self, directory: Path, socket: str | None = None) -> None:
        self.directory = directory
        self._socket = socket

    @contextlib.contextmanager
    def _connected(self) -> Iterator[control_pb2_grpc.ControlStub]:
        with connect(self._socket) as daemon:
            yield daemon

    @cached_property
    def _messages(self) -> list[control_pb2.ListedCapture]:
        with self._connected() as daemon:
            return [*daemon.ListCaptures(control_pb2.ListCapturesRequest(), timeout=_ANSWER_S)]

    @property
    def uploads(self) -> bool:
        """Whether the daemon uploads captures."""
        return any(message.uploads for message in self._messages)

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all captures; none if the daemon does not answer."""
        with contextlib.suppress(TorchperfdError):
            return tuple(listed.record.capture_id for listed in self.list().captures)
        return ()

    def folder(self, capture_id: str) -> Path:
        """Return where the daemon keeps a capture.

        Raises:
            NoSuchTargetError: The id could not be one.
        """
        if not is_id(capture_id):
            raise NoSuchTargetError(f"{capture_id[:80]!r} is no capture id", _LISTED)
        return self.directory / capture_id

    def list(self, query: Query | None = None) -> Listing:
        """Return the captures that a query asks for, newest first.

        Raises:
            TorchperfdError: The daemon does not answer, or names no captures.
        """
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
        """Return whether the daemon has analysed a capture."""
        return any(
            message.analysed and _listed(message).record.capture_id == capture_id
            for message in self._messages
        )

    def analysis(self, capture_id: str) -> bytes:
        """Return the daemon's analysis of a capture, a JSON document.

        Raises:
            NoSuchTargetError: There is no such capture, or it has not been analysed.
        """
        request = control_pb2.DownloadRequest(capture_id=capture_id, file=ANALYSIS)
        with self._connected() as daemon:
            return b"".join(piece.data for piece in daemon.Download(request, timeout=_ANALYSIS_S))

    def pin(self, capture_id: str) -> None:
        """Protect a capture from removal."""
        self._pin(capture_id, pinned=True)

    def unpin(self, capture_id: str) -> None:
        """Remove a capture's protection."""
        self._pin(capture_id, pinned=False)

    def _pin(self, capture_id: str, *, pinned: bool) -> None:
        request = control_pb2.PinCaptureRequest(capture_id=capture_id, pinned=pinned)
        with self._connected() as daemon:
            daemon.PinCapture(request, timeout=_ANSWER_S)

    def check_removable(self, capture_id: str) -> None:
        """Make sure that a capture may be removed.

        Raises:
            TorchperfdError: It is pinned, in progress or another user's, or there is none.
        """
        self._remove(capture_id, dry_run=True)

    def remove(self, capture_id: str) -> None:
        """Delete a capture and its traces.

        Raises:
            TorchperfdError: It is pinned, in progress or another user's, or there is none.
        """
        self._remove(capture_id, dry_run=False)

    def _remove(self, capture_id: str, *, dry_run: bool) -> None:
        request = control_pb2.RemoveCaptureRequest(capture_id=capture_id, dry_run=dry_run)
        with self._connected() as daemon:
            daemon.RemoveCapture(request, timeout=_DELETION_S)

    def fetch(self, capture_id: str, target: Path) -> None:
        """Download a capture into a directory.

        Raises:
            TorchperfdError: The daemon has none that the caller may read, or nothing can be written.
        """
        with self._connected() as daemon:
            fetch(daemon, capture_id, target)

    def fetched(self, capture_id: str) -> Path:
        """Return a directory with a capture's files, until the command ends.

        Raises:
            TorchperfdError: The daemon has none that the caller may read, or nothing can be written.
        """
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
