"""The index of the captures directory: SQLite beside the folders, so that a listing reads no manifests.

The folders are the truth. The index is made again when it is missing, damaged or of another version;
where it lags behind them only what changed is read. Who may not write it works on a copy in memory,
made of the file or, if need be, of the manifests.
"""

import os
import sqlite3
import stat
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from torchperfd_daemon import documents
from torchperfd_daemon.captures import folder, manifest
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.captures.receipt import Upload
from torchperfd_daemon.captures.retention import Kept
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.text import one_line

FOLDER: Final = ".index"
FILE: Final = "captures.sqlite"

_VERSION: Final = 3
_SCHEMA: Final = (
    # No requested_at: the folder holds no capture (yet). open_until: Unix seconds until which it may be
    # in progress, 0 when that is over. changed_ns: the folder's mtime as read, 0 when it is to be read again.
    "CREATE TABLE captures (id TEXT PRIMARY KEY, requested_at REAL, run TEXT, state TEXT,"
    " bytes INTEGER NOT NULL, pinned INTEGER NOT NULL, open_until REAL NOT NULL, changed_ns INTEGER NOT NULL,"
    " upload TEXT NOT NULL, owner INTEGER NOT NULL, managed INTEGER NOT NULL)"
    " WITHOUT ROWID",
    "CREATE INDEX by_time ON captures (requested_at, id)",
    "CREATE INDEX by_run ON captures (run, requested_at)",
    "CREATE INDEX to_upload ON captures (requested_at, id) WHERE upload = 'pending'",
    "CREATE INDEX to_watch ON captures (id) WHERE open_until > 0 OR changed_ns = 0",
    # Apart, so that a look over all captures reads no documents.
    "CREATE TABLE documents (id TEXT PRIMARY KEY, document BLOB NOT NULL)",
    "CREATE TABLE scanned (stamp TEXT NOT NULL)",
    "INSERT INTO scanned VALUES ('')",
    f"PRAGMA user_version = {_VERSION}",
)
_BUSY_S: Final = 5.0
_BATCH: Final = 1000
# Two changes within one tick of a file system's clock leave one time: what changed so lately is not
# taken for known. Network file systems go by another host's clock.
_RACY_NS: Final = 2 * 10**9
# Errors that say nothing about the file's health.
_CIRCUMSTANCES: Final = (
    "SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_PERM",
)  # fmt: skip

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Holding:
    """What the directory holds; ``oldest`` is Unix seconds, infinite when it holds nothing."""

    count: int
    bytes: int
    oldest: float


class _Way(IntEnum):
    """How the index is held, from the best way to the one that always works."""

    OWN = 0
    COPY = 1
    MANIFESTS = 2


