"""The index's SQLite file: opened, rebuilt when it is damaged, or copied where it may not be written."""

import os
import sqlite3
import stat
import urllib.parse
from collections.abc import Callable
from contextlib import closing, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from torchperfd.v1 import access
from torchperfd_daemon import documents

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
    # A separate table, so that a scan over all captures reads no documents.
    "CREATE TABLE documents (id TEXT PRIMARY KEY, document BLOB NOT NULL)",
    "CREATE TABLE scanned (stamp TEXT NOT NULL)",
    "INSERT INTO scanned VALUES ('')",
    f"PRAGMA user_version = {_VERSION}",
)
_BUSY_S: Final = 5.0
# Errors that do not mean that the file is damaged.
_CIRCUMSTANCES: Final = (
    "SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_PERM",
)  # fmt: skip

T = TypeVar("T")


class _Mode(IntEnum):
    """How the index is held, from the best way to the one that always works."""

    OWN = 0
    COPY = 1
    MANIFESTS = 2


class IndexDatabase:
    """A database file that may be damaged when it is opened. Not thread-safe.

    Args:
        directory: The captures directory.

    Attributes:
        is_current: Whether the index was refreshed since the database was opened.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / FOLDER / FILE
        self._mode = _Mode.OWN
        self._connection: sqlite3.Connection | None = None
        self._rebuilt = False
        self.is_current = False

    def run(self, action: Callable[[], T]) -> T:
        """Run an action on the index; with a damaged or unreachable file it takes longer, but never fails."""
        while True:
            try:
                return action()
            except (sqlite3.Error, ValueError) as error:
                self.close()
                self.is_current = False
                if self._mode is _Mode.MANIFESTS:
                    raise
                if self._mode is _Mode.OWN and not self._rebuilt and not _is_circumstance(error):
                    self._rebuilt = True
                    self._discard()
                else:
                    self._mode = _Mode(self._mode + 1)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _discard(self) -> None:
        for end in ("", "-wal", "-shm"):
            with suppress(OSError):
                self._path.with_name(self._path.name + end).unlink()

    def connection(self) -> sqlite3.Connection:
        """Return the open database.

        Raises:
            sqlite3.Error: It cannot be used; ``run`` then finds another way.
        """
        if self._connection is None:
            if self._mode is _Mode.OWN and not self._is_ours():
                self._mode = _Mode.COPY
            if self._mode is _Mode.OWN:
                documents.check_database(self._path)
                self._connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
            else:
                # A table's worth of memory at most, and its owner's file stays as it is.
                self._connection = sqlite3.connect(":memory:", isolation_level=None)
                if self._mode is _Mode.COPY:
                    self._copy(self._connection)
            self._prepare(self._connection)
        return self._connection

    def _is_ours(self) -> bool:
        """Return whether we may write the index; its folder is made in a directory of our own.

        In a directory that is open to all, any user could have created a folder of that name.
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
                raise sqlite3.OperationalError("other users may have written the index")
            documents.check_database(self._path)
            before = self._path.stat()
            log = self._path.with_name(f"{self._path.name}-wal")
            # While no process has it open there is no log, and none can be created without write access.
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
        version = only(connection.execute("PRAGMA user_version"))
        if version == _VERSION:
            return
        if only(connection.execute("SELECT COUNT(*) FROM sqlite_master")):
            raise sqlite3.DatabaseError(f"the index is of version {version}")
        # Two processes may find it empty at once; the second waits, and finds it made.
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if not only(connection.execute("SELECT COUNT(*) FROM sqlite_master")):
                for statement in _SCHEMA:
                    connection.execute(statement)


def only(cursor: sqlite3.Cursor) -> Any:
    """Return the only value of a query's only row.

    Raises:
        sqlite3.DatabaseError: There is no row.
    """
    row = cursor.fetchone()
    if row is None:
        raise sqlite3.DatabaseError("a row of the index is missing")
    return row[0]


def _is_circumstance(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and getattr(
        error, "sqlite_errorname", "SQLITE_CANTOPEN"
    ).startswith(_CIRCUMSTANCES)


def _is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and not access.may_others_write(status)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
