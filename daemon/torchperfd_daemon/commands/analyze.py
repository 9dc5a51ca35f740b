"""``torchperfd analyze``."""

import json
import re
import sys
from pathlib import Path
from typing import Final

import click

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.report import SortBy
from torchperfd_daemon.errors import NoSuchTargetError, PartialResultError, TorchperfdError

_RANK_FILE: Final = re.compile(r"rank(\d{1,9})\.json(?:\.gz)?")


@click.command("analyze")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=15, show_default=True, help="Rows in the table.")
@click.option(
    "--sort-by",
    type=click.Choice(["self", "total", "calls"]),
    default="self",
    show_default=True,
    help="Self CPU time, CPU time with children, or calls.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, with every operator.")
def command(trace: Path, limit: int, sort_by: SortBy, as_json: bool) -> None:
    """Say what a trace spent its time on: its steps, and the operators that took longest.

    TRACE is a trace file (.json or .json.gz), or a capture's directory of rank<k>.json[.gz].
    """
    try:
        files = _files(trace)
    except OSError as error:
        raise TorchperfdError(f"cannot read {trace}: {error.strerror}") from None
    summaries: list[tuple[int | None, analysis.Summary]] = []
    failed: list[tuple[int | None, TorchperfdError]] = []
    for rank, path in files:
        try:
            summary = analysis.summarise(analysis.load(path))
        except TorchperfdError as error:
            failed.append((rank, error))
            continue
        _warn(summary)
        summaries.append((rank, summary))
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


def _files(trace: Path) -> list[tuple[int | None, Path]]:
    """Return the trace files meant, each with the rank its name gives, in order of rank."""
    if not trace.is_dir():
        match = _RANK_FILE.fullmatch(trace.name)
        return [(int(match[1]) if match else None, trace)]
    # While a capture is being compressed both forms exist; the plain one is the complete one.
    by_rank = {
        int(match[1]): path
        for path in sorted(trace.iterdir(), reverse=True)
        if (match := _RANK_FILE.fullmatch(path.name))
    }
    if not by_rank:
        raise NoSuchTargetError(f"{trace} holds no rank<k>.json or rank<k>.json.gz", "name a trace file")
    return [(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _warn(summary: analysis.Summary) -> None:
    if summary.damaged:
        click.echo(
            f"torchperfd: {summary.path} is cut off or damaged; these are the {summary.events:,} events "
            f"that could be read, {summary.skipped:,} were broken",
            err=True,
        )
    elif summary.skipped:
        click.echo(f"torchperfd: {summary.path}: skipped {summary.skipped:,} broken events", err=True)
