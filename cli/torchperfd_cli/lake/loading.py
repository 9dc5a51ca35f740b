"""Loading of the lake's objects into DuckDB: each object once, many in one statement.

Opening a small object takes longer than reading it. A batch is therefore one ``read_parquet``, of which each
file is opened once and in any order, while the next batch is fetched.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchperfd_cli.lake.objects import LakeObjects
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.lake.tables import TABLES

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

STORED: Final = "lake_"
"""Tables begin so; the views in front of them end where the query may not look back further."""
PARTITIONS: Final = ("date", "cluster")
OBJECT: Final = "object"
"""The key of a row's object, where that has columns that are not loaded."""
TYPES: Final = {"text": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE"}
_AT_ONCE: Final = 2000
"""Objects that are loaded in one transaction."""


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    file: Path


class Loader:
    """Loads what is new of a table.

    Args:
        connection: Of the database, which has the tables.
        error: DuckDB's exception.
    """

    def __init__(
        self, connection: "DuckDBPyConnection", error: type[Exception], objects: LakeObjects
    ) -> None:
        self._connection = connection
        self._error = error
        self._objects = objects
        self._connection.execute("CREATE TABLE IF NOT EXISTS loaded (key VARCHAR PRIMARY KEY)")
        for name in TABLES:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {STORED}{name} ({', '.join(_columns(name))})")

    def load(self, table: str, since: date, through: date) -> list[str]:
        """Load the objects of some days that are not loaded; return those that are damaged, with the reason.

        Raises:
            TorchperfdError: The store does not answer.
        """
        dates = [(since + timedelta(day)).isoformat() for day in range((through - since).days + 1)]
        known = self._known(table, dates)
        new = sorted(key for key in self._objects.keys(table, dates) if key not in known)
        if not new:
            return []
        damaged: list[str] = []
        with tempfile.TemporaryDirectory(prefix="torchperfd-lake-") as folder:
            template = self._template(table, Path(folder))
            # Ordered, files wait for each other: that takes twice the CPU.
            self._connection.execute("SET preserve_insertion_order = false")
            try:
                for batch in self._batches(new, Path(folder)):
                    damaged += self._insert(table, batch, template)
            finally:
                self._connection.execute("SET preserve_insertion_order = true")
        return damaged

    def read(self, table: str, columns: Sequence[str], keys: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return columns of the rows of some objects, which may be columns that are not loaded.

        Raises:
            TorchperfdError: The store does not answer, or an object is damaged.
        """
        found: list[tuple[Any, ...]] = []
        with tempfile.TemporaryDirectory(prefix="torchperfd-lake-") as folder:
            files = self._objects.files(keys, Path(folder) / "0")
            for form in _SOURCES:
                if of_form := [str(file) for file in files if file.suffix == form]:
                    source = _source(form, table, fills=True)
                    query = f"SELECT {', '.join(columns)} FROM {source}"
                    try:
                        found += self._connection.execute(query, [of_form]).fetchall()
                    except self._error as error:
                        raise TorchperfdError(
                            f"an object of {len(of_form)} cannot be read: {first_line(error)}"
                        ) from error
        return found

    def _known(self, table: str, dates: Sequence[str]) -> set[str]:
        if not dates:
            return set()
        query = "SELECT key FROM loaded WHERE key BETWEEN ? AND ?"
        bounds = [f"table={table}/date={dates[0]}/", f"table={table}/date={dates[-1]}/~"]
        return {key for (key,) in self._connection.execute(query, bounds).fetchall()}

    def _batches(self, keys: Sequence[str], folder: Path) -> Iterator[list[_Object]]:
        """Yield files with objects; the next ones are fetched meanwhile."""
        parts = [keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE)]
        with ThreadPoolExecutor(1) as fetcher:
            coming = fetcher.submit(self._objects.files, parts[0], folder / "0")
            for number, part in enumerate(parts):
                files = coming.result()
                if number + 1 < len(parts):
                    coming = fetcher.submit(self._objects.files, parts[number + 1], folder / f"{number + 1}")
                yield [_Object(key, file) for key, file in zip(part, files, strict=True)]
                shutil.rmtree(folder / f"{number}", ignore_errors=True)

    def _template(self, table: str, folder: Path) -> Path:
        """Write a file of a table without rows: the first of a list of files decides on the columns."""
        path = folder / "template.parquet"
        rows = f"SELECT {_names(table)} FROM {STORED}{table} LIMIT 0"
        self._connection.execute(f"COPY ({rows}) TO '{_quoted(path)}' (FORMAT parquet)")
        return path

    def _insert(
        self, table: str, batch: list[_Object], template: Path, *, fills: bool = False
    ) -> Iterator[str]:
        """Insert a batch; yield those of its objects that are damaged.

        Args:
            fills: Some may be of an older version, which lacks columns. Each is opened once more then.
        """
        try:
            self._insert_all(table, batch, template, fills=fills)
        except self._error as error:
            if not fills:
                yield from self._insert(table, batch, template, fills=True)
            elif len(batch) == 1:
                yield f"{batch[0].key} ({first_line(error)})"
            else:
                middle = len(batch) // 2
                yield from self._insert(table, batch[:middle], template, fills=True)
                yield from self._insert(table, batch[middle:], template, fills=True)

    def _insert_all(self, table: str, batch: Sequence[_Object], template: Path, *, fills: bool) -> None:
        database = self._connection
        database.execute("BEGIN")
        try:
            for (form, day, cluster), found in groupby(sorted(batch, key=_part), _part):
                files = {str(each.file): each.key for each in found}
                listed = [str(template), *files] if form == _PARQUET else list(files)
                names, source = f"{_names(table)}, ?, ?", _source(form, table, fills=fills)
                values: list[object] = [day, cluster, listed]
                if _has_large(table):
                    names, source = f"{names}, key", source + _WITH_KEY
                    values += [list(files), list(files.values())]
                database.execute(f"INSERT INTO {STORED}{table} SELECT {names} FROM {source}", values)
            # In one statement: one for each key takes longer than the rows do.
            database.execute("INSERT INTO loaded SELECT unnest(?)", [[each.key for each in batch]])
            database.execute("COMMIT")
        except self._error:
            database.execute("ROLLBACK")
            raise


_PARQUET: Final = ".parquet"
_SOURCES: Final = {
    _PARQUET: "read_parquet(?, filename = true, hive_partitioning = false, union_by_name = {fills})",
    ".gz": "read_json(?, filename = true, hive_partitioning = false, format = 'newline_delimited',"
    " columns = {columns})",
}
_WITH_KEY: Final = " JOIN (SELECT unnest(?) AS filename, unnest(?) AS key) USING (filename)"


def _source(form: str, table: str, *, fills: bool) -> str:
    columns = {column.name: TYPES[column.kind] for column in TABLES[table].columns}
    return _SOURCES[form].format(columns=columns, fills=str(fills).lower())


def _has_large(table: str) -> bool:
    return any(column.is_large for column in TABLES[table].columns)


def _names(table: str) -> str:
    return ", ".join(column.name for column in TABLES[table].columns if not column.is_large)


def _part(each: _Object) -> tuple[str, str, str]:
    """Return what one statement can read: a form, a date and a cluster."""
    found = dict(part.split("=", 1) for part in each.key.split("/") if "=" in part)
    return each.file.suffix, found.get("date", ""), found.get("cluster", "")


def _columns(table: str) -> list[str]:
    own = [f"{each.name} {TYPES[each.kind]}" for each in TABLES[table].columns if not each.is_large]
    added = [*PARTITIONS, OBJECT] if _has_large(table) else PARTITIONS
    return [*own, *(f"{name} VARCHAR" for name in added)]


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]
