"""``torchperfd analyze``, of traces and memory snapshots."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

import click

from torchperfd.document.blocks import Document, Sentences
from torchperfd.document.terminal import Page, render
from torchperfd_cli.commands._capture_catalog import captures_dir_option
from torchperfd_cli.commands._options import complete_traces, refuse_given
from torchperfd_cli.commands._output import emit, page, write_page
from torchperfd_cli.commands._rank_workers import analyse_ranks, dask_option, memory_option
from torchperfd_cli.commands._traces import (
    capture_facts,
    capture_record,
    decided,
    find_trace,
    loader_advice,
    refuse_foreign_files,
    warn,
    with_lost_ranks,
)
from torchperfd_daemon import analysis, memory
from torchperfd_daemon.errors import NoSuchTargetError, PartialResultError, TorchperfdError, UsageError
from torchperfd_daemon.text import ranks_phrase, ranks_text

_OPTIONS: Final = frozenset({"traces", "captures_dir", "as_json", "with_text"})


def analyze_snapshots(files: Sequence[memory.SnapshotFile], as_json: bool, with_text: bool) -> None:
    """Print the summary of memory snapshots.

    Args:
        files: One for each rank, at least one.
        with_text: In the JSON document, the page as well.

    Raises:
        UsageError: An option of the command line is for traces only.
        PartialResultError: Some of several files could not be read; the others are printed.
        TorchperfdError: None could be read.
    """
    context = click.get_current_context()
    of_traces = {parameter.name or "" for parameter in context.command.params} - _OPTIONS
    refuse_given(context, of_traces, "is for traces, not for memory snapshots")
    summaries: list[tuple[int | None, memory.MemorySummary]] = []
    failed: list[tuple[memory.SnapshotFile, TorchperfdError]] = []
    for file in files:
        try:
            # One at a time: of a snapshot with all its events only the sums remain.
            summaries.append((file.rank, memory.summarise(memory.load(file.path))))
        except TorchperfdError as error:
            failed.append((file, error))
    if not summaries:
        raise failed[0][1]
    if as_json:
        document = {
            "schema": memory.SCHEMA,
            "ranks": [memory.to_dict(summary, rank) for rank, summary in summaries],
            "failed": [{"rank": file.rank, "error": str(error)} for file, error in failed],
        }
        if with_text:
            document["text"] = f"{render(memory.page_document(summaries))}\n"
        emit(document)
    else:
        emit(memory.page_document(summaries))
    if failed:
        raise PartialResultError(f"{len(failed)} of {len(files)} snapshots are missing: {failed[0][1]}")


_Ranked: TypeAlias = tuple[int | None, analysis.Summary]
_PLAIN: Final = Page(reading=110)
"""Advice off a terminal is so wide: a log or a pipe must not reflow with the caller's terminal."""
_MAX_PAGES: Final = 2
"""Of more ranks the text has the page of one."""


