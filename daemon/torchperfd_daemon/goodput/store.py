"""The book: the ledgers of this node's ranks in SQLite, one row per run and rank; it outlives the daemon.

It is never in the way: where the file cannot be had or written, the log says so once, and what is in memory
goes on.
"""

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from torchperfd_daemon import documents
from torchperfd_daemon.goodput.totals import GoodputTotals

log = logging.getLogger("torchperfd.goodput")

FOLDER: Final = ".goodput"

_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE ledgers (run TEXT NOT NULL, rank INTEGER NOT NULL, until_ns INTEGER NOT NULL,"
    " document TEXT NOT NULL, PRIMARY KEY (run, rank)) WITHOUT ROWID",
    "CREATE INDEX by_age ON ledgers (until_ns)",
    "CREATE TABLE clock (boot_id TEXT NOT NULL, offset_ns INTEGER NOT NULL)",
    f"PRAGMA user_version = {_VERSION}",
)
_BUSY_S: Final = 2.0
_MOST_ROWS: Final = 20_000
_MOST_AGE_NS: Final = 90 * 86_400 * 10**9
_MOST_RANK: Final = 2**32 - 1

RankKey = tuple[str, int]
"""Run and rank."""

T = TypeVar("T")


class GoodputStore:
    """Keeps ledgers. For several threads, one at a time.

    Args:
        folder: Where its file belongs, made when it is first needed; None keeps everything in memory.
        node: Name of the node; each has a file of its own, since nodes may share a home.
        most_rows: Beyond, the ledgers that are oldest go.
    """

    def __init__(self, folder: Path | None, node: str = "", most_rows: int = _MOST_ROWS) -> None:
        self._folder = folder
        self._file = f"{node.replace('/', '_') or 'node'}.sqlite"
        self._most_rows = most_rows
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._complained = False

    def clock_offset(self, boot_id: str, boottime_ns: int, unix_ns: int) -> int:
        """Return what to add to the time since boot, one number per boot; ledgers then lie in the past."""

        def ask(database: sqlite3.Connection) -> int:
            with database:
                database.execute("BEGIN IMMEDIATE")
                row = database.execute("SELECT boot_id, offset_ns FROM clock").fetchone()
                latest_ns = unix_ns + _MOST_AGE_NS
                if row is not None and row[0] == boot_id and boot_id:
                    return _whole(row[1], latest_ns)
                (newest_ns,) = database.execute("SELECT COALESCE(MAX(until_ns), 0) FROM ledgers").fetchone()
                offset_ns = max(unix_ns, _whole(newest_ns, latest_ns)) - boottime_ns
                database.execute("DELETE FROM clock")
                database.execute("INSERT INTO clock VALUES (?, ?)", (boot_id, offset_ns))
                return offset_ns

        return self._try(ask, unix_ns - boottime_ns)

    def load(self, run: str) -> dict[RankKey, GoodputTotals]:
        """Return the ledgers of a run; damaged ones are left out."""
        return self._try(lambda database: dict(_read(database, "run = ?", run)), {})

    def newest(self, runs: int) -> dict[RankKey, GoodputTotals]:
        """Return the ledgers of so many runs, those that were active last."""
        where = "run IN (SELECT run FROM ledgers GROUP BY run ORDER BY MAX(until_ns) DESC LIMIT ?)"
        return self._try(lambda database: dict(_read(database, where, runs)), {})

    def save(self, ledgers: Mapping[RankKey, bytes], now_ns: int) -> None:
        """Keep ledgers as :func:`packed`, and let go of what is too old or too many."""

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute("BEGIN IMMEDIATE")
                database.executemany(
                    "INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?, ?)",
                    [(*key, now_ns, document.decode()) for key, document in ledgers.items()],
                )
                database.execute("DELETE FROM ledgers WHERE until_ns < ?", (now_ns - _MOST_AGE_NS,))
                (rows,) = database.execute("SELECT COUNT(*) FROM ledgers").fetchone()
                database.execute(
                    "DELETE FROM ledgers WHERE (run, rank) IN"
                    " (SELECT run, rank FROM ledgers ORDER BY until_ns LIMIT ?)",
                    (max(0, rows - self._most_rows),),
                )

        self._try(write, None)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _try(self, action: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        with self._lock:
            for _ in range(2):
                try:
                    return action(self._database())
                except (sqlite3.Error, OSError, OverflowError) as error:
                    self._complain(error)
                    self._close()
                    if not isinstance(error, sqlite3.DatabaseError) or isinstance(
                        error, sqlite3.OperationalError
                    ):
                        break
                    self._set_aside()
        return otherwise

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            path = ":memory:"
            if self._folder is not None:
                file = _private(self._folder) / self._file
                documents.check_database(file)
                path = str(file)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            # Text that is no UTF-8 costs its own row only.
            self._connection.text_factory = _text
            self._connection.execute("PRAGMA journal_mode = WAL")
            # A daemon that is killed loses nothing; a node that loses power, the last seconds.
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._prepare(self._connection)
        return self._connection

    def _prepare(self, database: sqlite3.Connection) -> None:
        with database:
            database.execute("BEGIN IMMEDIATE")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA:
                    database.execute(statement)
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"it is of version {version}")

    def _set_aside(self) -> None:
        """Move a file out of the way that is damaged or of another version."""
        if self._folder is None:
            return
        path = self._folder / self._file
        with suppress(OSError):
            path.replace(path.with_suffix(".damaged"))
        for end in ("-wal", "-shm"):
            with suppress(OSError):
                path.with_name(path.name + end).unlink()

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.warning("goodput is not kept beyond this daemon: %s", error)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def packed(ledger: GoodputTotals) -> bytes:
    """Return a ledger as the book keeps it."""
    return msgspec.json.encode(ledger)


def _read(
    database: sqlite3.Connection, where: str, value: str | int
) -> Iterator[tuple[RankKey, GoodputTotals]]:
    rows: Iterable[tuple[object, object, Any]] = database.execute(
        f"SELECT run, rank, document FROM ledgers WHERE {where}", (value,)
    )
    for run, rank, document in rows:
        if isinstance(run, str) and isinstance(rank, int) and 0 <= rank <= _MOST_RANK:
            with suppress(documents.DamagedError):
                yield (run, rank), documents.decode(document, GoodputTotals)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _whole(value: object, most: int) -> int:
    """Return a number of the database.

    Raises:
        sqlite3.DatabaseError: It is none, or beyond what the clock can have shown.
    """
    if not isinstance(value, int) or abs(value) > most:
        raise sqlite3.DatabaseError(f"it has a time of {value!r:.40}")
    return value


def _private(folder: Path) -> Path:
    """Return the folder, made if need be.

    Raises:
        OSError: It cannot be had, or others could have put something there.
    """
    # One by one: the mode is the last one's only.
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or shared:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
