"""The journal: rows on this node's disk until the object store has them.

Rows are appended, and every few minutes sealed into batches. A batch has a number and its final content, so
that sending it again, after a kill or a failure, writes the same object. Several daemons may share a journal.
"""

import logging
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from torchperfd_daemon import untrusted_files
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.goodput.store import private_folder
from torchperfd_daemon.lake.tables import Row, day_of, json_lines, object_key, object_name

log = logging.getLogger("torchperfd.lake")

FOLDER: Final = ".lake"
MAX_BYTES: Final = 256 << 20
"""Of batches that wait; the oldest are dropped beyond. A day of eight ranks has a few megabytes."""
MAX_AGE_S: Final = 90 * 86_400.0
"""Marks of the source that were not changed for so long are deleted."""

_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT NOT NULL, date TEXT NOT NULL,"
    " document BLOB NOT NULL)",
    "CREATE TABLE batches (sequence INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL,"
    " date TEXT NOT NULL, form TEXT NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL,"
    " content BLOB NOT NULL)",
    "CREATE TABLE marks (key TEXT PRIMARY KEY, value TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE identity (journal TEXT NOT NULL)",
    f"PRAGMA user_version = {_VERSION}",
)
_BUSY_S: Final = 2.0

T = TypeVar("T")


class JournalError(TorchperfdError):
    """The journal cannot be read or written now."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one table and date, with their final number.

    Attributes:
        form: The end of the object's name; what the content is converted to when it is sent.
        content: The rows as ``tables.json_lines`` compresses them.
    """

    sequence: int
    table: str
    date: str
    form: str
    content: bytes
    journal: str
    node: str

    def key(self, cluster: str) -> str:
        """Return the key of its object."""
        name = object_name(self.node, self.journal, self.sequence, self.form)
        return object_key(self.table, self.date, cluster, name)


@dataclass(slots=True)
class Marked:
    """Rows to append, and the marks of the source that change with them."""

    rows: list[tuple[str, Row]] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pending:
    """What waits: rows, and bytes of batches."""

    rows: int = 0
    bytes: int = 0