@click.command("analyze")
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", shell_complete=complete_traces)
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
    help="What calls in one row have in common besides their name.",
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
@click.option("--with-text", is_flag=True, help="In the JSON document, the text as well, as `text`.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Ranks analysed at once; by default one for each core."
)
@dask_option
@memory_option
@click.option("--markdown", is_flag=True, help="The same as the text, in Markdown.")
@click.option(
    "--csv", "as_csv", is_flag=True, help="The operator table as comma-separated values, every row."
)
@click.option(
    "--rank",
    "chosen",
    type=click.IntRange(min=0),
    multiple=True,
    help="Of several ranks, show this one's page in the text; by default the slowest's. May be repeated.",
)
def analyze_command(
    traces: tuple[str, ...],
    limit: int,
    sort_by: str,
    group_by: analysis.GroupBy,
    comm_pattern: str | None,
    captures_dir: Path | None,
    html: Path | None,
    as_json: bool,
    with_text: bool,
    workers: int | None,
    dask: str | None,
    worker_memory: int | None,
    markdown: bool,
    as_csv: bool,
    chosen: tuple[int, ...],
) -> None:
    """Show where a trace's time went: its steps, its GPU, and the operators that took longest.

    TRACE is a trace file (.json or .json.gz), a directory of such files, one for each rank, a capture's id,
    or the URL of a trace or of a capture (s3://, gs://, az:// or file://), which is read in place. Several
    files are several ranks: the text compares them, and then shows the slowest. If TRACE is a snapshot of
    CUDA memory (.pickle), or a directory of them, the answer is who holds the memory.
    """
    if as_json + markdown + as_csv > 1:
        raise UsageError("--json, --markdown and --csv are three answers", "ask for one of them")
    if with_text and not as_json:
        raise UsageError("--with-text is for the JSON document", "add --json, or leave it out")
    paths = [find_trace(trace, captures_dir) for trace in traces]
    refuse_foreign_files(paths)
    if snapshots := memory.find_snapshots(paths, decided):
        analyze_snapshots(snapshots, as_json, with_text)
        return
    record = capture_record(paths)
    files = with_lost_ranks(analysis.rank_files(paths, decided), paths, record)
    summaries: list[_Ranked] = []
    failed: list[tuple[int | None, TorchperfdError]] = []
    request = analysis.Request(
        group_by=group_by,
        comm_pattern=comm_pattern,
        rectangles=analysis.rectangles_for(len(files)) if html else 0,
        loader_advice=loader_advice(record),
        max_memory=worker_memory,
    )
    for file, answer in zip(files, analyse_ranks(files, request, workers, dask), strict=True):
        if isinstance(answer, TorchperfdError):
            failed.append((file.rank, answer))
            continue
        warn(answer)
        # In a file of several processes it is unknown which one belongs to the rank that the file names.
        rank = None if answer.others else answer.rank if file.rank is None else file.rank
        summaries += [(rank, each) for each in (answer, *answer.others)]
    if not summaries:
        raise failed[0][1]
    across = analysis.across({rank: summary.collectives for rank, summary in summaries if rank is not None})
    advice = analysis.gather([(rank, summary.advice) for rank, summary in summaries])
    report = _Report(summaries, _shown(summaries, across, chosen), advice, across, limit, sort_by)
    # All of them at once would be several times as large as the summaries.
    ranks = (analysis.to_dict(summary, rank, sort_by) for rank, summary in summaries)
    document = {
        "schema": analysis.SCHEMA,
        "capture": capture_facts(record),
        "advice": analysis.advice_to_dict(advice),
        "ranks": list(ranks) if html else ranks,
        "across": None if across is None else analysis.across_to_dict(across),
        "failed": [{"rank": rank, "error": str(error)} for rank, error in failed],
    }
    if html:
        html_page = analysis.render_html(document, [summary.picture for _, summary in summaries])
        write_page(html, html_page, "for every single event open the trace at ui.perfetto.dev")
    if as_json:
        if with_text:
            document["text"] = f"{render(report.document(), _PLAIN)}\n"
        emit(document)
    elif as_csv:
        emit(analysis.csv_document(summaries, sort_by), "csv")
    elif markdown:
        emit(report.document(), "markdown")
    elif not html:
        shown = page()
        shown = replace(shown, reading=shown.columns) if shown.columns else _PLAIN
        emit(report.document(shown.columns), on=shown)
    if failed:
        known = sorted(rank for rank, _ in failed if rank is not None)
        missing = ", ".join([*[ranks_text(known)] * bool(known), *["None"] * (len(failed) - len(known))])
        raise PartialResultError(
            f"{len(failed)} of {len(files)} ranks are missing ({missing}): {failed[0][1]}"
        )


@dataclass(frozen=True, slots=True)
class _Report:
    """The whole answer for people.

    Attributes:
        shown: The ranks whose pages it has.
    """

    summaries: Sequence[_Ranked]
    shown: Sequence[_Ranked]
    advice: Sequence[analysis.Advice]
    across: analysis.Across | None
    limit: int
    sort_by: str

    def document(self, width: int | None = None) -> Document:
        """Return it for people: the advice, the ranks together, and the pages of those shown.

        Args:
            width: Columns of the terminal; None for any.
        """
        found = analysis.advice_document(self.advice, len(self.summaries))
        if self.across is not None:
            found += analysis.across_document(self.across)
        for rank, summary in self.shown:
            found += analysis.summary_document(
                summary, rank, limit=self.limit, sort_by=self.sort_by, width=width
            )
        hidden = self._hidden()
        return found + Document([[Sentences([hidden] * bool(hidden))]])

    def _hidden(self) -> str:
        others = len(self.summaries) - len(self.shown)
        return (
            f"{others:,} more {'rank' if others == 1 else 'ranks'}; --rank N shows rank N" if others else ""
        )


def _shown(
    summaries: Sequence[_Ranked], across: analysis.Across | None, chosen: Sequence[int]
) -> list[_Ranked]:
    """Return the ranks whose pages the text has: those chosen, else all if they are few, else the slowest."""
    if chosen:
        known = {rank for rank, _ in summaries}
        if absent := sorted(set(chosen) - known):
            raise NoSuchTargetError(f"there is no trace of {ranks_phrase(absent)}")
        return [each for each in summaries if each[0] in chosen]
    if len(summaries) <= _MAX_PAGES:
        return list(summaries)
    blamed = None if across is None or across.blamed is None else across.blamed.rank
    return [max(summaries, key=lambda each: (each[0] is not None and each[0] == blamed, _step_ns(each[1])))]


def _step_ns(summary: analysis.Summary) -> float:
    """Return the mean step of a rank, in ns; its recording without steps."""
    steps = [step.duration_ns for step in summary.steps if not step.is_stub]
    return fmean(steps) if steps else summary.duration_ns
