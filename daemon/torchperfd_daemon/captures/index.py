"""The index of the captures directory: SQLite beside the folders, so that a listing reads no manifests.

The folders are authoritative. The index is rebuilt when it is missing, damaged or of another version;
where it lags behind them, only changes are read. A process that may not write it uses a copy in memory,
made from the file or, if that fails, from the manifests.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from torchperfd_daemon.captures import folder, manifest
from torchperfd_daemon.captures.index_database import IndexDatabase, only
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.captures.receipt import Upload
from torchperfd_daemon.captures.retention import Kept
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.text import one_line

_BATCH: Final = 1000
# Two changes within one tick of a file system's clock leave one time: what changed so lately is not
# taken for known. Network file systems go by another host's clock.
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


@dataclass(frozen=True, slots=True)
class Holding:
    """What the directory holds; ``oldest`` is Unix seconds, infinite when it holds nothing."""

    count: int
    bytes: int
    oldest: float


class Index:
    """An open index; a context manager. Not for several threads.

    Args:
        directory: The captures directory.
        wall: Unix seconds.
    """

    def __init__(self, directory: Path, wall: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._wall = wall
        self._database = IndexDatabase(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def refresh(self, *, thorough: bool = False, also: Collection[str] = ()) -> None:
        """Take in what has changed in the directory.

        Folders that came and went, and those that may still be in progress, are always seen;
        changes within the others only by the ids ``also``, or when ``thorough``.

        Raises:
            TorchperfdError: The directory cannot be read.
        """
        self._database.run(lambda: self._refresh(thorough, also))

    def select(self, query: Query) -> Listing:
        """Return the captures that a query asks for, newest first."""
        return self._database.run(lambda: self._select(query))

    def holding(self) -> Holding:
        """Return what the directory holds of captures that its daemon made."""

        def ask() -> Holding:
            rows = self._current().execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0), MIN(requested_at) FROM captures"
                " WHERE requested_at IS NOT NULL AND managed"
            )
            count, size, oldest = rows.fetchone()
            return Holding(count, size, float("inf") if oldest is None else oldest)

        return self._database.run(ask)

    def kept(self) -> list[Kept]:
        """Return all captures that the directory's daemon made, as input of the retention plan."""
        return self._database.run(
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
        return self._database.run(
            lambda: [
                capture_id
                for (capture_id,) in self._current().execute(
                    "SELECT id FROM captures WHERE upload = 'pending' ORDER BY requested_at, id"
                )
            ]
        )

    def _current(self) -> sqlite3.Connection:
        if not self._database.is_current:
            self._refresh(False, ())
        return self._database.connection()

    def _refresh(self, thorough: bool, also: Collection[str]) -> None:
        database = self._database.connection()
        now = self._wall()
        began_ns = int(now * 1e9)
        known = only(database.execute("SELECT stamp FROM scanned"))
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
        self._database.is_current = True

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
        database = self._database.connection()
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
        database = self._database.connection()
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
        total = only(database.execute(f"SELECT COUNT(*) FROM captures WHERE {where}", values))
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
