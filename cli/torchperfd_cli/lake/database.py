"""A DuckDB database of the lake on this machine: each object is loaded once, as objects never change."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchperfd_cli.lake.objects import LakeObjects
from torchperfd_daemon.errors import TorchperfdError, UsageError, explained
from torchperfd_daemon.lake.tables import TABLES

if TYPE_CHECKING:
    pass

VIEWS: Final = Path(__file__).parent / "views"
_TYPES: Final = {"text": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE"}
_PARTITIONS: Final = ("date", "cluster")
_AT_ONCE: Final = 500
"""Objects that are loaded in one transaction."""
_VERSION: Final = 1
_STORED: Final = "lake_"
"""Tables begin so; the views in front of them end where the query may not look back further."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The rows that a query has returned, and their columns."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def view_names() -> list[str]:
    """Return the names of the views that torchperfd ships, in an order in which each finds what it reads."""
    read = {path.stem: set(path.read_text().split()) for path in sorted(VIEWS.glob("*.sql"))}
    # Those that others read.
    depth = {"recent_runs": 1, "numbered_runs": 2}
    return sorted(read, key=lambda name: max(depth.get(each, 0) for each in read[name]))


def view_sql(name: str) -> str:
    """Return the SQL of a view."""
    return (VIEWS / f"{name}.sql").read_text()


def view_help(name: str) -> str:
    """Return what a view shows, in a sentence: its first line."""
    return view_sql(name).partition("\n")[0].removeprefix("-- ")


class LakeDatabase:
    """Answers SQL about a lake.

    Args:
        objects: The lake's objects.
        file: Of the database; its folder is made.
        since: The first day that queries see.
        today: The last one, by UTC.

    Raises:
        TorchperfdError: duckdb is not installed, or another command uses the file.
    """

    def __init__(self, objects: LakeObjects, file: Path, since: date, today: date) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise TorchperfdError("history needs duckdb", "`pip install duckdb`") from error
        self._errors = duckdb.Error
        self._objects = objects
        self._since, self._today = since, today
        with explained(f"cannot write {file}", "set XDG_CACHE_HOME to a directory that you can write"):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._connection: duckdb.DuckDBPyConnection = duckdb.connect(file)
        except duckdb.Error as error:
            raise TorchperfdError(
                f"cannot open {file}: {_first_line(error)}",
                "wait for the other `torchperfd history`, or remove the file: it is made anew",
            ) from error
        self._prepare()
        self.damaged: list[str] = []
        """Objects that could not be loaded for the newest answer: each answer tries them again."""

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def answer(self, sql: str) -> Answered:
        """Load what is new of the tables that a query reads, and return its rows.

        Raises:
            UsageError: DuckDB does not understand the query.
            TorchperfdError: The store does not answer.
        """
        self.damaged = []
        with self._explaining():
            tables = self._tables_of(sql)
        for table in sorted(tables):
            self._load(table)
        with self._explaining():
            result = self._connection.execute(sql)
            columns = tuple(str(each[0]) for each in result.description or ())
            return Answered(columns, result.fetchall())

    def _tables_of(self, sql: str) -> set[str]:
        """Return the lake's tables that a query reads; DuckDB looks through views."""
        names = self._connection.get_table_names(sql)
        return {name.removeprefix(_STORED) for name in names} & TABLES.keys()

    def _prepare(self) -> None:
        database = self._connection
        database.execute("CREATE TABLE IF NOT EXISTS loaded (key VARCHAR PRIMARY KEY)")
        for table in TABLES.values():
            columns = ", ".join(f"{column.name} {_TYPES[column.kind]}" for column in table.columns)
            partitions = ", ".join(f"{name} VARCHAR" for name in _PARTITIONS)
            database.execute(f"CREATE TABLE IF NOT EXISTS {_STORED}{table.name} ({columns}, {partitions})")
            database.execute(
                f"CREATE OR REPLACE TEMP VIEW {table.name} AS SELECT * FROM {_STORED}{table.name}"
                f" WHERE date >= '{self._since.isoformat()}'"
            )
        for name in view_names():
            database.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {view_sql(name)}")

    def _load(self, table: str) -> None:
        days = (self._today - self._since).days + 1
        dates = [(self._since + timedelta(day)).isoformat() for day in range(days)]
        query = "SELECT key FROM loaded WHERE starts_with(key, ?)"
        known = {key for (key,) in self._connection.execute(query, [f"table={table}/"]).fetchall()}
        new = [key for key in self._objects.keys(table, dates) if key not in known]
        for first in range(0, len(new), _AT_ONCE):
            with tempfile.TemporaryDirectory(prefix="torchperfd-lake-") as folder:
                files = self._objects.fetch(new[first : first + _AT_ONCE], Path(folder))
                self._insert(table, new[first : first + _AT_ONCE], files)

    def _insert(self, table: str, keys: Sequence[str], files: Sequence[Path]) -> None:
        """Insert objects together; if one of them is damaged, each for itself."""
        try:
            self._insert_all(table, keys, files)
        except self._errors as error:
            if len(keys) == 1:
                self.damaged.append(f"{keys[0]} ({_first_line(error)})")
                return
            for key, file in zip(keys, files, strict=True):
                self._insert(table, [key], [file])

    def _insert_all(self, table: str, keys: Sequence[str], files: Sequence[Path]) -> None:
        database = self._connection
        database.execute("BEGIN")
        try:
            for source in _sources(table, files):
                database.execute(f"INSERT INTO {_STORED}{table} BY NAME {source}")
            # In one statement: one for each key takes longer than the rows do.
            database.execute("INSERT INTO loaded SELECT unnest(?)", [list(keys)])
            database.execute("COMMIT")
        except self._errors:
            database.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise UsageError(
                f"DuckDB refuses the query: {_first_line(error)}",
                "`torchperfd history` lists the tables and views",
            ) from error


def _sources(table: str, files: Iterable[Path]) -> Iterator[str]:
    """Yield a query over the files of each form, with the columns that this version knows."""
    names = [column.name for column in TABLES[table].columns] + list(_PARTITIONS)
    known = "|".join(names)
    partitions = "hive_partitioning = true, hive_types_autocast = false"
    forms = {
        ".parquet": f"read_parquet({{}}, union_by_name = true, {partitions})",
        ".gz": "read_json({}, format = 'newline_delimited', columns = {{"
        + ", ".join(f"{column.name}: '{_TYPES[column.kind]}'" for column in TABLES[table].columns)
        + f"}}}}, {partitions})",
    }
    for end, reader in forms.items():
        if these := [str(file) for file in files if file.suffix == end]:
            listed = "[" + ", ".join("'" + each.replace("'", "''") + "'" for each in these) + "]"
            yield f"SELECT COLUMNS('^({known})$') FROM {reader.format(listed)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def database_file(url: str) -> Path:
    """Return the file of a lake's database: in the user's cache, where it can be removed at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return Path(base) / "torchperfd" / "history" / f"{digest}-{_VERSION}.duckdb"


def day(unix_seconds: float) -> date:
    """Return the UTC date of a time."""
    return datetime.fromtimestamp(unix_seconds, UTC).date()
