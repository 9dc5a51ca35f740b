"""The files of a capture in this process: their directory, how they are opened, and their handover.

The directory belongs to this user. The folder of a capture is examined before it is used, files are opened
below its descriptor and never through a link, and each is made under a name that cannot be guessed before it
gets its own.

A service's daemon takes the files as open descriptors and copies what it reads into its own directory, which
this process need not be able to access. No handover runs on the training thread, except after an allocation
has failed, and every wait has a limit.
"""

import contextlib
import errno
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from torchperfd.safety.descriptors import are_descriptors_scarce
from torchperfd.v1 import access, contract
from torchperfd.v1.contract import CAPTURE_ID

CONNECT_S: Final = 5.0
"""Longest wait for the daemon to accept the connection."""
TURN_S: Final = 30.0
"""Longest wait for the daemon to begin; it takes the files of few ranks of a user at once."""
_MIN_BYTES_PER_SECOND: Final = 5_000_000.0
"""Bytes per second; a daemon that reads less is assumed to be stuck."""
_MAX_ANSWER_BYTES: Final = 1 << 16


class HandoverError(Exception):
    """The daemon has not taken the files; the message has the reason, in one line.

    Args:
        may_pass: The daemon may be restarting: another attempt may succeed.
    """

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class Handover:
    """A daemon that takes files of captures.

    Attributes:
        socket: Path of its socket.
        uid: Its user, as the kernel knows it.
        token: Of this process's session with it.
    """

    socket: str
    uid: int
    token: str

    def send(self, capture_id: str, files: Mapping[str, int], turn_seconds: float = TURN_S) -> None:
        """Have the daemon copy files into its directory; returns when it has.

        Args:
            files: Open descriptors of regular files, by their names in the capture.
            turn_seconds: Longest wait for the daemon to begin.

        Raises:
            HandoverError: It has not.
        """
        from torchperfd.v1 import session_pb2

        message = session_pb2.CaptureHandover(token=self.token, capture_id=capture_id, files=[*files])
        content = message.SerializeToString()
        if are_descriptors_scarce():
            raise HandoverError("few more files may be open, and the script needs them")
        try:
            size = sum(os.fstat(descriptor).st_size for descriptor in files.values())
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(CONNECT_S)
                connection.connect(self.socket)
                if access.peer_uid(connection) != self.uid:
                    raise HandoverError("another user listens at the daemon's socket now")
                connection.sendall(contract.HANDOVER_GREETING)
                connection.settimeout(turn_seconds)
                if _receive(connection, len(contract.HANDOVER_READY)) != contract.HANDOVER_READY:
                    raise HandoverError("the daemon does not answer as expected")
                head = len(content).to_bytes(4, "big")
                socket.send_fds(connection, [head], [*files.values()])
                connection.sendall(content)
                connection.settimeout(turn_seconds + size / _MIN_BYTES_PER_SECOND)
                length = int.from_bytes(_receive(connection, 4), "big")
                if length > _MAX_ANSWER_BYTES:
                    raise HandoverError("the daemon does not answer as expected")
                answer = session_pb2.CaptureHandoverResult.FromString(_receive(connection, length))
        except TimeoutError:
            raise HandoverError("the daemon did not take it in time; is it stopped or overloaded?") from None
        except OSError as error:
            reason = f"the daemon cannot be reached: {error.strerror or error}"
            raise HandoverError(reason, may_pass=True) from error
        if answer.reason:
            raise HandoverError(answer.reason, may_pass=answer.unknown_session)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes.

    Raises:
        OSError: The daemon has closed the connection, or does not answer in time.
    """
    content = b""
    while len(content) < count:
        piece = connection.recv(count - len(content))
        if not piece:
            raise ConnectionError("it closed the connection")
        content += piece
    return content


_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class CapturesDirectory:
    """Where captures of this process go: a directory of this user, from which a service takes them over.

    Attributes:
        path: The directory in use.
        handover: The service that takes captures over; None without one.
        refusal: Why the connected daemon cannot have captures of this process made; empty if it can.
    """

    def __init__(self) -> None:
        self._own = Path(contract.user_captures_dir()).absolute()
        self.path = self._own
        self.handover: Handover | None = None
        self.refusal = ""

    def on_welcome(self, directory: str, handover: Handover | None, daemon_uid: int) -> str:
        """Take over what a connected daemon reports of captures; return a warning, or ''.

        Args:
            directory: Where the daemon keeps captures; empty if that is its own affair.
            handover: How it takes captures over; None if it does not.
            daemon_uid: Its user.
        """
        self.handover, self.refusal, self.path = handover, "", self._own
        if handover is not None or not directory:
            return ""
        path = Path(directory)
        if daemon_uid != os.geteuid():
            self.refusal = (
                f"the daemon of user {daemon_uid} is too old to take captures of other users over;"
                " install this version on it"
            )
        elif not path.is_absolute() or ".." in path.parts:
            return f"the daemon names the captures directory {directory[:200]!r}, which is no absolute path"
        else:
            self.path = path
        return ""

    def folder(self, capture_id: str, directory: str = "") -> Path:
        """Return the folder of a capture.

        Args:
            capture_id: Its name, from the daemon.
            directory: The folder, from the daemon; empty for the one that follows from the name.

        Raises:
            ValueError: The name is none of a capture, or the folder is another one.
        """
        if not CAPTURE_ID.fullmatch(capture_id):
            raise ValueError(f"{capture_id[:80]!r} is no capture id")
        path = (self.path if self.handover is None else self._staging()) / capture_id
        if directory and Path(directory) != path:
            raise ValueError(f"{directory[:200]!r} is not the folder of capture {capture_id} in {self.path}")
        return path

    def _staging(self) -> Path:
        """Return where files lie until the service has taken them: the own directory, if it is writable."""
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(self._own, os.W_OK | os.X_OK):
                self.path = self._own
        except OSError:
            # In a container, the home may be read-only or absent.
            if self.path == self._own:
                self.path = Path(tempfile.mkdtemp(prefix="torchperfd-captures-"))
        return self.path


class CaptureFolder:
    """The open folder of one capture."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator["CaptureFolder"]:
        """Open a capture's folder, made if need be.

        Raises:
            UntrustedError: It belongs neither to this user nor to root.
            OSError: It cannot be opened or made, or is a link, or the script is short of descriptors.
        """
        if are_descriptors_scarce():
            raise OSError(errno.EMFILE, "few more files may be open, and the script needs them")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        parent = os.open(path.parent, _DIRECTORY)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
            descriptor = os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            owner = os.fstat(descriptor).st_uid
            if owner not in (0, os.geteuid()):
                raise access.UntrustedError(f"{path} belongs to user {owner}")
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def new_name(self, name: str) -> str:
        """Return a hidden name for a file that is to become ``name``; no other user can guess it."""
        stem, dot, suffix = name.partition(".")
        return f".{stem}.{os.urandom(16).hex()}{dot}{suffix}"

    def check_writable(self, name: str) -> None:
        """Find out whether a file of this name could be made.

        Raises:
            OSError: It could not.
        """
        part = self.new_name(name)
        os.close(os.open(part, _NEW_FILE, 0o600, dir_fd=self._descriptor))
        self.remove(part)

    def path_of(self, name: str) -> Path:
        """Return a path by which a library that wants one opens a file below this very folder."""
        below = Path(f"/proc/self/fd/{self._descriptor}")
        return (below if below.exists() else self._path) / name

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            OSError: It cannot be opened, or is a link.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return open(os.open(name, flags, dir_fd=self._descriptor), "rb")  # noqa: PTH123

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        with self.writing(name) as file:
            file.write(content)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing; it gets its name at the end of the block, or is deleted if that fails.

        Raises:
            OSError: It cannot be written.
        """
        part = self.new_name(name)
        try:
            with open(os.open(part, _NEW_FILE, 0o600, dir_fd=self._descriptor), "wb") as file:  # noqa: PTH123
                yield file
            self.rename(part, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(part)
            raise

    def rename(self, part: str, name: str) -> None:
        """Give a file its own name; what had it before is gone.

        Raises:
            OSError: That is not allowed.
        """
        os.rename(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there.

        Raises:
            OSError: That is not allowed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def remove_hidden(self, stem: str) -> None:
        """Delete the unfinished files of a rank, as far as that is allowed."""
        for name in os.listdir(self._descriptor):  # noqa: PTH208 - Path takes no descriptor
            if name.startswith(f".{stem}."):
                with contextlib.suppress(OSError):
                    self.remove(name)
