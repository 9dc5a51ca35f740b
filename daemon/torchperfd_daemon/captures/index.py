"""The index of the captures directory: a file beside the folders, so that a listing reads few manifests.

The folders are authoritative. A folder whose time of change is the one in the index is not read again. An
index that is missing, damaged or of another version is made again from the folders.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from torchperfd.model.formatting import one_line
from torchperfd.v1 import access
from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, Upload
from torchperfd_daemon.captures.retention import Kept
from torchperfd_daemon.errors import explained

FOLDER: Final = ".index"
FILE: Final = "captures.msgpack"
_VERSION: Final = b"torchperfd captures 1"
_DIGEST_BYTES: Final = 16
_OLDER: Final = ("captures.sqlite", "captures.sqlite-wal", "captures.sqlite-shm")
# Two changes within one tick of a file system's clock leave one time, and network file systems go by another
# host's clock: a folder that changed so lately is read again.
_RACY_NS: Final = 2 * 10**9


@dataclass(frozen=True, slots=True)
class Query:
    """Which captures: of a run, in a state, asked for in [since, before); ``limit`` 0 means all."""

    run: str = ""
    state: CaptureState | None = None
    since: float = 0.0
    before: float = float("inf")
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A capture in a listing; ``bytes`` is what its folder takes on the disk."""

    record: CaptureRecord
    bytes: int
    pinned: bool
    upload: Upload


@dataclass(frozen=True, slots=True)
class Listing:
    """The newest captures that match, and how many match in all."""

    captures: list[Listed]
    total: int


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A folder; ``record`` is empty where it holds no capture (yet).

    ``changed_ns`` is when the folder last changed, 0 when it must be read again. Until ``open_until``, in
    Unix seconds, the capture may be in progress; 0 when that is over.
    """

    capture_id: str
    changed_ns: int
    open_until: float
    requested_at: float
    run: str
    state: CaptureState
    size: int
    pinned: bool
    upload: Upload
    owner: int
    managed: bool
    record: bytes


class Index:
    """The captures in the directory at one moment.

    Args:
        now: Unix seconds.

    Raises:
        TorchperfdError: The directory cannot be read.
    """

    def __init__(self, directory: Path, now: float) -> None:
        self._now = now
        known = {entry.capture_id: entry for entry in _load(directory)}
        entries = {}
        for capture_id, changed_ns in _folders(directory):
            entry = known.get(capture_id)
            if (
                entry is None
                or entry.changed_ns != changed_ns
                or (entry.open_until and now >= entry.open_until)
            ):
                entry = _read(directory / capture_id, now)
            if entry is not None:
                entries[capture_id] = entry
        if entries != known:
            _save(directory, entries.values())
        self._captures = [entry for entry in entries.values() if entry.record]

    def select(self, query: Query) -> Listing:
        """Return the captures that a query asks for, newest first."""
        # As manifests are read: without what could drive a terminal.
        run = one_line(query.run, len(query.run))
        found = [
            entry
            for entry in self._captures
            if query.since <= entry.requested_at < query.before
            and run in ("", entry.run)
            and query.state in (None, entry.state)
        ]
        found.sort(key=_age, reverse=True)
        captures = [
            Listed(
                msgspec.msgpack.decode(entry.record, type=CaptureRecord),
                entry.size,
                entry.pinned,
                entry.upload,
            )
            for entry in found[: query.limit or None]
        ]
        return Listing(captures, len(found))

    def kept(self) -> list[Kept]:
        """Return all captures that the directory's daemon made, as input of the retention plan."""
        return [
            Kept(
                entry.capture_id,
                entry.requested_at,
                entry.size,
                entry.pinned or entry.open_until > self._now,
                entry.upload is Upload.PENDING,
                entry.owner,
            )
            for entry in self._captures
            if entry.managed
        ]

    def to_upload(self) -> list[str]:
        """Return the ids of the captures that are to be uploaded, oldest first."""
        pending = (entry for entry in self._captures if entry.upload is Upload.PENDING)
        return [entry.capture_id for entry in sorted(pending, key=_age)]


def _age(entry: _Entry) -> tuple[float, str]:
    return entry.requested_at, entry.capture_id


def _folders(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the names of the folders of captures, and when each last changed."""
    with (
        explained(f"cannot read {directory}", "choose another with --captures-dir"),
        contextlib.suppress(FileNotFoundError),
        os.scandir(directory) as found,
    ):
        for each in found:
            if folder.is_id(each.name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    yield each.name, each.stat(follow_symlinks=False).st_mtime_ns


def _read(path: Path, now: float) -> _Entry | None:
    found = folder.read(path, now)
    if found is None:
        return None
    record = found.record
    return _Entry(
        path.name,
        0 if int(now * 1e9) - found.changed_ns < _RACY_NS else found.changed_ns,
        found.changed_ns / 1e9 + folder.UNFINISHED_S if found.in_progress(now) else 0.0,
        record.requested_at if record else 0.0,
        record.run if record else "",
        record.state if record else CaptureState.PREPARING,
        found.bytes,
        found.pinned,
        found.upload,
        found.owner,
        found.managed,
        msgspec.msgpack.encode(record) if record else b"",
    )


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Hold the index's folder open.

    In a directory that is open to all, any user could have made a folder of that name.

    Raises:
        OSError: There is none, or another user may have written to it.
    """
    with folder.opened(directory / FOLDER) as held:
        status = os.fstat(held)
        if access.may_others_write(status) or status.st_uid not in folder.trusted_users(directory):
            raise PermissionError(f"other users may have written to {directory / FOLDER}")
        yield held


def _load(directory: Path) -> list[_Entry]:
    with (
        contextlib.suppress(OSError, ValueError),
        _opened(directory) as held,
        open(folder.open_file(held, FILE), "rb") as file,  # noqa: PTH123
    ):
        content = file.read()
        body = content[len(_VERSION) + _DIGEST_BYTES :]
        if content.startswith(_head(body)):
            return msgspec.msgpack.decode(body, type=list[_Entry])
    return []


def _save(directory: Path, entries: Iterable[_Entry]) -> None:
    """Write the index if the directory is this user's own; where that fails, folders are read again."""
    with contextlib.suppress(OSError):
        if directory.stat().st_uid != os.geteuid():
            return
        with contextlib.suppress(FileExistsError):
            (directory / FOLDER).mkdir(mode=folder.MODE)
        with _opened(directory) as held:
            body = msgspec.msgpack.encode(list(entries))
            folder.write(held, FILE, _head(body) + body)
            for name in _OLDER:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=held)


def _head(body: bytes) -> bytes:
    return _VERSION + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
