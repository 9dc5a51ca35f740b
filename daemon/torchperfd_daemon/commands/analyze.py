"""``torchperfd analyze``."""

import json
import os
import sys
from pathlib import Path

import click

# The analyser uses no linear algebra, and numpy's starts a thread for every core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from torchperfd_daemon import analysis
from torchperfd_daemon.commands._traces import captures_dir_option, find_trace, warn
from torchperfd_daemon.errors import PartialResultError, TorchperfdError, UsageError


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
@captures_dir_option
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page to FILE, with a timeline and a flame graph, that opens from disk.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, with every operator.")
@click.option("--markdown", is_flag=True, help="The same as the text, in Markdown.")
@click.option(
    "--csv", "as_csv", is_flag=True, help="The operator table as comma-separated values, every row."
)
def command(
    trace: str,
    limit: int,
    sort_by: str,
    group_by: analysis.GroupBy,
    comm_pattern: str | None,
    captures_dir: Path | None,
    html: Path | None,
    as_json: bool,
    markdown: bool,
    as_csv: bool,
) -> None:
    """Say where a trace's time went: its steps, its GPU, and the operators that took longest.

    TRACE is a trace file (.json or .json.gz), a directory of rank<k>.json[.gz], or a capture's id.
    """
    if as_json + markdown + as_csv > 1:
        raise UsageError("--json, --markdown and --csv are three answers", "ask for one of them")
    files = analysis.rank_files(find_trace(trace, captures_dir))
    summaries: list[tuple[int | None, analysis.Summary]] = []
    failed: list[tuple[int | None, TorchperfdError]] = []
    request = analysis.Request(
        group_by=group_by,
        comm_pattern=comm_pattern,
        rectangles=analysis.rectangles_for(len(files)) if html else 0,
    )
    for file, answer in zip(files, analysis.analyse(files, request), strict=True):
        if isinstance(answer, TorchperfdError):
            failed.append((file.rank, answer))
            continue
        warn(answer)
        summaries.append((answer.rank if file.rank is None else file.rank, answer))
    if not summaries:
        raise failed[0][1]
    across = analysis.across({rank: summary.collectives for rank, summary in summaries if rank is not None})
    advice = analysis.gather([(rank, summary.advice) for rank, summary in summaries])
    document = {
        "schema": analysis.SCHEMA,
        "advice": analysis.advice_to_dict(advice),
        "ranks": [analysis.to_dict(summary, rank, sort_by) for rank, summary in summaries],
        "across": None if across is None else analysis.across_to_dict(across),
        "failed": [{"rank": rank, "error": str(error)} for rank, error in failed],
    }
    if html:
        _write_page(html, analysis.render_html(document, [summary.picture for _, summary in summaries]))
    if as_json:
        click.echo(json.dumps(document))
    elif as_csv:
        click.echo(analysis.to_csv(summaries, sort_by), nl=False)
    elif markdown:
        page = analysis.to_markdown(summaries, advice=advice, across=across, limit=limit, sort_by=sort_by)
        click.echo(page, nl=False)
    elif not html:
        if advice:
            analysis.render_advice(advice, sys.stdout)
            click.echo()
        for number, (rank, summary) in enumerate(summaries):
            if number:
                click.echo()
            analysis.render_text(summary, rank, sys.stdout, limit=limit, sort_by=sort_by)
        if across is not None:
            click.echo()
            analysis.render_across(across, sys.stdout)
    if failed:
        missing = ", ".join(str(rank) for rank, _ in failed)
        raise PartialResultError(
            f"{len(failed)} of {len(files)} ranks are missing ({missing}): {failed[0][1]}"
        )


def _write_page(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TorchperfdError(f"cannot write {file}: {error.strerror}", "name another file") from None
    click.echo(
        f"torchperfd: wrote {file} ({len(page) / 1e6:.1f} MB), a page for any browser; "
        "for every single event open the trace at ui.perfetto.dev",
        err=True,
    )
