"""Runs of the lake as records, which ``compare`` takes like those of kept reports."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchperfd.model.formatting import did_you_mean
from torchperfd.report.record import RunFileError, RunRecord, read_sound, record_of
from torchperfd_cli.lake.database import LakeDatabase
from torchperfd_cli.lake.loading import OBJECT, STORED
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.lake.tables import RUNS
from torchperfd_daemon.views.model import whole_name

_COLUMNS: Final = (
    "cluster",
    "owner",
    "node",
    "run",
    "since_unix_seconds",
    "until_unix_seconds",
    "ending",
    "world_size",
    "cause",
    "torch_version",
    "python_version",
    "client_version",
    OBJECT,
)
_ROW: Final = ("node", "run", "until_unix_seconds")
"""Columns by which a row of an object is found."""
_Row = Mapping[str, Any]


def lake_run(database: LakeDatabase, given: str) -> RunRecord:
    """Return a run by its name, or by the beginning of only one.

    Raises:
        NoSuchTargetError: There is none, or several begin so.
        RunFileError: Its rows are damaged, or have no blocks of steps.
    """
    names = [name for (name,) in database.answer("SELECT DISTINCT run FROM runs ORDER BY run").rows]
    name = whole_name(given, names, "run")
    if name not in names:
        raise NoSuchTargetError(
            f"no run {given[:80]} has ended in the lake since then",
            did_you_mean(given, names) or "`torchperfd runs --lake URL --since 30d` looks further back",
        )
    quoted = name.replace("'", "''")
    answered = database.answer(
        f"SELECT {', '.join(_COLUMNS)} FROM {STORED}runs WHERE run = '{quoted}' ORDER BY until_unix_seconds"
    )
    rows = [dict(zip(answered.columns, row, strict=True)) for row in answered.rows]
    if len(of := {(row["cluster"], row["owner"]) for row in rows}) > 1:
        some = ", ".join(f"{owner} in {cluster}" for cluster, owner in sorted(of))
        raise NoSuchTargetError(f"several runs are called {name}: of {some}", "give runs names of their own")
    # A run that was started again on a node has a row of each start.
    newest = list({row["node"]: row for row in rows}.values())
    keys = list(dict.fromkeys(row[OBJECT] for row in newest))
    reports = {
        tuple(key): report for *key, report in database.read(RUNS, (*_ROW, "report"), keys) if key[1] == name
    }
    found = [(row, reports.get(tuple(row[each] for each in _ROW))) for row in newest]
    record = read_sound(lambda: record_of(_document(name, found)), f"run {name}")
    if record.steps and all(rank.blocks is None for rank in record.ranks):
        raise RunFileError(
            f"run {name} cannot be compared: its processes ended without a report of their steps", "repeat it"
        )
    return record


def _document(name: str, found: Sequence[tuple[_Row, str | None]]) -> dict[str, Any]:
    """Return the report of a run, as far as comparisons read it.

    Args:
        found: The row of each node, with its part of the report.

    Raises:
        RunFileError: An older version has written it.
    """
    parts = [(row, json.loads(report)) for row, report in found if report]
    if len(parts) < len(found):
        raise RunFileError(f"run {name} was recorded by a version without comparisons", "repeat the run")
    # As in the report that rank 0 keeps.
    row, first = min(parts, key=lambda part: part[1]["ranks"][0]["rank"])
    rows, ranks = [row for row, _ in found], [rank for _, part in parts for rank in part["ranks"]]
    world = max(each["world_size"] or 0 for each in rows)
    return {
        "run": name,
        "host": first["host"],
        "started_seconds": min(each["since_unix_seconds"] for each in rows),
        "ended_seconds": max(each["until_unix_seconds"] for each in rows),
        "world_size": world,
        "exit": {"state": min(each["ending"] for each in rows)},
        "versions": {
            "torchperfd": row["client_version"],
            "python": row["python_version"],
            "torch": row["torch_version"],
        },
        "environment": first["environment"],
        "verdict": {
            "cause": row["cause"],
            "summary": first["summary"],
            "account": first["account"],
            "unseen_ranks": max(0, world - len(ranks)),
        },
        "ranks": ranks,
    }