class Index:
    """An open index; a context manager. Not for several threads.

    Args:
        directory: The captures directory.
        wall: Unix seconds.
    """

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._wall = wall
        self._path = directory / FOLDER / FILE
        self._way = _Way.OWN
        self._connection: sqlite3.Connection | None = None
        self._mended = False
        self._is_current = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def refresh(self, *, thorough: bool = False, also: Collection[str] = ()) -> None:
        """Take in what has changed in the directory.

        Folders that came and went, and those that may still be in progress, are always seen;
        changes within the others only by the ids ``also``, or when ``thorough``.

        Raises:
            TorchperfdError: The directory cannot be read.
        """
        self._safely(lambda: self._refresh(thorough, also))

    def select(self, query: Query) -> Listing:
        """Return the captures that a query asks for, newest first."""
        return self._safely(lambda: self._select(query))

    def holding(self) -> Holding:
        """Return what the directory holds of captures that its daemon made."""

        def ask() -> Holding:
            rows = self._current().execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0), MIN(requested_at) FROM captures"
                " WHERE requested_at IS NOT NULL AND managed"
            )
            count, size, oldest = rows.fetchone()
            return Holding(count, size, float("inf") if oldest is None else oldest)

        return self._safely(ask)

    def kept(self) -> list[Kept]:
        """Return all captures that the directory's daemon made, as the plan of what has to go wants them."""
        return self._safely(
            lambda: [
                Kept(capture_id, requested_at, size, bool(protected), bool(unconfirmed), owner)
                for capture_id, requested_at, size, protected, unconfirmed, owner in self._current().execute(
                    "SELECT id, requested_at, bytes, pinned OR open_until > ?, upload = 'pending', owner"
                    " FROM captures WHERE requested_at IS NOT NULL AND managed",
                    (self._wall(),),
                )
            ]
        )

    def to_upload(self) -> list[str]:
        """Return the ids of the captures that are to be uploaded, oldest first."""
        return self._safely(
            lambda: [
                capture_id
                for (capture_id,) in self._current().execute(
                    "SELECT id FROM captures WHERE upload = 'pending' ORDER BY requested_at, id"
                )
            ]
        )

    # Holding on to a database that may be anything.

    def _safely(self, action: Callable[[], T]) -> T:
        """Act on the index; what is wrong with it costs time, never the answer."""
        while True:
            try:
                return action()
            except (sqlite3.Error, ValueError) as error:
                self._close()
                self._is_current = False
                if self._way is _Way.MANIFESTS:
                    raise
                if self._way is _Way.OWN and not self._mended and not _is_circumstance(error):
                    self._mended = True
                    self._discard()
                else:
                    self._way = _Way(self._way + 1)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _discard(self) -> None:
        for end in ("", "-wal", "-shm"):
            with suppress(OSError):
                self._path.with_name(self._path.name + end).unlink()

    def _current(self) -> sqlite3.Connection:
        if not self._is_current:
            self._refresh(False, ())
        return self._database()

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._way is _Way.OWN and not self._is_ours():
                self._way = _Way.COPY
            if self._way is _Way.OWN:
                documents.check_database(self._path)
                self._connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
            else:
                # A table's worth of memory at most, and its owner's file stays as it is.
                self._connection = sqlite3.connect(":memory:", isolation_level=None)
                if self._way is _Way.COPY:
                    self._copy(self._connection)
            self._prepare(self._connection)
        return self._connection

    def _is_ours(self) -> bool:
        """Return whether we may write the index; its folder is made in a directory of our own.

        In a directory that is open to all, anybody could have put a folder of that name there.
        """
        try:
            owner = self._directory.stat().st_uid
            if owner == os.geteuid():
                with suppress(FileExistsError):
                    self._path.parent.mkdir(mode=0o755)
            status = self._path.parent.lstat()
        except OSError:
            return False
        return _is_private(status) and status.st_uid == owner == os.geteuid()

    def _copy(self, memory: sqlite3.Connection) -> None:
        """Fill an empty database with its owner's.

        Raises:
            sqlite3.Error: There is none that can be trusted, or it changed meanwhile.
        """
        try:
            status = self._path.parent.lstat()
            owners = (0, os.geteuid(), self._directory.stat().st_uid)
            if not _is_private(status) or status.st_uid not in owners:
                raise sqlite3.OperationalError("the index could be anybody's")
            documents.check_database(self._path)
            before = self._path.stat()
            log = self._path.with_name(f"{self._path.name}-wal")
            # With nobody at it there is no log, and none can be made where we may not write.
            immutable = not log.exists()
            mode = "immutable=1" if immutable else "mode=ro"
            uri = f"file:{urllib.parse.quote(str(self._path))}?{mode}"
            with closing(sqlite3.connect(uri, timeout=_BUSY_S, uri=True)) as source:
                source.backup(memory)
            after = self._path.stat()
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        if immutable and (log.exists() or _identity(before) != _identity(after)):
            raise sqlite3.OperationalError("the index was written to while it was copied")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = _only(connection.execute("PRAGMA user_version"))
        if version == _VERSION:
            return
        if _only(connection.execute("SELECT COUNT(*) FROM sqlite_master")):
            raise sqlite3.DatabaseError(f"the index is of version {version}")
        # Two processes may find it empty at once; the second waits, and finds it made.
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if not _only(connection.execute("SELECT COUNT(*) FROM sqlite_master")):
                for statement in _SCHEMA:
                    connection.execute(statement)

    # What is in it.

    def _refresh(self, thorough: bool, also: Collection[str]) -> None:
        database = self._database()
        now = self._wall()
        began_ns = int(now * 1e9)
        known = _only(database.execute("SELECT stamp FROM scanned"))
        stale, gone = set(also), set()
        try:
            status = self._directory.stat()
        except FileNotFoundError:
            stamp = ""
            gone = {capture_id for (capture_id,) in database.execute("SELECT id FROM captures")}
        except OSError as error:
            raise self._unreadable(error) from error
        else:
            stamp = f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}"
            if thorough or stamp != known:
                # The rows first: a folder that comes meanwhile is new, not gone.
                rows = dict(database.execute("SELECT id, changed_ns FROM captures"))
                names = set(self._names())
                gone = rows.keys() - names
                stale |= names - rows.keys()
                if thorough:
                    stale |= {name for name in rows.keys() & names if self._changed_ns(name) != rows[name]}
            if began_ns - status.st_mtime_ns < _RACY_NS:
                stamp = ""
        for capture_id, open_until, changed_ns in database.execute(
            "SELECT id, open_until, changed_ns FROM captures WHERE open_until > 0 OR changed_ns = 0"
        ):
            if now >= open_until or self._changed_ns(capture_id) != changed_ns:
                stale.add(capture_id)
        self._delete(gone)
        waiting = iter(stale - gone)
        # In batches: of 100,000 new folders not all shall be in memory at once, nor others kept waiting.
        while batch := list(islice(waiting, _BATCH)):
            self._read(batch, now, began_ns)
        if stamp != known:
            database.execute("UPDATE scanned SET stamp = ?", (stamp,))
        self._is_current = True

    def _names(self) -> Iterator[str]:
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if folder.is_id(entry.name):
                        yield entry.name
        except OSError as error:
            raise self._unreadable(error) from error

    def _changed_ns(self, capture_id: str) -> int:
        """Return when a folder last changed, -1 when it is no longer there."""
        try:
            return (self._directory / capture_id).lstat().st_mtime_ns
        except OSError:
            return -1

    def _read(self, capture_ids: Collection[str], now: float, began_ns: int) -> None:
        rows, documents, gone = [], [], []
        for capture_id in capture_ids:
            found = folder.read(self._directory / capture_id, now)
            if found is None:
                gone.append(capture_id)
                continue
            record = found.record
            rows.append(
                (
                    capture_id,
                    record.requested_at if record else None,
                    record.run if record else None,
                    record.state.value if record else None,
                    found.bytes,
                    found.pinned,
                    found.changed_ns / 1e9 + folder.UNFINISHED_S if found.in_progress(now) else 0.0,
                    0 if began_ns - found.changed_ns < _RACY_NS else found.changed_ns,
                    found.upload.value,
                    found.owner,
                    found.managed,
                )
            )
            if record:
                documents.append((capture_id, msgspec.json.encode(record)))
        database = self._database()
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(
                "INSERT OR REPLACE INTO captures VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            database.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?)", documents)
        self._delete(gone)

    def _delete(self, capture_ids: Collection[str]) -> None:
        if not capture_ids:
            return
        database = self._database()
        with database:
            database.execute("BEGIN IMMEDIATE")
            for table in ("captures", "documents"):
                database.executemany(f"DELETE FROM {table} WHERE id = ?", [(each,) for each in capture_ids])

    def _select(self, query: Query) -> Listing:
        where = "requested_at IS NOT NULL AND requested_at >= ? AND requested_at < ?"
        values: list[object] = [query.since, query.before]
        if query.run:
            where += " AND run = ?"
            # As manifests are read: without what could drive a terminal.
            values.append(one_line(query.run, len(query.run)))
        if query.state is not None:
            where += " AND state = ?"
            values.append(query.state.value)
        database = self._current()
        total = _only(database.execute(f"SELECT COUNT(*) FROM captures WHERE {where}", values))
        found = database.execute(
            f"SELECT document, bytes, pinned, upload FROM captures JOIN documents USING (id) WHERE {where}"
            " ORDER BY requested_at DESC, id DESC LIMIT ?",
            [*values, query.limit or -1],
        )
        captures = [
            Listed(manifest.decode(document), size, bool(pinned), Upload(upload))
            for document, size, pinned, upload in found
        ]
        return Listing(captures, total)

    def _unreadable(self, error: OSError) -> TorchperfdError:
        return TorchperfdError(
            f"cannot read {self._directory}: {error.strerror}", "choose another with --captures-dir"
        )


def _only(cursor: sqlite3.Cursor) -> Any:
    row = cursor.fetchone()
    if row is None:
        raise sqlite3.DatabaseError("a row of the index is missing")
    return row[0]


def _is_circumstance(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and getattr(
        error, "sqlite_errorname", "SQLITE_CANTOPEN"
    ).startswith(_CIRCUMSTANCES)


def _is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
