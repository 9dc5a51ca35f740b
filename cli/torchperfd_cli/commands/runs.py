"""``torchperfd runs``."""

import json
import time
from pathlib import Path
from typing import Any, Final

import click

from torchperfd.document.blocks import Document, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import milliseconds, one_line, size
from torchperfd.report.ending import FINISHED
from torchperfd.report.record import RunRecord
from torchperfd.report.store import KeptRun, RunStore
from torchperfd_cli.commands._options import (
    MOMENT,
    complete_kept_runs,
    json_option,
    limit_option,
    open_runs,
    runs_dir_option,
    whole_kept_run,
)
from torchperfd_cli.commands._output import (
    Answer,
    emit,
    html_option,
    limit_notes,
    note,
    show,
    watch_option,
    write_page,
)
from torchperfd_cli.commands._run_overview import read_overview
from torchperfd_cli.commands.history import open_lake
from torchperfd_cli.lake.database import LakeDatabase
from torchperfd_daemon.errors import TorchperfdError, UsageError, explained
from torchperfd_daemon.pages import render_page

_ROWS: Final = 30
_OUTCOME: Final = ("CHANGE", "PROMISED")
_MAX_NAME: Final = 60
_OF_LAKE: Final = {
    "run": "run",
    "job": "job",
    "owner": "owner",
    "cluster": "cluster",
    "started_seconds": "began_unix_seconds",
    "ended_seconds": "ended_unix_seconds",
    "world_size": "ranks_of_job",
    "ranks": "ranks_seen",
    "exit_state": "endings",
    "steps": "most_steps",
    "step_seconds": "mean_step",
    "cause": "named_cause",
}
"""Keys of a run as JSON, and the columns of the view that have them."""


@click.group("runs", invoke_without_command=True)
@runs_dir_option
@click.option(
    "--lake", metavar="URL", help="List the runs of all nodes instead, from the lake of `serve --lake`."
)
@click.option("--since", type=MOMENT, help="With --lake: the first day, like 30d; a week ago by default.")
@limit_option(_ROWS)
@watch_option
@json_option
@click.pass_context
def runs_command(
    context: click.Context,
    runs_dir: Path | None,
    lake: str | None,
    since: float | None,
    limit: int | None,
    watch: bool,
    as_json: bool,
) -> None:
    """List the runs whose reports are kept, newest first; needs no daemon.

    `torchperfd run` keeps the report of each run. `torchperfd compare A B` compares two of them.
    """
    if lake and (context.invoked_subcommand or runs_dir):
        raise UsageError("--lake lists runs only", "leave out --runs-dir and the subcommand")
    if since is not None and not lake:
        raise UsageError("--since needs --lake", "name the lake with --lake URL")
    if lake:
        with open_lake(lake, since) as database:
            show(lambda: _list_of_lake(database, limit, as_json=as_json), watch=watch, as_json=as_json)
        return
    store = open_runs(runs_dir)
    context.obj = store
    if context.invoked_subcommand is None:
        show(lambda: _list(store, limit, as_json=as_json), watch=watch, as_json=as_json)


def _list(store: RunStore, limit: int | None, *, as_json: bool) -> Answer:
    with explained(f"cannot read {store.directory}"):
        kept = store.list()
    shown = kept[: _most(limit, as_json=as_json)]
    if as_json:
        runs = [_summary(each, *_read(store, each)) for each in shown]
        facts = {"schema": "torchperfd.runs/1", "directory": store.directory, "total": len(kept)}
        return Answer({**facts, "runs": runs})
    if not kept:
        return Answer(notes=[f"no runs in {store.directory}; `torchperfd run train.py` keeps one"])
    heads = ["RUN", "SCRIPT", "WHEN", "STEPS", "STEP MS", "VERDICT", "SIZE"]
    read = [(each, *_read(store, each)) for each in shown]
    has_outcome = any(record and record.outcome and record.outcome.words for _, record, _ in read)
    rows = [_cells(each, record, with_outcome=has_outcome) for each, record, _ in read]
    if has_outcome:
        # In place of the size: all of it has to fit into 80 columns.
        heads[-1:] = _OUTCOME
    left = ("RUN", "SCRIPT", "WHEN", "VERDICT")
    table = Table(heads, rows, left=left, shorten="SCRIPT", lift=("RUN",))
    return Answer(Document([[table]]), limit_notes(len(shown), len(kept)))


