"""Chooses the captures of a command: in the directory named, the daemon's, or this user's own."""

import contextlib
import os
from pathlib import Path
from typing import Final

import click

from torchperfd.v1 import contract, control_pb2
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._daemon_catalog import DaemonCatalog
from torchperfd_daemon.errors import TorchperfdError

_ANSWER_S: Final = 1.0

captures_dir_option = click.option(
    "--captures-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_CAPTURES_DIR",
    help="The captures directory; by default that of the daemon that answers, else this user's own.",
)


def open_catalog(named: Path | None) -> Catalog | DaemonCatalog:
    """Return the captures to read.

    Captures that a service coordinated are the service's, so its answer comes before this user's own
    directory. A directory of the daemon's that this user cannot read is read through the daemon.

    Args:
        named: The directory that the user named; None for none.
    """
    if named is not None:
        return Catalog(named)
    directory = _directory_of_daemon()
    if directory is None:
        return Catalog(own_directory())
    is_readable = os.access(directory, os.R_OK | os.X_OK)
    return Catalog(directory) if is_readable else DaemonCatalog(directory)


def own_directory() -> Path:
    """Return this user's captures directory when no daemon names another."""
    return Path(contract.user_captures_dir())


def _directory_of_daemon() -> Path | None:
    with contextlib.suppress(TorchperfdError), connect(None, answer_seconds=_ANSWER_S) as daemon:
        info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_ANSWER_S)
        directory = Path(info.captures_dir)
        if directory.is_absolute():
            return directory
    return None
