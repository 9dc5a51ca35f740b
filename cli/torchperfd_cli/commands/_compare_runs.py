"""``torchperfd compare`` of two whole runs: finds them, and prints what changed."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Final

import click

from torchperfd.model.formatting import did_you_mean
from torchperfd.model.terminal_text import wants_colour
from torchperfd.runs.comparison import compare_runs
from torchperfd.runs.comparison_text import comparison_document, comparison_markdown, comparison_text
from torchperfd.runs.record import SCHEMA, RunRecord
from torchperfd.runs.store import RunStore, read_file
from torchperfd_cli.commands._capture_catalog import open_catalog
from torchperfd_cli.commands._output import terminal_width, write_page
from torchperfd_cli.commands._scope import whole_capture
from torchperfd_daemon.errors import NoSuchTargetError, SlowerError, UnseenRanksError, explained
from torchperfd_daemon.pages import render_page

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
        capture_id = whole_capture(open_catalog(captures_dir), given)
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
        click.echo(json.dumps(comparison_document(comparison)))
    elif markdown:
        click.echo(comparison_markdown(comparison))
    elif not html:
        text = comparison_text(comparison, colour=wants_colour(sys.stdout), width=terminal_width())
        click.echo(text, color=True)
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
        return SCHEMA.encode() in file.read(_HEAD_BYTES)
