"""Stores the goodput totals of this node's ranks, and their clock, so that both survive the daemon.

The table in SQLite has one row per run and rank. If the file cannot be opened or written, one warning is
logged and the totals stay in memory. The clock stays continuous when the wall clock is set or the daemon
restarts.
"""

import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from torchperfd.v1 import access
from torchperfd_daemon import untrusted_files
from torchperfd_daemon.goodput.totals import GoodputTotals

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of the node; nanoseconds since boot, Unix nanoseconds, monotonic seconds."""

    boottime_ns: Callable[[], int] = _boottime_ns
    unix_ns: Callable[[], int] = time.time_ns
    monotonic: Callable[[], float] = time.monotonic


class GoodputClock:
    """Time since boot plus an offset, so that it equals the wall clock at the first use on this boot.

    Args:
        offset_ns: Added to the time since boot.
    """

    def __init__(self, offset_ns: int, clocks: Clocks) -> None:
        self._offset_ns = offset_ns
        self._clocks = clocks

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return self._clocks.boottime_ns() + self._offset_ns

    def of_unix(self, unix_ns: int) -> int:
        """Convert a time of the wall clock, which may have been set since then."""
        return self.now() - (self._clocks.unix_ns() - unix_ns)

    def of_monotonic(self, seconds: float) -> int:
        """Convert a time of the monotonic clock."""
        return self.now() - int((self._clocks.monotonic() - seconds) * 1e9)

    def of_ticks(self, ticks: int) -> int:
        """Convert clock ticks since boot, the unit of a process's start time in procfs."""
        return self._offset_ns + ticks * 1_000_000_000 // _TICKS_PER_SECOND


def boot_id(proc: Path = Path("/proc")) -> str:
    """Return the kernel's id of this boot; empty if it is not readable."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


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
_MAX_ROWS: Final = 20_000
_MAX_AGE_NS: Final = 90 * 86_400 * 10**9
_MAX_RANK: Final = 2**32 - 1

RankKey = tuple[str, int]
"""Run and rank."""

T = TypeVar("T")


class GoodputStore:
    """Reads and writes goodput totals. Thread-safe.

    Args:
        folder: Folder of the database file, created on first use; None keeps everything in memory.
        node: Name of the node. Each node has its own file, since nodes may share a home directory.
        most_rows: The oldest rows beyond this number are deleted.
    """

    def __init__(self, folder: Path | None, node: str = "", most_rows: int = _MAX_ROWS) -> None:
        self._folder = folder
        self._file = f"{node.replace('/', '_') or 'node'}.sqlite"
        self._most_rows = most_rows
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._has_warned = False

    def clock_offset(self, boot_id: str, boottime_ns: int, unix_ns: int) -> int:
        """Return the offset to add to the time since boot, which stays the same until the next boot.

        It is at least so large that all stored totals lie in the past.
        """

        def read_or_create(database: sqlite3.Connection) -> int:
            with database:
                database.execute("BEGIN IMMEDIATE")
                row = database.execute("SELECT boot_id, offset_ns FROM clock").fetchone()
                latest_ns = unix_ns + _MAX_AGE_NS
                if row is not None and row[0] == boot_id and boot_id:
                    return _checked_time(row[1], latest_ns)
                (newest_ns,) = database.execute("SELECT COALESCE(MAX(until_ns), 0) FROM ledgers").fetchone()
                offset_ns = max(unix_ns, _checked_time(newest_ns, latest_ns)) - boottime_ns
                database.execute("DELETE FROM clock")
                database.execute("INSERT INTO clock VALUES (?, ?)", (boot_id, offset_ns))
                return offset_ns

        return self._try(read_or_create, unix_ns - boottime_ns)

    def load(self, run: str) -> dict[RankKey, GoodputTotals]:
        """Return the totals of a run's ranks, without damaged rows."""
        return self._try(lambda database: dict(_read_rows(database, "run = ?", run)), {})

    def newest(self, runs: int) -> dict[RankKey, GoodputTotals]:
        """Return the totals of the runs that were active last."""
        where = "run IN (SELECT run FROM ledgers GROUP BY run ORDER BY MAX(until_ns) DESC LIMIT ?)"
        return self._try(lambda database: dict(_read_rows(database, where, runs)), {})

    def save(self, documents: Mapping[RankKey, bytes], now_ns: int) -> None:
        """Write totals that :func:`packed` encoded, and delete rows that are too old or too many."""

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.execute("BEGIN IMMEDIATE")
                database.executemany(
                    "INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?, ?)",
                    [(*key, now_ns, document.decode()) for key, document in documents.items()],
                )
                database.execute("DELETE FROM ledgers WHERE until_ns < ?", (now_ns - _MAX_AGE_NS,))
                (rows,) = database.execute("SELECT COUNT(*) FROM ledgers").fetchone()
                database.execute(
                    "DELETE FROM ledgers WHERE (run, rank) IN"
                    " (SELECT run, rank FROM ledgers ORDER BY until_ns LIMIT ?)",
                    (max(0, rows - self._most_rows),),
                )

        self._try(write, None)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _try(self, action: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        with self._lock:
            for _ in range(2):
                try:
                    return action(self._database())
                except (sqlite3.Error, OSError, OverflowError) as error:
                    self._warn_once(error)
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
                file = private_folder(self._folder) / self._file
                untrusted_files.check_database(file)
                path = str(file)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            # Invalid UTF-8 then damages only its own row.
            self._connection.text_factory = _checked_text
            self._connection.execute("PRAGMA journal_mode = WAL")
            # A killed daemon loses nothing; a power failure of the node loses the last seconds.
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
                raise sqlite3.DatabaseError(f"the database has version {version}, not {_VERSION}")

    def _set_aside(self) -> None:
        """Rename a file that is damaged or of another version to ``.damaged``."""
        if self._folder is None:
            return
        path = self._folder / self._file
        with suppress(OSError):
            path.replace(path.with_suffix(".damaged"))
        for end in ("-wal", "-shm"):
            with suppress(OSError):
                path.with_name(path.name + end).unlink()

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("goodput is kept in memory only and is lost when the daemon stops: %s", error)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def packed(totals: GoodputTotals) -> bytes:
    """Encode totals for :meth:`GoodputStore.save`."""
    return msgspec.json.encode(totals)


def _read_rows(
    database: sqlite3.Connection, where: str, value: str | int
) -> Iterator[tuple[RankKey, GoodputTotals]]:
    rows: Iterable[tuple[object, object, Any]] = database.execute(
        f"SELECT run, rank, document FROM ledgers WHERE {where}", (value,)
    )
    for run, rank, document in rows:
        if isinstance(run, str) and isinstance(rank, int) and 0 <= rank <= _MAX_RANK:
            with suppress(untrusted_files.DamagedError):
                yield (run, rank), untrusted_files.decode(document, GoodputTotals)


def _checked_text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _checked_time(value: object, most: int) -> int:
    """Return a time from the database if it is plausible.

    Raises:
        sqlite3.DatabaseError: It is not a number, or its absolute value exceeds ``most``.
    """
    if not isinstance(value, int) or abs(value) > most:
        raise sqlite3.DatabaseError(f"the database has an impossible time, {value!r:.40}")
    return value


def private_folder(folder: Path) -> Path:
    """Return a folder of this user's alone, after creating it if necessary.

    Raises:
        OSError: It cannot be created, or other users can write to it.
    """
    # Two calls, since the mode applies to the last folder only.
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or access.may_others_write(status):
        raise PermissionError(f"{folder} must be a folder that only this user can write to")
    return folder
