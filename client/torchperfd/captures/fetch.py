"""Fetching: files of a capture that a service keeps, copied into this user's own captures directory."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from torchperfd.captures.files import CaptureFolder, CapturesDirectory
from torchperfd.errors import CaptureError

Download = Callable[[str, str, float], Iterator[bytes]]
"""Yields a file of a capture in pieces: its id, the file's name, and the most seconds that it may take."""

_FILE_S: Final = 600.0


class CaptureFetcher:
    """Finds the files of captures, wherever the daemon keeps them.

    Args:
        directory: Where captures of this process go.
        download: Asks the daemon; raises OSError where it does not answer.
    """

    def __init__(self, directory: CapturesDirectory, download: Download) -> None:
        self._directory = directory
        self._download = download

    def fetch(self, capture_id: str, folder: str, names: Iterable[str]) -> Path:
        """Return a folder that this process can read with files of a capture; fetched if need be.

        Args:
            capture_id: The capture.
            folder: Where the daemon keeps it; used as it is if this process can read it.
            names: The files.

        Raises:
            CaptureError: The daemon does not send a file, or it cannot be written.
        """
        if folder and os.access(folder, os.R_OK | os.X_OK):
            return Path(folder)
        try:
            path = self._directory.folder(capture_id)
            with CaptureFolder.opened(path) as opened:
                for name in names:
                    self._fetch(opened, path, name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CaptureError(f"cannot fetch capture {capture_id} from the daemon: {reason}") from error
        return path

    def read(self, capture_id: str, name: str, most_bytes: int, timeout: float) -> bytes:
        """Return a small file of a capture; empty if the daemon does not send it whole in time."""
        content = b""
        with contextlib.suppress(OSError):
            for piece in self._download(capture_id, name, timeout):
                content += piece
                if len(content) > most_bytes:
                    return b""
            return content
        return b""

    def _fetch(self, folder: CaptureFolder, path: Path, name: str) -> None:
        if (path / name).is_file():
            return
        with folder.writing(name) as file:
            for piece in self._download(path.name, name, _FILE_S):
                file.write(piece)