class Journal:
    """One node's journal. Thread-safe.

    Args:
        folder: Folder of the file, created on first use.
        node: Name of the node. Each has its own file, since nodes may share a home directory.
        most_bytes: The oldest batches beyond this size are dropped.
    """

    def __init__(self, folder: Path, node: str, most_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._node = node
        self._most_bytes = most_bytes
        self.path = folder / f"{node.replace('/', '_') or 'node'}.sqlite"
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def append(self, now: float, record: Callable[[Callable[[str], str | None]], Marked]) -> int:
        """Append rows in one transaction with the marks that the source keeps; return how many.

        Args:
            now: Unix seconds.
            record: Returns the rows. It gets a function that returns the present value of a mark.

        Raises:
            JournalError: Nothing was written.
        """

        def write(database: sqlite3.Connection) -> int:
            with database:
                database.execute("BEGIN IMMEDIATE")
                found = record(lambda key: _mark(database, key))
                date = day_of(now)
                database.executemany(
                    "INSERT INTO rows (name, date, document) VALUES (?, ?, ?)",
                    [(table, date, msgspec.json.encode(row)) for table, row in found.rows],
                )
                database.executemany(
                    "INSERT OR REPLACE INTO marks VALUES (?, ?, ?)",
                    [(key, value, now) for key, value in found.marks.items()],
                )
            return len(found.rows)

        return self._try(write)

    def seal(self, now: float, form: str) -> int:
        """Turn all rows into batches; return how many rows were dropped to keep to the bound.

        Args:
            now: Unix seconds.
            form: What the batches will be sent as.

        Raises:
            JournalError: Nothing was written.
        """

        def write(database: sqlite3.Connection) -> int:
            with database:
                database.execute("BEGIN IMMEDIATE")
                parts = database.execute("SELECT DISTINCT name, date FROM rows ORDER BY name, date")
                for table, date in parts.fetchall():
                    _seal(database, table, date, form)
                database.execute("DELETE FROM rows")
                database.execute("DELETE FROM marks WHERE at < ?", (now - MAX_AGE_S,))
                return _drop_oldest(database, self._most_bytes)

        return self._try(write)

    def sent(self, sequences: Iterable[int]) -> int:
        """Delete batches that the object store has; return how many rows they had.

        Raises:
            JournalError: Nothing was deleted; they are sent again, with the same content.
        """

        def write(database: sqlite3.Connection) -> int:
            with database:
                database.execute("BEGIN IMMEDIATE")
                return sum(_delete(database, sequence) for sequence in sequences)

        return self._try(write)

    def pending(self) -> Pending:
        """Return what waits.

        Raises:
            JournalError: It cannot be read.
        """

        def read(database: sqlite3.Connection) -> Pending:
            (open_rows,) = database.execute("SELECT COUNT(*) FROM rows").fetchone()
            query = "SELECT COALESCE(SUM(rows), 0), COALESCE(SUM(bytes), 0) FROM batches"
            rows, size = database.execute(query).fetchone()
            return Pending(open_rows + rows, size)

        return self._try(read)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches that wait, the oldest first, each read when it is due.

        Raises:
            JournalError: It cannot be read.
        """
        found = self._try(partial(self._after, 0))
        while found is not None:
            yield found
            found = self._try(partial(self._after, found.sequence))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _after(self, last: int, database: sqlite3.Connection) -> Batch | None:
        (journal,) = database.execute("SELECT journal FROM identity").fetchone()
        row = database.execute(
            "SELECT sequence, name, date, form, content FROM batches"
            " WHERE sequence > ? ORDER BY sequence LIMIT 1",
            (last,),
        ).fetchone()
        if row is None:
            return None
        sequence, table, date, form, content = row
        return Batch(sequence, table, date, form, content, journal, self._node)

    def _try(self, action: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                return action(self._database())
            except (sqlite3.Error, OSError, OverflowError) as error:
                self._close()
                is_damaged = isinstance(error, sqlite3.DatabaseError)
                if is_damaged and not isinstance(error, sqlite3.OperationalError):
                    self._set_aside()
                raise JournalError(f"the journal in {self._folder} cannot be used: {error}") from error

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            private_folder(self._folder)
            untrusted_files.check_database(self.path)
            database = self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            # Before the first table: the file shrinks again once the store has the rows.
            database.execute("PRAGMA auto_vacuum = FULL")
            database.execute("PRAGMA journal_mode = WAL")
            # A killed daemon loses nothing; a power failure of the node loses the last seconds.
            database.execute("PRAGMA synchronous = NORMAL")
            _prepare(database)
        return self._connection

    def _set_aside(self) -> None:
        """Rename a file that is damaged or of another version; a new journal has names of its own."""
        log.warning("%s is damaged and set aside; its rows do not reach the lake", self.path)
        with suppress(OSError):
            self.path.replace(self.path.with_suffix(".damaged"))
        for end in ("-wal", "-shm"):
            with suppress(OSError):
                self.path.with_name(self.path.name + end).unlink()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _prepare(database: sqlite3.Connection) -> None:
    with database:
        database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in _SCHEMA:
                database.execute(statement)
            database.execute("INSERT INTO identity VALUES (?)", (secrets.token_hex(8),))
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"it has version {version}, not {_VERSION}")


def _mark(database: sqlite3.Connection, key: str) -> str | None:
    row: tuple[str] | None = database.execute("SELECT value FROM marks WHERE key = ?", (key,)).fetchone()
    return row[0] if row is not None else None


def _seal(database: sqlite3.Connection, table: str, date: str, form: str) -> None:
    query = "SELECT document FROM rows WHERE name = ? AND date = ? ORDER BY id"
    documents = [document for (document,) in database.execute(query, (table, date))]
    content = json_lines(documents)
    database.execute(
        "INSERT INTO batches (name, date, form, rows, bytes, content) VALUES (?, ?, ?, ?, ?, ?)",
        (table, date, form, len(documents), len(content), content),
    )


def _drop_oldest(database: sqlite3.Connection, most_bytes: int) -> int:
    (size,) = database.execute("SELECT COALESCE(SUM(bytes), 0) FROM batches").fetchone()
    dropped = 0
    if size > most_bytes:
        for sequence, each in database.execute(
            "SELECT sequence, bytes FROM batches ORDER BY sequence"
        ).fetchall():
            if size <= most_bytes:
                break
            dropped += _delete(database, sequence)
            size -= each
    return dropped


def _delete(database: sqlite3.Connection, sequence: int) -> int:
    """Delete a batch; return how many rows it had, 0 if it is gone already."""
    row = database.execute("SELECT rows FROM batches WHERE sequence = ?", (sequence,)).fetchone()
    database.execute("DELETE FROM batches WHERE sequence = ?", (sequence,))
    return int(row[0]) if row is not None else 0
