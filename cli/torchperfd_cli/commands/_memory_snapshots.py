"""Shared by ``torchperfd analyze``: the page of memory snapshots."""

import io
import json
import sys
from collections.abc import Sequence
from typing import Final

import click
from click.core import ParameterSource

from torchperfd_daemon import memory
from torchperfd_daemon.errors import PartialResultError, TorchperfdError, UsageError

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
    _refuse_options_of_traces(click.get_current_context())
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
            text = io.StringIO()
            memory.write_page(summaries, text)
            document["text"] = text.getvalue()
        click.echo(json.dumps(document))
    else:
        memory.write_page(summaries, sys.stdout)
    if failed:
        raise PartialResultError(f"{len(failed)} of {len(files)} snapshots are missing: {failed[0][1]}")


def _refuse_options_of_traces(context: click.Context) -> None:
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _OPTIONS
        and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(f"{given[0]} is for traces, not for memory snapshots", "leave it out")
