"""The handover: training processes hand the files of captures over as open descriptors.

gRPC passes no descriptors. So a connection to the daemon's socket that begins with a greeting of its own is
served here instead. The kernel identifies the user who connects, the token of its session the rank. Reading a
user's file may wait for as long as that user likes: each connection has a thread of its own, and each user
only few at a time.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from torchperfd.v1 import contract, session_pb2
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.captures.intake import MAX_FILES, Sender, take
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.logs import LogLimiter
from torchperfd_daemon.rpc.callers import Caller, UserLimit
from torchperfd_daemon.service.permissions import AuditLine

log = logging.getLogger("torchperfd.captures")

_AT_ONCE: Final = 2
"""Connections of one user that are served at the same time; the others wait."""
_MAX_OF_USER: Final = 256
_MAX_OF_ALL: Final = 1024
_MESSAGE_S: Final = 10.0
_MAX_MESSAGE_BYTES: Final = 1 << 14
_HEAD_BYTES: Final = 4


class CaptureHandovers:
    """Serves the connections that hand files of captures over.

    Args:
        catalog: Where the files go.
        find: Returns the rank whose session has a token and a caller's user; None where there is none.
    """

    def __init__(self, catalog: Catalog, find: Callable[[str, Caller], Sender | None]) -> None:
        self._catalog = catalog
        self._find = find
        self._limit = UserLimit("captures being handed over", _MAX_OF_USER, _MAX_OF_ALL)
        self._limiter = LogLimiter(log)
        self._turns: defaultdict[int | None, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_AT_ONCE)
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, connection: socket.socket, caller: Caller) -> None:
        """Serve a connection that has sent the greeting; takes the socket over."""
        refused = self._limit.admit(caller.uid)
        if refused:
            connection.close()
            self._limiter.warning("a handover of %s is refused: %s", caller, refused)
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Serve no more connections."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        try:
            async with self._turns[caller.uid]:
                await _in_thread(lambda: self._receive(connection, caller))
        finally:
            connection.close()
            self._limit.dismiss(caller.uid)

    def _receive(self, connection: socket.socket, caller: Caller) -> None:
        """Serve one connection, on a thread of its own."""
        answer = session_pb2.CaptureHandoverResult()
        descriptors: list[int] = []
        try:
            connection.settimeout(_MESSAGE_S)
            connection.sendall(contract.HANDOVER_READY)
            message = _message(connection, descriptors)
            sender = self._find(message.token, caller)
            if sender is None:
                answer.reason = "the daemon has no session of this process"
                answer.unknown_session = True
            else:
                self._take(message, sender, descriptors, caller)
        except TorchperfdError as error:
            answer.reason = str(error)
        except (OSError, DecodeError) as error:
            answer.reason = f"it was not received: {error}"
        except Exception:
            log.exception("files of a capture were not taken over")
            answer.reason = "internal error; see the daemon's log"
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if answer.reason:
            self._limiter.warning("files of a capture of %s are not taken over: %s", caller, answer.reason)
        content = answer.SerializeToString()
        with contextlib.suppress(OSError):
            connection.sendall(len(content).to_bytes(_HEAD_BYTES, "big") + content)

    def _take(
        self, message: session_pb2.CaptureHandover, sender: Sender, descriptors: list[int], caller: Caller
    ) -> None:
        if len(descriptors) != len(message.files) or len(set(message.files)) != len(message.files):
            raise TorchperfdError("there is not one descriptor for each file")
        line = AuditLine("handover", f"rank {sender.rank} of run {sender.run}", caller)
        try:
            files = dict(zip(message.files, descriptors, strict=True))
            take(self._catalog, message.capture_id, sender, files)
            line.allowed([sender.uid], message.capture_id)
        except TorchperfdError as error:
            line.failed(error)
            raise


def _message(connection: socket.socket, descriptors: list[int]) -> session_pb2.CaptureHandover:
    """Receive the message, and the descriptors that come with it.

    Raises:
        OSError: It does not come whole.
        DecodeError: It is none.
    """
    head, received, _, _ = socket.recv_fds(
        connection, _HEAD_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    )
    descriptors.extend(received)
    length = int.from_bytes(head, "big")
    if len(head) != _HEAD_BYTES or length > _MAX_MESSAGE_BYTES:
        raise ConnectionError("the message is not of the expected form")
    content = b""
    while len(content) < length:
        piece = connection.recv(length - len(content))
        if not piece:
            raise ConnectionError("the process has left")
        content += piece
    return session_pb2.CaptureHandover.FromString(content)


async def _in_thread(work: Callable[[], None]) -> None:
    """Run work on a thread of its own, which the process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="torchperfd-handover", daemon=True).start()
    await done.wait()
