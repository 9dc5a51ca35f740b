"""Names on the command line: runs and captures by any unique prefix; near misses get a suggestion."""

from collections.abc import Iterable
from typing import Any, Final

import click

from torchperfd.model.formatting import did_you_mean
from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.commands._daemon_catalog import DaemonCatalog
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.views.captures import whole_name as whole_name

_TIMEOUT_S: Final = 10.0


def known_name(given: str, names: Iterable[str], what: str) -> str:
    """Return the only name with a prefix; the prefix itself where no name is near it.

    Raises:
        NoSuchTargetError: Several have the prefix, or none has and some are near it.
    """
    known = set(names)
    name = whole_name(given, known, what)
    hint = did_you_mean(given, known) if given and name not in known else ""
    if hint:
        raise NoSuchTargetError(f"no {what} {given[:80]}", hint)
    return name


def whole_run(daemon: Any, given: str, *, fleet: bool = False, job: str = "") -> str:
    """Return the name of the only run with a prefix, among the runs of a daemon or of its fleet.

    Args:
        job: The job that the run is of, on any node; empty for any job.

    Raises:
        NoSuchTargetError: Several have the prefix, or none has and some are near it.
    """
    if not given:
        return ""
    answer = daemon.ListRuns(control_pb2.ListRunsRequest(fleet=fleet), timeout=_TIMEOUT_S)
    names = [run.run for run in answer.runs]
    # A job is looked for on all nodes, and these are the runs of one.
    return whole_name(given, names, "run") if job else known_name(given, names, "run")


def whole_capture(catalog: Catalog | DaemonCatalog, given: str) -> str:
    """Return the id of the only capture with a prefix.

    Raises:
        NoSuchTargetError: Several have the prefix.
    """
    return whole_name(given, catalog.ids(), "capture")


def capture_argument(context: click.Context, _: click.Parameter, given: Any) -> Any:
    """Complete the ids of captures on a command line; the command's object is their catalog."""
    names = context.obj.ids()
    if isinstance(given, tuple):
        return tuple(known_name(each, names, "capture") for each in given)
    return known_name(given, names, "capture")
