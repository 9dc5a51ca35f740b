"""Runs of the lake as records, which ``compare`` takes like those of kept reports."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchperfd.model.formatting import did_you_mean
from torchperfd.report.record import RunFileError, RunRecord, read_sound, record_of
from torchperfd_cli.lake.database import LakeDatabase
from torchperfd_daemon.errors import NoSuchTargetError
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
    "report",
)
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
        f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE run = '{quoted}' ORDER BY until_unix_seconds"
    )
    rows = [dict(zip(answered.columns, row, strict=True)) for row in answered.rows]
    if len(of := {(row["cluster"], row["owner"]) for row in rows}) > 1:
        some = ", ".join(f"{owner} in {cluster}" for cluster, owner in sorted(of))
        raise NoSuchTargetError(f"several runs are called {name}: of {some}", "give runs names of their own")
    # A run that was started again on a node has a row of each start.
    newest = {row["node"]: row for row in rows}
    record = read_sound(lambda: record_of(_document(name, list(newest.values()))), f"run {name}")
    if record.steps and all(rank.blocks is None for rank in record.ranks):
        raise RunFileError(
            f"run {name} cannot be compared: its processes ended without a report of their steps", "repeat it"
        )
    return record


def _document(name: str, rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the report of a run, as far as comparisons read it.

    Raises:
        RunFileError: An older version has written it.
    """
    reports = [json.loads(row["report"]) for row in rows if row["report"]]
    if len(reports) < len(rows):
        raise RunFileError(f"run {name} was recorded by a version without comparisons", "repeat the run")
    # As in the report that rank 0 keeps.
    first, row = min(zip(reports, rows, strict=True), key=lambda each: each[0]["ranks"][0]["rank"])
    ranks = [rank for report in reports for rank in report["ranks"]]
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
