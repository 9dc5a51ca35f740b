"""``torchperfd history``."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from torchperfd.document.blocks import Document, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import one_line
from torchperfd_cli.commands._options import MOMENT, json_option
from torchperfd_cli.commands._output import emit, limit_notes, note, plain
from torchperfd_cli.lake.database import (
    Answered,
    LakeDatabase,
    database_file,
    day,
    view_help,
    view_names,
    view_sql,
)
from torchperfd_cli.lake.objects import LakeObjects
from torchperfd_daemon.errors import PartialResultError, UsageError
from torchperfd_daemon.goodput.totals import Bucket, RankGoodput, RunGoodput, by_run
from torchperfd_daemon.lake.tables import TABLES

_ROWS: Final = 50
_WEEK_S: Final = 7 * 86_400.0
_MAX_CELL: Final = 60
_NAMED_DAMAGED: Final = 3

lake_option = click.option(
    "--lake",
    "url",
    envvar="TORCHPERFD_LAKE",
    metavar="URL",
    help="The lake that daemons write to with `serve --lake`, like s3://bucket/prefix.",
)
since_option = click.option("--since", type=MOMENT, help="The first day, like 30d; a week ago by default.")


@click.command("history")
@click.argument("query", metavar="[VIEW|SQL]", default="")
@lake_option
@since_option
@click.option(
    "--limit",
    type=click.IntRange(0),
    help=f"At most so many rows; 0 is all. By default {_ROWS} in the table, all as JSON.",
)
@click.option("--sql", "shows_sql", is_flag=True, help="Print the SQL of the view, for another engine.")
@json_option
def history_command(
    query: str, url: str | None, since: float | None, limit: int | None, shows_sql: bool, as_json: bool
) -> None:
    """Ask the lake about all nodes: a view that torchperfd ships, or SQL of your own.

    Without an argument it lists views and tables. Objects are loaded once, into a DuckDB file in your cache.
    """
    if not query:
        emit(_catalog_json() if as_json else _catalog())
        return
    if shows_sql:
        emit(plain(*view_sql(_known_view(query)).splitlines()))
        return
    sql = f"SELECT * FROM {query}" if query in (*view_names(), *TABLES) else query
    if " " not in sql.strip():
        _known_view(query)
    with open_lake(url, since) as database:
        answered = database.answer(sql)
    _show(answered, limit, as_json=as_json)
    if database.damaged:
        some = ", ".join(database.damaged[:_NAMED_DAMAGED])
        raise PartialResultError(f"{len(database.damaged)} objects cannot be read: {some}")


@contextmanager
def open_lake(url: str | None, since: float | None) -> Iterator[LakeDatabase]:
    """Open the database of a lake; it is closed afterwards.

    Raises:
        UsageError: There is no lake of that name.
        TorchperfdError: It cannot be read.
    """
    if not url:
        raise UsageError("which lake?", "name it with --lake URL, or in TORCHPERFD_LAKE")
    now = time.time()
    first = day(now - _WEEK_S if since is None else since)
    database = LakeDatabase(LakeObjects(url), database_file(url), first, day(now))
    try:
        yield database
    finally:
        database.close()


def goodput_of_lake(database: LakeDatabase, run: str) -> list[RunGoodput]:
    """Return the goodput of a run on all nodes, or of all runs; the one that was active last comes first."""
    sums = ", ".join(f"sum({bucket.value}_seconds)" for bucket in Bucket)
    where = "WHERE run = '" + run.replace("'", "''") + "'" if run else ""
    rows = database.answer(
        f"SELECT run, rank, min(since_unix_seconds), max(until_unix_seconds), max(starts), max(gpus), {sums}"
        f" FROM goodput {where} GROUP BY run, rank"
    ).rows
    return by_run(
        (name, RankGoodput(rank, since, until, starts, gpus, False, dict(zip(Bucket, seconds, strict=True))))
        for name, rank, since, until, starts, gpus, *seconds in rows
    )


def _known_view(name: str) -> str:
    if name not in view_names():
        raise UsageError(f"there is no view {name[:40]!r}", "`torchperfd history` lists them")
    return name


def _catalog() -> Document:
    views = Table(
        ["VIEW", "SHOWS"], [[name, view_help(name)] for name in view_names()], left=("VIEW", "SHOWS")
    )
    tables = Table(
        ["TABLE", "A ROW IS"],
        [[table.name, table.help] for table in TABLES.values()],
        left=("TABLE", "A ROW IS"),
    )
    columns = Sentences(["columns: torchperfd history 'DESCRIBE goodput'; docs/history.md explains them"])
    return Document([[views], [tables], [columns]])


def _catalog_json() -> dict[str, Any]:
    tables = {
        table.name: {column.name: {"kind": column.kind, "help": column.help} for column in table.columns}
        for table in TABLES.values()
    }
    views = {name: view_help(name) for name in view_names()}
    return {"schema": "torchperfd.history/1", "views": views, "tables": tables}


def _show(answered: Answered, limit: int | None, *, as_json: bool) -> None:
    most = limit if limit is not None else 0 if as_json else _ROWS
    rows = answered.rows[:most] if most else answered.rows
    if as_json:
        found = [dict(zip(answered.columns, map(_json, row), strict=True)) for row in rows]
        emit({"schema": "torchperfd.history/1", "total": len(answered.rows), "rows": found})
        return
    if not rows:
        note("no rows; --since 30d looks further back")
        return
    cells = [[_cell(name, value) for name, value in zip(answered.columns, row, strict=True)] for row in rows]
    emit(Document([[Table([name.upper() for name in answered.columns], cells, left=_left(answered))]]))
    for line in limit_notes(len(rows), len(answered.rows)):
        note(line.replace("newest", "first"))


def _left(answered: Answered) -> Sequence[str]:
    first = answered.rows[0]
    return [
        name.upper() for name, value in zip(answered.columns, first, strict=True) if isinstance(value, str)
    ]


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if name.endswith("unix_seconds"):
            return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
        return f"{100 * value:.1f}%" if name.endswith("_ratio") else f"{value:,.4g}"
    return one_line(str(value), _MAX_CELL)


def _json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
