"""The embedded daemon: a child process where the node has no service."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import BinaryIO

from torchperfd.link.stream import answers
from torchperfd.model.own_commands import own_command
from torchperfd.safety.logs import log
from torchperfd.v1 import access, contract


class EmbeddedDaemon:
    """A daemon that this process started. It listens on loopback and a private socket only.

    It lives until its owner has closed the pipe to it (or died) and no other rank is
    connected any more.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._process.pid

    def leave(self, timeout: float) -> None:
        """Close the pipe to the daemon: it stops once unused. Waits up to ``timeout`` seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # Another rank may still use it; then it goes on after this process has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


def start_unless_one_answers() -> EmbeddedDaemon | None:
    """Start a daemon when the node has none; return it, or None when none was needed or possible.

    Does not wait for it: the client connects when it is up.
    """
    if any(answers(path) for path in contract.socket_candidates()):
        return None
    socket_path = os.environ.get("TORCHPERFD_SOCKET") or contract.user_socket()
    log_path = Path(socket_path).parent / "embedded.log"
    try:
        with _open_log(log_path) as output:
            process = subprocess.Popen(
                own_command("torchperfd_daemon", "serve", "--embedded", "--socket", socket_path),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal is meant for the script.
                start_new_session=True,
            )
    except OSError as error:
        log.warning("cannot start a daemon: %s; steps are timed in this process only", error)
        return None
    return EmbeddedDaemon(process, log_path)


def _open_log(path: Path) -> BinaryIO:
    """Open the daemon's log for appending, in a directory that is made if need be.

    Raises:
        OSError: It cannot be opened, or other users could have put something in its place.
    """
    directory = access.open_directory(str(path.parent), create=True)
    try:
        return open(path, "ab", opener=lambda _, flags: access.open_file(directory, path.name, flags))
    finally:
        os.close(directory)
