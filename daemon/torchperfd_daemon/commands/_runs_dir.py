"""The directory of kept runs that a command reads, and their ids on its command line."""

from pathlib import Path
from typing import Any

import click

from torchperfd.runs.store import RunStore
from torchperfd.v1 import contract
from torchperfd_daemon.errors import explained

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_RUNS_DIR",
    help="Directory of the kept runs; this user's own by default.",
)


def open_runs(named: Path | None) -> RunStore:
    """Return the kept runs of a directory; of this user's own without one."""
    return RunStore(str(named) if named is not None else contract.user_runs_dir())


def whole_kept_run(context: click.Context, _: click.Parameter, given: Any) -> Any:
    """Complete the ids of kept runs on a command line; the command's object is their store."""
    with explained(f"cannot read {context.obj.directory}"):
        if isinstance(given, tuple):
            return tuple(context.obj.whole_id(each) for each in given)
        return context.obj.whole_id(given)
