"""The captures directory: one folder per capture, readable and kept without a running daemon.

The folders are authoritative. The index beside them makes listings fast.
"""

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from torchperfd_daemon.captures import folder, manifest
from torchperfd_daemon.captures.destination import read_upload_marker
from torchperfd_daemon.captures.folder import Found
from torchperfd_daemon.captures.index import Index, Listing, Query
from torchperfd_daemon.captures.manifest import RECEIPT_FILE as RECEIPT
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, Receipt
from torchperfd_daemon.captures.retention import Quota, discard, purge
from torchperfd_daemon.errors import DiskFullError, NoSuchTargetError, TorchperfdError, explained

log = logging.getLogger("torchperfd.captures")

_MAX_ANALYSIS_BYTES: Final = 256 * 2**20
_LISTED: Final = "list them with `torchperfd captures list`"


class Catalog:
    """Reads and writes the captures directory.

    Args:
        directory: Made when first needed.
        quota: Limits for a new capture; the RetentionWorker enforces the rest of the quota.
    """

    def __init__(
        self, directory: Path, quota: Quota | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self.directory = directory
        self.quota = quota or Quota()
        self.wall = wall
        self.on_ended: Callable[[CaptureRecord], None] | None = None
        """Called for each capture that has ended, when its manifest is written."""
        self.on_armed: Callable[[CaptureRecord], None] | None = None
        """Called for each capture whose steps have been agreed on, when its manifest is written."""

    def folder(self, capture_id: str) -> Path:
        """Return where a capture lives, whether or not it exists.

        Raises:
            NoSuchTargetError: The id could not be one: it might lead out of the directory.
        """
        if not folder.is_id(capture_id):
            raise NoSuchTargetError(f"{capture_id[:80]!r} is no capture id", _LISTED)
        return self.directory / capture_id

    def make_private(self) -> None:
        """Make the directory this process's alone, for a daemon that keeps captures of several users.

        Raises:
            TorchperfdError: It belongs to another user.
        """
        with explained(f"cannot use {self.directory}", "choose another with --captures-dir"):
            self.directory.mkdir(mode=folder.MODE, parents=True, exist_ok=True)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if status.st_uid != os.geteuid():
                    raise TorchperfdError(
                        f"{self.directory} belongs to user {status.st_uid}, not to this daemon's user"
                        f" {os.geteuid()}",
                        f"`chown {os.geteuid()} {self.directory}`, or choose another with --captures-dir",
                    )
                mode = stat.S_IMODE(status.st_mode)
                if mode & 0o077:
                    os.fchmod(descriptor, folder.MODE)
                    log.warning(
                        "the captures directory %s was open to other users (mode %o): now it is this daemon's"
                        " alone (mode %o), and users read their captures with `torchperfd captures`",
                        self.directory,
                        mode,
                        folder.MODE,
                    )
            finally:
                os.close(descriptor)

    def create(self, capture_id: str) -> Path:
        """Make the folder of a new capture.

        Raises:
            DiskFullError: The disk has less left than has to stay free.
            TorchperfdError: The directory cannot be written, or has such a capture already.
        """
        path = self.folder(capture_id)
        try:
            try:
                self._refuse_a_full_disk()
            except FileNotFoundError:
                self.directory.mkdir(mode=folder.MODE, parents=True, exist_ok=True)
                self._refuse_a_full_disk()
            path.mkdir(mode=folder.MODE)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(
                    f"the disk of {self.directory} is full", "delete some with `torchperfd captures rm`"
                ) from error
            raise TorchperfdError(
                f"cannot write to {self.directory}: {error.strerror}", "choose another with --captures-dir"
            ) from error
        return path

    def save(self, record: CaptureRecord) -> None:
        """Write the capture's manifest, and call who waits for its state.

        Raises:
            TorchperfdError: It cannot be written.
        """
        self.update(record)
        if record.state is CaptureState.ARMED and self.on_armed is not None:
            self.on_armed(record)
        if record.state.ended and self.on_ended is not None:
            self.on_ended(record)

    def update(self, record: CaptureRecord) -> None:
        """Write the capture's manifest, whole or not at all.

        Raises:
            TorchperfdError: It cannot be written.
        """
        path = self.folder(record.capture_id)
        with (
            explained(f"cannot write the manifest in {path}", "check its disk and permissions"),
            folder.opened(path) as held,
        ):
            folder.write(held, manifest.FILE_NAME, record.encode())

    def enforce_cap(self, record: CaptureRecord) -> None:
        """Delete the traces that exceed a capture's limit, and mark their ranks as failed.

        Each rank has an equal share of ``Quota.capture_bytes``, so a large trace affects only its own rank.
        """
        share = self.quota.capture_bytes // max(1, len(record.ranks))
        if not self.quota.capture_bytes or all(trace.bytes <= share for trace in record.ranks):
            return
        with contextlib.suppress(OSError), folder.opened(self.folder(record.capture_id)) as held:
            for trace in record.ranks:
                if trace.bytes > share and folder.is_file_name(trace.file):
                    with contextlib.suppress(OSError):
                        os.unlink(trace.file, dir_fd=held)
        for trace in record.ranks:
            if trace.bytes > share:
                trace.reason = (
                    f"the trace has {trace.bytes:,} bytes, {share:,} are allowed;"
                    " capture fewer steps or raise --captures-max-bytes-each"
                )
                trace.state, trace.file, trace.bytes, trace.sha256 = CaptureState.FAILED, "", 0, ""

    @property
    def uploads(self) -> bool:
        """Whether a daemon uploads these captures."""
        return bool(read_upload_marker(self.directory))

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all captures without reading them; none if the directory is unreadable."""
        with contextlib.suppress(OSError):
            return tuple(each.name for each in self.directory.iterdir() if folder.is_id(each.name))
        return ()

    def list(self, query: Query | None = None) -> Listing:
        """Return the captures that a query asks for, newest first."""
        return Index(self.directory, self.wall()).select(query or Query())

    def found(self, capture_id: str) -> Found | None:
        """Return what a capture's folder holds now; None when there is no such folder.

        Raises:
            NoSuchTargetError: The id could not be one.
        """
        return folder.read(self.folder(capture_id), self.wall())

    def get(self, capture_id: str) -> CaptureRecord:
        """Return one capture.

        Raises:
            NoSuchTargetError: There is none of this name.
        """
        found = self.found(capture_id)
        if found is None or found.record is None:
            raise self._missing(capture_id)
        return found.record

    def open(self, capture_id: str, name: str) -> BinaryIO:
        """Open one of a capture's files for reading; it is a plain file and no link.

        Raises:
            NoSuchTargetError: There is no such capture, or it has no such file.
        """
        path = self.folder(capture_id)
        if not folder.is_file_name(name):
            raise NoSuchTargetError(f"{name[:80]!r} is no name of a capture's file", _LISTED)
        try:
            with folder.opened(path) as held:
                return open(folder.open_file(held, name), "rb")  # noqa: PTH123
        except OSError as error:
            raise NoSuchTargetError(f"capture {capture_id} has no readable file {name}", _LISTED) from error

    def files(self, capture_id: str) -> Iterator[tuple[str, BinaryIO]]:
        """Yield the name of each plain file of a capture, and the file, open until the next is asked for.

        Raises:
            NoSuchTargetError: There is no such capture.
        """
        self.get(capture_id)
        for name in sorted(path.name for path in self.folder(capture_id).iterdir()):
            # Other users can write there: a link could lead to a private file of the caller.
            with contextlib.suppress(NoSuchTargetError), self.open(capture_id, name) as file:
                yield name, file

    def open_own(self, capture_id: str, name: str) -> BinaryIO:
        """Open one of a capture's files to be sent elsewhere or analysed.

        Raises:
            NoSuchTargetError: There is no such capture, or it has no such file.
            TorchperfdError: The file is another user's.
        """
        users = self.get(capture_id).users | folder.trusted_users(self.directory)
        file = self.open(capture_id, name)
        try:
            folder.check_own(os.fstat(file.fileno()), name, users)
        except TorchperfdError:
            file.close()
            raise
        return file

    def note_upload(self, capture_id: str, receipt: Receipt) -> None:
        """Leave a receipt in a capture's folder.

        Raises:
            NoSuchTargetError: The id could not be one.
            TorchperfdError: Nothing can be written there.
        """
        with (
            explained(f"cannot record the upload of {capture_id} in its folder", "upload it as its owner"),
            folder.opened(self.folder(capture_id)) as held,
        ):
            folder.write(held, RECEIPT, receipt.encode())

    def has_analysis(self, capture_id: str) -> bool:
        """Return whether the daemon's analysis lies beside a capture's traces.

        Raises:
            NoSuchTargetError: The id could not be one.
        """
        with contextlib.suppress(OSError), folder.opened(self.folder(capture_id)) as held:
            status = os.stat(folder.ANALYSIS, dir_fd=held, follow_symlinks=False)
            makers = folder.trusted_users(self.directory) | {os.fstat(held).st_uid}
            return stat.S_ISREG(status.st_mode) and status.st_uid in makers
        return False

    def analysis(self, capture_id: str) -> bytes:
        """Return the daemon's analysis of a capture, a JSON document.

        Raises:
            NoSuchTargetError: There is no such capture, or it has not been analysed.
            TorchperfdError: It is too large to be one.
        """
        self.get(capture_id)
        if not self.has_analysis(capture_id):
            raise NoSuchTargetError(
                f"capture {capture_id} has not been analysed",
                f"`torchperfd analyze {capture_id}` does it now",
            )
        with self.open(capture_id, folder.ANALYSIS) as file:
            content = file.read(_MAX_ANALYSIS_BYTES + 1)
        if len(content) > _MAX_ANALYSIS_BYTES:
            raise TorchperfdError(
                f"the analysis of capture {capture_id} has more than {_MAX_ANALYSIS_BYTES:,} bytes",
                f"`torchperfd analyze {capture_id}` makes one",
            )
        return content

    def pin(self, capture_id: str, *, pinned: bool = True) -> None:
        """Protect a capture from removal, by the quota and by commands, or remove that protection.

        Raises:
            NoSuchTargetError: There is none of this name.
            TorchperfdError: Nothing can be written there, or the pin cannot be removed.
        """
        self.get(capture_id)
        verb, user = ("pin", "its owner") if pinned else ("unpin", "the user that pinned it")
        with (
            explained(f"cannot {verb} {capture_id}", f"{verb} it as {user}"),
            folder.opened(self.folder(capture_id)) as held,
        ):
            if pinned:
                # What another user has put there, when all could write there, is replaced.
                folder.write(held, folder.PIN, b"")
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder.PIN, dir_fd=held)

    def check_removable(self, capture_id: str) -> Found:
        """Return the content of a capture's folder, if it may be removed.

        Raises:
            NoSuchTargetError: There is none of this name.
            TorchperfdError: It is pinned, or in progress.
        """
        found = self.found(capture_id)
        if found is None or found.record is None:
            raise self._missing(capture_id)
        if found.pinned:
            raise TorchperfdError(
                f"capture {capture_id} is pinned", f"`torchperfd captures unpin {capture_id}` first"
            )
        if not found.record.state.ended:
            raise TorchperfdError(f"capture {capture_id} is in progress", "wait until it has ended")
        return found

    def remove(self, capture_id: str) -> None:
        """Delete a capture and its traces; listings no longer show it at once.

        Raises:
            NoSuchTargetError: There is none of this name.
            TorchperfdError: It is pinned, in progress, or cannot be deleted.
        """
        path = self.folder(capture_id)
        self.check_removable(capture_id)
        with (
            explained(f"cannot delete {path}", "delete it as its owner"),
            folder.opened(self.directory) as held,
        ):
            discard(path.name, held)

    def purge_trash(self) -> None:
        """Delete the remains of captures whose deletion was interrupted, as far as one round allows.

        Only directories of the users that the captures directory trusts are touched, whatever their name.

        Raises:
            OSError: Some of them cannot be deleted; the others are gone.
        """
        with contextlib.suppress(FileNotFoundError), folder.opened(self.directory) as held:
            purge(held, folder.trusted_users(self.directory))

    def _missing(self, capture_id: str) -> NoSuchTargetError:
        return NoSuchTargetError(f"no capture {capture_id} in {self.directory}", _LISTED)

    def lacking(self) -> int:
        """Return how many bytes of free disk space are missing.

        Raises:
            OSError: The directory is not there.
        """
        return max(0, self.quota.free_bytes - self._free())

    def disk(self) -> tuple[int, int]:
        """Return free bytes, without the reserve of root, and size in bytes of the disk of the captures.

        Raises:
            OSError: The directory is not there.
        """
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize

    def _free(self) -> int:
        return self.disk()[0]

    def _refuse_a_full_disk(self) -> None:
        free = self._free()
        if free < self.quota.free_bytes:
            raise DiskFullError(
                f"only {free / 2**20:,.0f} MiB are free on the disk of {self.directory},"
                f" and {self.quota.free_bytes / 2**20:,.0f} MiB must stay free",
                "make room with `torchperfd captures rm --older-than 7d`, or choose another --captures-dir",
            )
