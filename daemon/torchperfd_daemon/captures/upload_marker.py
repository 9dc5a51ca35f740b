"""The upload marker: a file beside the captures with the URL that their daemon uploads them to."""

import contextlib
import os
from pathlib import Path
from typing import Final

from torchperfd_daemon.captures import folder
from torchperfd_daemon.errors import explained
from torchperfd_daemon.text import one_line

_MARKER: Final = ".uploads-to"
_MAX_BYTES: Final = 2048


def write_upload_marker(directory: Path, url: str) -> None:
    """Write the marker, for `captures list` and `captures upload`, which do not ask the daemon.

    Raises:
        TorchperfdError: It cannot be written.
    """
    with explained(f"cannot write to {directory}", "choose another with --captures-dir"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.opened(directory) as held:
            folder.write(held, _MARKER, url.encode() + b"\n")


def read_upload_marker(directory: Path) -> str:
    """Return the URL that captures are uploaded to; empty when they are not.

    Where a directory is open to all, so is this name: only a marker of its owner's, root's or our own counts.
    """
    with (
        contextlib.suppress(OSError, UnicodeDecodeError),
        folder.opened(directory) as held,
        open(folder.open_file(held, _MARKER), "rb") as file,  # noqa: PTH123
    ):
        if os.fstat(file.fileno()).st_uid in (0, os.geteuid(), os.fstat(held).st_uid):
            return one_line(file.read(_MAX_BYTES).decode().strip(), _MAX_BYTES)
    return ""


def remove_upload_marker(directory: Path) -> None:
    """Remove the marker: captures are no longer uploaded."""
    with contextlib.suppress(OSError):
        (directory / _MARKER).unlink()
