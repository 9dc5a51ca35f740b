"""Names on the command line: runs and captures by any unique prefix."""

import contextlib
from typing import Any, Final

import click

from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.captures.folder import is_id
from torchperfd_daemon.views.names import whole_name as whole_name

_TIMEOUT_S: Final = 10.0


def whole_run(daemon: Any, given: str, *, fleet: bool = False) -> str:
    """Return the name of the only run with a prefix, among the runs of a daemon or of its fleet.

    Raises:
        NoSuchTargetError: Several have the prefix.
    """
    if not given:
        return ""
    answer = daemon.ListRuns(control_pb2.ListRunsRequest(fleet=fleet), timeout=_TIMEOUT_S)
    return whole_name(given, (run.run for run in answer.runs), "run")


def whole_capture(catalog: Catalog, given: str) -> str:
    """Return the id of the only capture with a prefix.

    Raises:
        NoSuchTargetError: Several have the prefix.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [each.name for each in catalog.directory.iterdir() if is_id(each.name)]
    return whole_name(given, names, "capture")


def capture_argument(context: click.Context, _: click.Parameter, given: Any) -> Any:
    """Complete the ids of captures on a command line; the command's object is their catalog."""
    if isinstance(given, tuple):
        return tuple(whole_capture(context.obj, each) for each in given)
    return whole_capture(context.obj, given)
