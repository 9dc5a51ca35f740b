"""One capture's folder: its names, and how it is read.

The folder and its files belong to the daemon's user, or to the user who captured without a daemon. Folders
of an older version were open to all users, so that files in them may be anybody's. Hence no name is opened
through a link, all are opened below the descriptor of the folder, and only files of trusted users count as
the daemon's own.
"""

import calendar
import contextlib
import functools
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from torchperfd.v1.contract import CAPTURE_ID
from torchperfd_daemon.captures import manifest
from torchperfd_daemon.captures.manifest import (
    CaptureRecord,
    CaptureState,
    RankManifest,
    Upload,
    first_reason,
    overall_state,
)
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.untrusted_files import DamagedError, decode_clean

MODE: Final = 0o700
FILE_MODE: Final = 0o600
PIN: Final = ".pinned"
"""A file of this name keeps a capture from being removed."""
ANALYSIS: Final = "analysis.json"
"""The result of the daemon's analysis of a capture."""

UNFINISHED_S: Final = 25 * 3600.0
"""For so long after its last change a folder that no daemon has closed may still be in progress:
a capture waits for its steps for a day at most."""

_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,79}")
_FILE: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
_RANK_MANIFEST: Final = re.compile(r"rank\d{1,9}\.manifest\.json")
_MAX_MANIFEST_BYTES: Final = 1024 * 1024
_NEVER_FINISHED: Final = "it was never finished"
_WORTH_UPLOADING: Final = (CaptureState.COMPLETE, CaptureState.PARTIAL)
_BLOCK_BYTES: Final = 512  # the unit of st_blocks, whatever the file system's own is


_CAPABILITIES: Final = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7
"""CHOWN, DAC_OVERRIDE, KILL, SETGID and SETUID."""

_Json: TypeAlias = bytes


@dataclass(frozen=True, slots=True)
class Found:
    """A folder's content.

    Attributes:
        record: The capture; None when the folder holds none.
        bytes: What its files take on the disk.
        pinned: It must not be removed.
        closed: Its daemon has written that it ended; nothing is added any more.
        changed_ns: When the folder last changed, Unix time in nanoseconds.
        document: The manifest as JSON: the daemon's file, else what the ranks' come to.
        upload: How far the upload of just this manifest is.
        owner: The user whose bytes these are.
        managed: The daemon of this directory made it, so that its quota counts it and may remove it.
    """

    record: CaptureRecord | None
    bytes: int
    pinned: bool
    closed: bool
    changed_ns: int
    document: _Json = b""
    upload: Upload = Upload.NONE
    owner: int = 0
    managed: bool = True

    def in_progress(self, now: float) -> bool:
        """Return whether a process may still be writing, at Unix time ``now``."""
        return not self.closed and now < self.changed_ns / 1e9 + UNFINISHED_S


@dataclass(frozen=True, slots=True)
class _File:
    """A file in a folder: its owner, and the bytes that it takes on the disk."""

    uid: int
    bytes: int = 0


