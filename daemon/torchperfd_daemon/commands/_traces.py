"""Shared by commands that read traces: finding one, and warnings about damage."""

from pathlib import Path

import click

from torchperfd_daemon import analysis
from torchperfd_daemon.commands._captures_dir import open_catalog
from torchperfd_daemon.commands._daemon_catalog import DaemonCatalog
from torchperfd_daemon.commands._names import known_name
from torchperfd_daemon.errors import NoSuchTargetError


def find_trace(trace: str, captures_dir: Path | None) -> Path:
    """Return the file or directory of an argument; one that is not a path may be a capture's id."""
    path = Path(trace)
    if path.exists():
        return path
    catalog = open_catalog(captures_dir)
    if path.name == trace:
        trace = known_name(trace, catalog.ids(), "capture")
    try:
        folder = catalog.folder(trace)
    except NoSuchTargetError:
        return path
    if isinstance(catalog, DaemonCatalog):
        return catalog.fetched(trace) if trace in catalog.ids() else path
    return folder if folder.is_dir() else path


def note(line: str) -> None:
    """Print an automatic decision on stderr."""
    click.echo(f"torchperfd: {line}", err=True)


def warn(summary: analysis.Summary) -> None:
    """Print on stderr which parts of a trace could not be read."""
    if summary.damaged:
        click.echo(
            f"torchperfd: {summary.path} is cut off or damaged; these are the {summary.events:,} events "
            f"that could be read, {summary.skipped:,} were broken",
            err=True,
        )
    elif summary.skipped:
        click.echo(f"torchperfd: {summary.path}: skipped {summary.skipped:,} broken events", err=True)
    if summary.quality.reading.more_exports:
        click.echo(
            f"torchperfd: {summary.path} holds another trace after the first; only that is read", err=True
        )
    if summary.quality.reading.has_impossible_times:
        click.echo(
            f"torchperfd: {summary.path} has impossible device times; `torchperfd analyze` lists them",
            err=True,
        )
    if summary.others:
        click.echo(
            f"torchperfd: {summary.path} holds {len(summary.others) + 1} processes, each analysed by itself",
            err=True,
        )
