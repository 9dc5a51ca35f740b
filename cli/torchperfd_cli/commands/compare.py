"""``torchperfd compare``, of two traces, captures or whole runs."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from torchperfd.model.formatting import did_you_mean
from torchperfd.report.comparison import compare_runs
from torchperfd.report.previous_runs import comparison_document, markdown_document, people_document
from torchperfd.report.rank import RUN_SCHEMA
from torchperfd.report.record import RunRecord
from torchperfd.report.store import RunStore, read_file
from torchperfd_cli.commands._capture_catalog import captures_dir_option, open_catalog
from torchperfd_cli.commands._options import (
    MOMENT,
    SHARE,
    complete_sides,
    open_runs,
    refuse_given,
    runs_dir_option,
)
from torchperfd_cli.commands._output import emit, html_option, note, page, write_page
from torchperfd_cli.commands._traces import (
    capture_facts,
    capture_record,
    decided,
    find_trace,
    refuse_foreign_files,
    warn,
)
from torchperfd_cli.commands.history import open_lake
from torchperfd_cli.lake.reports import lake_run
from torchperfd_daemon import analysis
from torchperfd_daemon.errors import (
    NoSuchTargetError,
    PartialResultError,
    SlowerError,
    TorchperfdError,
    UnseenRanksError,
    UsageError,
    explained,
)
from torchperfd_daemon.pages import render_page
from torchperfd_daemon.views.model import whole_name

# Keys of a report in any order fit into far less, if it is one.
_HEAD_BYTES: Final = 4096
_CAPTURE_ID_BEGINS: Final = re.compile(r"[0-9]{1,8}|[0-9]{8}-[0-9]{0,6}|[0-9]{8}-[0-9]{6}-[0-9a-f]{0,6}")


def find_run(given: str, store: RunStore, captures_dir: Path | None) -> RunRecord | None:
    """Return the run that an argument names: a report's file, or a kept run by a prefix of its id.

    Returns:
        None where it names something else, such as a trace or a capture.

    Raises:
        NoSuchRunError: Several kept runs begin so.
        NoSuchTargetError: A run and a capture begin so.
        RunFileError: The report is damaged.
    """
    if os.path.lexists(given):
        return read_file(given) if _is_report(Path(given)) else None
    with explained(f"cannot read {store.directory}"):
        run_id = store.find(given)
    if run_id is None:
        return None
    # Slurm's job ids are numbers, as captures' ids begin with one. Asking for these may take a second.
    if run_id != given and _CAPTURE_ID_BEGINS.fullmatch(given):
        capture_id = whole_name(given, open_catalog(captures_dir).ids(), "capture")
        if capture_id != given:
            raise NoSuchTargetError(
                f"run {run_id} and capture {capture_id} begin with {given}", "write more of one"
            )
    return store.read(run_id)


def print_comparison(
    before: RunRecord,
    after: RunRecord,
    *,
    html: Path | None,
    as_json: bool,
    markdown: bool,
    fail_above: float | None,
) -> None:
    """Print what changed from one run to the other, or write it to a page.

    Raises:
        RunFileError: A report has too few steps to compare.
        SlowerError: The second one's step is slower by more than ``fail_above``.
        UnseenRanksError: It is not, as far as ranks were seen, and not all were.
    """
    comparison = compare_runs(before, after)
    if html:
        title = f"{before.run} → {after.run}"
        write_page(html, render_page("run_comparison", title, comparison_document(comparison)))
    if as_json:
        emit(comparison_document(comparison))
    elif markdown:
        emit(markdown_document(comparison), "markdown")
    elif not html:
        emit(people_document(comparison))
    if fail_above is not None and comparison.is_slower_than(fail_above):
        raise SlowerError(f"a step of B is slower by more than the limit of {fail_above:.1%}")
    if fail_above is not None and comparison.unseen:
        raise UnseenRanksError(
            f"whether a step of B is slower is not known: {comparison.unseen}",
            "connect the daemons of all nodes (`torchperfd serve --fleet-peers`), and repeat the run",
        )


def refuse_mixed(given: str, other: str, store: RunStore) -> NoSuchTargetError:
    """Return the error where one argument is a run and the other is none."""
    lists = "`torchperfd runs` lists runs, `torchperfd captures list` captures"
    return NoSuchTargetError(
        f"{given} is a run, and {other} is neither a kept run nor a report of one",
        did_you_mean(other, (each.run_id for each in store.list()))
        or f"name two runs, or two captures; {lists}",
    )


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with explained(f"cannot read {path}"), path.open("rb") as file:
        return RUN_SCHEMA.encode() in file.read(_HEAD_BYTES)


# The trace of one rank on each side.
_Pair = tuple[analysis.RankFile, analysis.RankFile]


@click.command("compare")
@click.argument("before", metavar="A", shell_complete=complete_sides)
@click.argument("after", metavar="[B]", required=False, shell_complete=complete_sides)
@click.option("--ranks", metavar="K,L", help="Compare two ranks of the one capture A.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=15, show_default=True, help="Rows in each table."
)
@click.option(
    "--sort-by",
    type=click.Choice(list(analysis.COMPARISON_ORDERS)),
    default="difference",
    show_default=True,
    help="The order of rows, largest first.",
)
@click.option("--comm-pattern", metavar="REGEX", help="Further names of communication kernels.")
@captures_dir_option
@runs_dir_option
@click.option("--lake", metavar="URL", help="Take two runs of any nodes, from the lake of `serve --lake`.")
@click.option("--since", type=MOMENT, help="With --lake: the first day, like 30d; a week ago by default.")
@html_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, with every row.")
@click.option("--markdown", is_flag=True, help="The same as the text, in Markdown.")
@click.option(
    "--fail-above",
    type=SHARE,
    metavar="PERCENT",
    help="Of two runs: exit with code 7 if a step of B is slower by more than this, such as 5%.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Of two captures: traces analysed at once; by default one for each core.",
)
@click.pass_context
def compare_command(
    context: click.Context,
    before: str,
    after: str | None,
    ranks: str | None,
    limit: int,
    sort_by: str,
    comm_pattern: str | None,
    captures_dir: Path | None,
    runs_dir: Path | None,
    lake: str | None,
    since: float | None,
    html: Path | None,
    as_json: bool,
    markdown: bool,
    fail_above: float | None,
    workers: int | None,
) -> None:
    """Show what is new, gone, or changed beyond noise from A to B, per step.

    A and B are two runs: ids of kept runs (`torchperfd runs`), files that `run --report` wrote, or with
    --lake names of runs of any nodes. Or they are two captures: ids, trace files (.json or .json.gz), or
    directories of them; of two directories the ranks that both have are compared. The beginning of an id is
    enough if only one begins so.
    """
    if as_json and markdown:
        raise UsageError("--json and --markdown exclude each other", "leave one out")
    if (after is None) == (ranks is None):
        raise UsageError("compare needs two sides", "name a B, or two --ranks of A")
    if since is not None and not lake:
        raise UsageError("--since needs --lake", "name the lake with --lake URL")
    runs = None
    if lake:
        refuse_given(context, ["ranks", "runs_dir"], "does not apply to a lake")
        runs = _lake_runs(before, after or "", lake, since)
    elif after is not None:
        runs = _runs(before, after, runs_dir, captures_dir)
    if runs is not None:
        of_captures = ("limit", "sort_by", "comm_pattern", "captures_dir", "workers")
        refuse_given(context, of_captures, "does not apply to two runs", "name two captures, or omit it")
        print_comparison(*runs, html=html, as_json=as_json, markdown=markdown, fail_above=fail_above)
        return
    refuse_given(context, ["fail_above"], "does not apply to two captures", "name two runs, or omit it")
    notes: list[str] = []
    sides = [find_trace(side, captures_dir) for side in (before, after or before)]
    for path in sides:
        refuse_foreign_files([path])
    files = analysis.rank_files(sides[0], notes.append)
    if after is None:
        pairs = [_two_ranks(files, ranks or "")]
    else:
        pairs = _pairs(files, analysis.rank_files(sides[1], notes.append), notes.append)
    for line in notes:
        decided(line)
    comparison, failed = _compared(pairs, analysis.Request(comm_pattern=comm_pattern, samples=True), workers)
    document = analysis.comparison_to_dict(comparison, sort_by)
    for side, path in zip(("before", "after"), sides, strict=True):
        document[side]["capture"] = capture_facts(capture_record([path]))
    document["notes"] += notes
    document["failed"] = [{"rank": rank, "error": str(error)} for rank, error in failed]
    if html:
        write_page(html, analysis.render_comparison_html(document))
    if as_json:
        emit(document)
    elif markdown:
        emit(analysis.comparison_document(comparison, limit=limit, sort_by=sort_by), "markdown")
    elif not html:
        width = page().columns
        emit(analysis.comparison_document(comparison, limit=limit, sort_by=sort_by, width=width))
    if failed:
        raise PartialResultError(f"{len(failed)} of {len(pairs)} ranks are missing: {failed[0][1]}")


def _runs(
    before: str, after: str, runs_dir: Path | None, captures_dir: Path | None
) -> tuple[RunRecord, RunRecord] | None:
    """Return the two runs that are named, None where captures are."""
    store = open_runs(runs_dir)
    one, other = (find_run(each, store, captures_dir) for each in (before, after))
    if one is None and other is None:
        return None
    if one is None:
        raise refuse_mixed(after, before, store)
    if other is None:
        raise refuse_mixed(before, after, store)
    return one, other


def _lake_runs(before: str, after: str, url: str, since: float | None) -> tuple[RunRecord, RunRecord]:
    with open_lake(url, since) as database:
        runs = lake_run(database, before), lake_run(database, after)
    if database.damaged:
        note(f"{len(database.damaged)} objects of the lake cannot be read")
    return runs


def _two_ranks(files: Sequence[analysis.RankFile], ranks: str) -> _Pair:
    named = ranks.split(",")
    if len(named) != 2 or not all(rank.strip().isdecimal() for rank in named):
        raise UsageError(f"--ranks {ranks} does not name two ranks", "write --ranks 0,3")
    by_rank = {file.rank: file for file in files}
    missing = [rank.strip() for rank in named if int(rank) not in by_rank]
    if missing:
        held = ", ".join(str(file.rank) for file in files if file.rank is not None)
        raise NoSuchTargetError(f"A has no rank {missing[0]}", f"it has {held or 'one trace only'}")
    first, second = (by_rank[int(rank)] for rank in named)
    return first, second


def _pairs(
    before: Sequence[analysis.RankFile], after: Sequence[analysis.RankFile], on_note: Callable[[str], None]
) -> list[_Pair]:
    """Return the ranks that both sides have; a lone trace is compared with a lone one of any rank."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    others = {file.rank: file for file in after}
    pairs = [(file, others[file.rank]) for file in before if file.rank in others]
    if not pairs:
        raise UsageError("A and B have no rank in common", "name one trace file of each")
    alone = {file.rank for file in (*before, *after)} - {file.rank for file, _ in pairs}
    if alone:
        left_out = ", ".join(map(str, sorted(rank for rank in alone if rank is not None)))
        on_note(f"left out, on one side only: rank {left_out}")
    return pairs


def _compared(
    pairs: Sequence[_Pair], request: analysis.Request, workers: int | None
) -> tuple[analysis.Comparison, list[tuple[int | None, TorchperfdError]]]:
    """Analyse both sides and compare them; also return which ranks are missing, and why."""
    files = [file for pair in pairs for file in pair]
    answers = list(analysis.analyse(files, request, workers))
    sides: tuple[list[analysis.Summary], list[analysis.Summary]] = ([], [])
    ranks: list[int | None] = []
    failed: list[tuple[int | None, TorchperfdError]] = []
    for (file, _), one, other in zip(pairs, answers[::2], answers[1::2], strict=True):
        broken = [answer for answer in (one, other) if isinstance(answer, TorchperfdError)]
        if isinstance(one, analysis.Summary) and isinstance(other, analysis.Summary):
            for side, summary in zip(sides, (one, other), strict=True):
                warn(summary)
                side.append(summary)
            ranks.append(file.rank)
        failed += [(file.rank, error) for error in broken[:1]]
    if not ranks:
        raise failed[0][1]
    return analysis.compare(*sides, ranks=ranks), failed