def is_id(name: str) -> bool:
    """Return whether a capture can have this name: it leads nowhere out of the directory."""
    return _ID.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """Return whether a capture's file can have this name: plain, visible, of one part."""
    return _FILE.fullmatch(name) is not None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Hold a folder open, so that it stays the same one whatever becomes of its name.

    Raises:
        OSError: It is not there, is no folder, or is a link to one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(path.name, flags, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(folder: int, name: str) -> int:
    """Return a descriptor of a regular file in an open folder; the caller closes it.

    Raises:
        OSError: It cannot be read, or is something else.
    """
    # Non-blocking, since opening a pipe without a writer would wait forever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is no regular file")
    return descriptor


def write(folder: int, name: str, content: bytes) -> None:
    """Write a file in an open folder, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    part = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, FILE_MODE, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123
            file.write(content)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def check_own(status: os.stat_result, name: str, users: Collection[int]) -> None:
    """Refuse a file that is not the capture's own, before it is sent.

    Args:
        users: Those whose files the capture may have.

    Raises:
        TorchperfdError: Another user's private file is in its place, or it has a second name elsewhere.
    """
    if status.st_nlink > 1:
        raise TorchperfdError(f"{name} has another hard link", "copy it as its owner")
    if status.st_uid not in users and not status.st_mode & stat.S_IROTH:
        raise TorchperfdError(
            f"{name} belongs to user {status.st_uid}, whose capture this is not", "remove it as that user"
        )


def read(path: Path, now: float) -> Found | None:
    """Return what a folder holds at Unix time ``now``; None when there is no such folder."""
    try:
        with opened(path) as folder:
            status = os.fstat(folder)
            changed_ns = status.st_mtime_ns
            files = _measure(folder)
            trusted = trusted_users(path.parent)
            # What another user than these has put there is no manifest.
            writers = trusted | {status.st_uid}
            record, closed, document = _record(folder, path.name, files, writers, now, changed_ns)
            by_trusted = files.get(manifest.FILE_NAME, _File(-1)).uid in trusted
            owner = _owner(record, files, status.st_uid, trusted)
            pinned = PIN in files and files[PIN].uid in writers | {owner}
            found = Found(
                record,
                _size(record, files, writers | {owner}),
                pinned,
                closed,
                changed_ns,
                document,
                owner=owner,
                managed=by_trusted or status.st_uid in trusted,
            )
            if record is None or record.state not in _WORTH_UPLOADING or found.in_progress(now):
                return found
            if not (by_trusted or (not closed and _by_ranks_of(trusted, files))):
                return found
            upload = Upload.PENDING
            if manifest.RECEIPT_FILE in files:
                upload = _uploaded(folder, trusted, hashlib.sha256(document).hexdigest())
            return replace(found, upload=upload)
    except OSError:
        return None


@functools.cache
def may_act_for_users() -> bool:
    """Return whether this process can give files to other users, still read them, and become these users.

    Root in a container may have none of the capabilities; then it can do no more than its own files allow.
    """
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        effective = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
        return int(effective, 16) & _CAPABILITIES == _CAPABILITIES
    return False


def trusted_users(directory: Path) -> frozenset[int]:
    """Return the trusted users of a captures directory: root, this process's user, and its owner."""
    return frozenset({0, os.geteuid(), directory.stat().st_uid})


def _measure(folder: int) -> "dict[str, _File]":
    files = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            # Not what a file claims to have: one full of holes would push out all other captures.
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                files[entry.name] = _File(status.st_uid, status.st_blocks * _BLOCK_BYTES)
    return files


def _owner(
    record: CaptureRecord | None, files: "dict[str, _File]", folder_uid: int, trusted: frozenset[int]
) -> int:
    """Return the user that a capture's bytes count for: the user of most of its traces."""
    if folder_uid not in trusted or record is None:
        return folder_uid
    # Only files that the manifest names: an older version's folder may have others.
    taken: dict[int, int] = {}
    for trace in record.ranks:
        file = files.get(trace.file)
        if file is not None:
            # The daemon's own file is a trace that it has taken over: then the manifest has the user.
            uid = trace.uid if file.uid in trusted and trace.uid is not None else file.uid
            taken[uid] = taken.get(uid, 0) + file.bytes
    return max(taken, key=lambda uid: taken[uid], default=folder_uid)


def _size(record: CaptureRecord | None, files: "dict[str, _File]", users: frozenset[int]) -> int:
    """Return what a capture takes on the disk; files that others have put there are none of it."""
    named = {trace.file for trace in record.ranks} if record is not None else set()
    return sum(file.bytes for name, file in files.items() if name in named or file.uid in users)


def _by_ranks_of(trusted: frozenset[int], files: "dict[str, _File]") -> bool:
    """Return whether all that the ranks have written of themselves is of users that keep the directory."""
    return all(file.uid in trusted for name, file in files.items() if _RANK_MANIFEST.fullmatch(name))


def _record(
    folder: int,
    capture_id: str,
    names: Collection[str],
    writers: frozenset[int],
    now: float,
    changed_ns: int,
) -> tuple[CaptureRecord | None, bool, bytes]:
    """Return the capture, whether its daemon has closed it, and its manifest as JSON."""
    given_up = now >= changed_ns / 1e9 + UNFINISHED_S
    with contextlib.suppress(OSError, DamagedError):
        document, status = _content(folder, manifest.FILE_NAME)
        if status.st_uid not in writers:
            raise DamagedError("it belongs to another user")
        record = decode_clean(document, CaptureRecord)
        record.capture_id = capture_id
        if record.state.ended:
            return record, True, document
        # Its daemon is at it, or has died.
        record.add_rank_manifests([found for found, _ in _rank_manifests(folder, names)], now)
        if given_up and not record.state.ended:
            record.state, record.reason = CaptureState.FAILED, _NEVER_FINISHED
        return record, False, record.encode()
    by_ranks = _from_rank_manifests(folder, capture_id, names)
    made_up = by_ranks or _unfinished(capture_id, given_up=given_up)
    return made_up, False, made_up.encode() if made_up else b""


def _uploaded(folder: int, trusted: frozenset[int], manifest_sha256: str) -> Upload:
    """Return the upload state that the receipt in a folder has for a manifest.

    Any user can write there, and uploaded captures may be removed: so only a receipt of a trusted user
    counts.
    """
    with contextlib.suppress(OSError, DamagedError):
        content, status = _content(folder, manifest.RECEIPT_FILE)
        found = decode_clean(content, manifest.Receipt)
        if status.st_uid in trusted and found.manifest_sha256 == manifest_sha256:
            return found.upload
    return Upload.PENDING


def _content(folder: int, name: str) -> tuple[bytes, os.stat_result]:
    """Return a small regular file's content and its status.

    Raises:
        OSError: It cannot be read, or is something else.
    """
    with open(open_file(folder, name), "rb") as file:
        status = os.fstat(file.fileno())
        content = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(content) > _MAX_MANIFEST_BYTES:
        raise OSError(f"{name} has more than {_MAX_MANIFEST_BYTES} bytes")
    return content, status


def _from_rank_manifests(folder: int, capture_id: str, names: Collection[str]) -> CaptureRecord | None:
    """Put a record together from what the ranks wrote: a capture that no daemon took part in."""
    record = None
    for found, written_at in _rank_manifests(folder, names):
        if record is None:
            record = CaptureRecord(
                capture_id=capture_id,
                run=found.run,
                trigger=found.trigger,
                requested_at=min(max(0.0, written_at), manifest.LATEST),
                step_range=found.step_range,
                options=found.options,
                job_name=found.job_name,
                world_size=found.world_size,
            )
        record.ranks.append(found.trace())
    if record is not None:
        record.ranks.sort(key=lambda trace: trace.rank)
        record.state = overall_state(record.ranks)
        record.reason = first_reason(record.ranks)
    return record


def _rank_manifests(folder: int, names: Collection[str]) -> Iterator[tuple[RankManifest, float]]:
    """Yield what the ranks wrote, and when; what is none of theirs is left out."""
    for name in sorted(filter(_RANK_MANIFEST.fullmatch, names)):
        with contextlib.suppress(OSError, DamagedError):
            content, status = _content(folder, name)
            found = decode_clean(content, RankManifest)
            uid = status.st_uid if found.uid is None else found.uid
            yield replace(found, uid=uid), status.st_mtime


def _unfinished(capture_id: str, *, given_up: bool) -> CaptureRecord | None:
    """Return the record of a folder that bears a name of ours and holds no manifest (yet)."""
    match = CAPTURE_ID.fullmatch(capture_id)
    if match is None:
        return None
    try:
        asked_at = calendar.timegm(time.strptime(match[1], "%Y%m%d-%H%M%S"))
    except ValueError:
        return None
    return CaptureRecord(
        capture_id=capture_id,
        run="",
        trigger="command",
        requested_at=max(0.0, float(asked_at)),
        state=CaptureState.FAILED if given_up else CaptureState.PREPARING,
        reason=_NEVER_FINISHED if given_up else "",
    )