def _list_of_lake(database: LakeDatabase, limit: int | None, *, as_json: bool) -> Answer:
    """Return the ended runs of all nodes, the newest first."""
    answered = database.answer("SELECT * FROM recent_runs")
    found = [dict(zip(answered.columns, row, strict=True)) for row in answered.rows]
    shown = found[: _most(limit, as_json=as_json)]
    missing = f"{len(database.damaged)} objects of the lake cannot be read" if database.damaged else ""
    if as_json:
        runs = [{key: run[name] for key, name in _OF_LAKE.items()} for run in shown]
        return Answer(
            {"schema": "torchperfd.lake_runs/1", "total": len(found), "runs": runs}, missing=missing
        )
    if not found:
        return Answer(notes=["no runs have ended; --since 30d looks further back"], missing=missing)
    rows = [
        [
            one_line(run["run"], _MAX_NAME),
            one_line(run["owner"], _MAX_NAME),
            _minute(run["ended_unix_seconds"]),
            str(run["ranks_seen"]),
            f"{run['most_steps']:,}",
            "" if run["mean_step"] is None else milliseconds(run["mean_step"]),
            _verdict_word(run["named_cause"] if run["endings"] == FINISHED else run["endings"]),
        ]
        for run in shown
    ]
    heads = ["RUN", "OWNER", "WHEN", "RANKS", "STEPS", "STEP MS", "VERDICT"]
    table = Table(heads, rows, left=("RUN", "OWNER", "WHEN", "VERDICT"), shorten="OWNER", lift=("RUN",))
    return Answer(Document([[table]]), limit_notes(len(shown), len(found)), missing=missing)


@runs_command.command("show")
@click.argument("run_id", metavar="RUN", callback=whole_kept_run, shell_complete=complete_kept_runs)
@html_option
@json_option
@click.pass_obj
def show_run(store: RunStore, run_id: str, html: Path | None, as_json: bool) -> None:
    """Print the report of a run: its verdict, its phases and its ranks.

    RUN is an id, or the beginning of only one.
    """
    content = store.content(run_id)
    overview = read_overview(content, run_id)
    if html:
        write_page(html, render_page("run", f"run {overview.record.run}", overview.to_page()))
    if as_json:
        emit(json.loads(content))
    elif not html:
        command = Sentences([f"compare it: torchperfd compare {run_id} OTHER"])
        emit(overview.document() + Document([[command]]))


@runs_command.command("rm")
@click.argument(
    "run_ids",
    metavar="RUN...",
    nargs=-1,
    required=True,
    callback=whole_kept_run,
    shell_complete=complete_kept_runs,
)
@click.pass_obj
def remove_runs(store: RunStore, run_ids: tuple[str, ...]) -> None:
    """Delete the reports of runs."""
    for run_id in dict.fromkeys(run_ids):
        with explained(f"cannot delete {run_id}"):
            store.remove(run_id)
        note(f"deleted {run_id}")


def _read(store: RunStore, kept: KeptRun) -> tuple[RunRecord | None, str]:
    """Return a run, or why it cannot be read: one damaged file must not hide the others."""
    try:
        return store.read(kept.run_id), ""
    except TorchperfdError as error:
        return None, str(error)


def _summary(kept: KeptRun, record: RunRecord | None, problem: str) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "id": kept.run_id,
        "bytes": kept.bytes,
        "kept_seconds": kept.modified,
        "problem": problem or None,
    }
    if record is None:
        return summary
    return summary | {
        "run": record.run,
        "script": record.script or None,
        "host": record.host or None,
        "started_seconds": record.started,
        "ended_seconds": record.ended,
        "world_size": record.world_size,
        "exit_state": record.ending.state or None,
        "steps": record.steps,
        "step_seconds": record.step_seconds,
        "cause": record.cause or None,
        "verdict": record.verdict or None,
        "promise": record.outcome.to_dict() if record.outcome is not None else None,
    }


def _cells(kept: KeptRun, record: RunRecord | None, *, with_outcome: bool) -> list[str]:
    when = _minute(kept.modified)
    outcome = record.outcome.cells if record is not None and record.outcome is not None else ("", "")
    last = [*(outcome if with_outcome else [size(kept.bytes)])]
    if record is None:
        return [kept.run_id, "", when, "", "", "damaged", *last]
    step = record.step_seconds
    verdict = record.cause if record.ending.state in ("", FINISHED) else record.ending.state
    return [
        kept.run_id,
        record.script,
        when,
        f"{record.steps:,}",
        "" if step is None else milliseconds(step),
        _verdict_word(verdict),
        *last,
    ]


def _most(limit: int | None, *, as_json: bool) -> int | None:
    """Return how many runs are listed; None for all."""
    return None if limit == 0 or (limit is None and as_json) else limit or _ROWS


def _minute(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))


def _verdict_word(verdict: str | None) -> str:
    return {"": "unknown", "none": "healthy"}.get(verdict or "", (verdict or "").replace("_", " "))
