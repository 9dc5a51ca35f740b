"""Handing over: a service's daemon takes the files of a capture, as open descriptors, into its own directory.

The daemon copies what it reads from the descriptors. So this process needs no access to the daemon's
directory, and may be another user's or see other mounts. Nothing here runs on the training thread, except
after an allocation has failed, and every wait has a limit.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torchperfd.safety.descriptors import are_descriptors_scarce
from torchperfd.v1 import access, contract

CONNECT_S: Final = 5.0
"""Longest wait for the daemon to accept the connection."""
TURN_S: Final = 30.0
"""Longest wait for the daemon to begin; it takes the files of few ranks of a user at once."""
_MIN_SPEED: Final = 5_000_000.0
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
            capture_id: The capture.
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
                connection.settimeout(turn_seconds + size / _MIN_SPEED)
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
