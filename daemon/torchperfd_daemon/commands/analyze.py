"""``torchperfd analyze``."""

import json
import os
import sys
from pathlib import Path

import click

from torchperfd.v1 import contract
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.errors import NoSuchTargetError, PartialResultError, TorchperfdError

# The analyser uses no linear algebra, and numpy's starts a thread for every core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from torchperfd_daemon import analysis


@click.command("analyze")
@click.argument("trace")
@click.option("--limit", type=click.IntRange(min=1), default=15, show_default=True, help="Rows in the table.")
@click.option(
    "--sort-by",
    type=click.Choice(analysis.SORT_WORDS),
    default="self",
    show_default=True,
    metavar="COLUMN",
    help="self (CPU time), total (CPU time with children), calls, or any sort_by of torch's own table().",
)
@click.option(
    "--group-by",
    type=click.Choice(analysis.GROUPS),
    default="name",
    show_default=True,
    help="What calls of one row share beside their name.",
)
@click.option("--comm-pattern", metavar="REGEX", help="Further names of communication kernels.")
@click.option(
    "--captures-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_CAPTURES_DIR",
    help="Where to find a capture by its id; this user's own by default.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, with every operator.")
def command(
    trace: str,
    limit: int,
    sort_by: str,
    group_by: analysis.GroupBy,
    comm_pattern: str | None,
    captures_dir: Path | None,
    as_json: bool,
) -> None:
    """Say where a trace's time went: its steps, its GPU, and the operators that took longest.

    TRACE is a trace file (.json or .json.gz), a directory of rank<k>.json[.gz], or a capture's id.
    """
    files = analysis.rank_files(_target(trace, captures_dir))
    summaries: list[tuple[int | None, analysis.Summary]] = []
    failed: list[tuple[int | None, TorchperfdError]] = []
    request = analysis.Request(group_by=group_by, comm_pattern=comm_pattern)
    for file, answer in zip(files, analysis.analyse(files, request), strict=True):
        if isinstance(answer, TorchperfdError):
            failed.append((file.rank, answer))
            continue
        _warn(answer)
        summaries.append((answer.rank if file.rank is None else file.rank, answer))
    if not summaries:
        raise failed[0][1]
    if as_json:
        document = {
            "schema": analysis.SCHEMA,
            "ranks": [analysis.to_dict(summary, rank, sort_by) for rank, summary in summaries],
            "failed": [{"rank": rank, "error": str(error)} for rank, error in failed],
        }
        click.echo(json.dumps(document))
    else:
        for number, (rank, summary) in enumerate(summaries):
            if number:
                click.echo()
            analysis.render_text(summary, rank, sys.stdout, limit=limit, sort_by=sort_by)
    if failed:
        missing = ", ".join(str(rank) for rank, _ in failed)
        raise PartialResultError(
            f"{len(failed)} of {len(files)} ranks are missing ({missing}): {failed[0][1]}"
        )


def _target(trace: str, captures_dir: Path | None) -> Path:
    """Return the file or directory that is meant; what is no path may be a capture's id."""
    path = Path(trace)
    if path.exists():
        return path
    try:
        folder = Catalog(captures_dir or Path(contract.user_captures_dir())).folder(trace)
    except NoSuchTargetError:
        return path
    return folder if folder.is_dir() else path


def _warn(summary: analysis.Summary) -> None:
    if summary.damaged:
        click.echo(
            f"torchperfd: {summary.path} is cut off or damaged; these are the {summary.events:,} events "
            f"that could be read, {summary.skipped:,} were broken",
            err=True,
        )
    elif summary.skipped:
        click.echo(f"torchperfd: {summary.path}: skipped {summary.skipped:,} broken events", err=True)
