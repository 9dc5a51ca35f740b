"""A DuckDB database of the lake on this machine: each object is loaded once, as objects never change."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from torchperfd_cli.lake.loading import STORED, Loader, first_line
from torchperfd_cli.lake.objects import LakeObjects
from torchperfd_daemon.errors import TorchperfdError, UsageError, explained
from torchperfd_daemon.lake.tables import TABLES

VIEWS: Final = Path(__file__).parent / "views"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class Answered:
    """The rows that a query has returned, and their columns."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def view_names() -> list[str]:
    """Return the names of the views that torchperfd ships, in an order in which each finds what it reads."""
    words = {path.stem: set(path.read_text().split()) for path in sorted(VIEWS.glob("*.sql"))}

    def depth(name: str) -> int:
        return max((1 + depth(other) for other in words.keys() & words[name]), default=0)

    return sorted(words, key=depth)


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
        self._since, self._today = since, today
        with explained(f"cannot write {file}", "set XDG_CACHE_HOME to a directory that you can write"):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._connection: duckdb.DuckDBPyConnection = duckdb.connect(file)
        except duckdb.Error as error:
            raise TorchperfdError(
                f"cannot open {file}: {first_line(error)}",
                "wait for the other `torchperfd history`, or remove the file: it is made anew",
            ) from error
        self._loader = Loader(self._connection, duckdb.Error, objects)
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
            self.damaged += self._loader.load(table, self._since, self._today)
        with self._explaining():
            result = self._connection.execute(sql)
            columns = tuple(str(each[0]) for each in result.description or ())
            return Answered(columns, result.fetchall())

    def read(self, table: str, columns: Sequence[str], keys: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return columns of the rows of some objects, such as those that are too large to be loaded.

        Raises:
            TorchperfdError: They cannot be read.
        """
        return self._loader.read(table, columns, keys)

    def _tables_of(self, sql: str) -> set[str]:
        """Return the lake's tables that a query reads; DuckDB looks through views."""
        names = self._connection.get_table_names(sql)
        return {name.removeprefix(STORED) for name in names} & TABLES.keys()

    def _prepare(self) -> None:
        for table in TABLES:
            self._connection.execute(
                f"CREATE OR REPLACE TEMP VIEW {table} AS SELECT * FROM {STORED}{table}"
                f" WHERE date >= '{self._since.isoformat()}'"
            )
        for name in view_names():
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {view_sql(name)}")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise UsageError(
                f"DuckDB refuses the query: {first_line(error)}",
                "`torchperfd history` lists the tables and views",
            ) from error


def database_file(url: str) -> Path:
    """Return the file of a lake's database: in the user's cache, where it can be removed at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return Path(base) / "torchperfd" / "history" / f"{digest}-{_VERSION}.duckdb"


def day(unix_seconds: float) -> date:
    """Return the UTC date of a time."""
    return datetime.fromtimestamp(unix_seconds, UTC).date()
