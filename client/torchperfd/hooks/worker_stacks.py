"""Stacks of DataLoader workers: each worker answers on a socket of its own, the training process reads them.

A worker has one thread more, which waits for a connection. It then sends the stack of the thread that loads,
and waits again: until it is asked it costs nothing. The socket is in Linux's abstract namespace, so it leaves
no file, and it ends with the process. The worker answers its own user only; the training process accepts an
answer only from the worker's own process. Both take the kernel's word for that.
"""

import _thread
import contextlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from torchperfd.hooks.thread_frames import Stack, called_name, line_at, stacks_at_random

MAX_WORKERS: Final = 64
_MAX_CHILDREN: Final = 256
_MAX_BYTES: Final = 1 << 18
MAX_FAILURES: Final = 10
_SEND_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")
# In torch's own loop, what a frame calls separates the dataset from the function that collates.
_LOADER: Final = "torch/utils/data/"


class StackLine(NamedTuple):
    """A frame: ``line`` is 0 and ``call``, the name of what it calls, is empty where unknown."""

    file: str
    line: int
    function: str
    call: str


class WorkerStack(NamedTuple):
    """The stack of the thread that loads in a worker, innermost first.

    Attributes:
        pid: Of the worker.
        worker: Its number in its loader; -1 where unknown.
    """

    pid: int
    worker: int
    lines: Sequence[StackLine]


def stack_lines(stack: Stack) -> list[StackLine]:
    """Return a stack as data."""
    lines: list[StackLine] = []
    for code, offset, known in stack:
        call = ""
        if not lines or _LOADER in code.co_filename:
            call = called_name(code, offset).removeprefix(".")
        line = line_at(code, offset) if known is None else known
        lines.append(StackLine(_text(code.co_filename), line, _text(code.co_name), call))
    return lines


class WorkerEntry:
    """Replaces the function that a worker runs: it starts to answer requests, then calls that function.

    Pickled, it is its arguments, so that a worker that is not forked needs torchperfd and torch only.

    Args:
        name: The beginning of the sockets' names.
        module: Of the function.
        function: Its name.
        original: The function; by default the module's.
    """

    def __init__(self, name: str, module: str, function: str, original: Any = None) -> None:
        self._where = name, module, function
        found: Any = getattr(import_module(module), function) if original is None else original
        while isinstance(found, WorkerEntry):
            found = found._original
        self._original: Any = found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Stacks are of use, batches are necessary.
        with contextlib.suppress(Exception):
            answer_requests(self._where[0])
        return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """Return how to make it in a process that was not forked."""
        return type(self), self._where


def answer_requests(name: str) -> None:
    """Answer requests for the calling thread's stack until this process ends.

    Raises:
        OSError: There can be no such socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name, os.getpid()))
        listener.listen(2)
        # threading would list the thread, and the script may count its threads.
        _thread.start_new_thread(_answer, (listener, _thread.get_ident(), os.getuid()))
    except BaseException:
        listener.close()
        raise


class WorkerStacks:
    """Reads the stacks of this process's DataLoader workers.

    Attributes:
        name: The beginning of the names of their sockets; no other process can guess it beforehand.
    """

    def __init__(self) -> None:
        self.name = f"torchperfd-{os.urandom(8).hex()}"
        # Its own, since the script may have seeded the module's.
        self._chance = random.Random()

    def read(
        self, seconds: float, pids: Sequence[int] | None = None, most: int = MAX_WORKERS
    ) -> list[WorkerStack]:
        """Return the stacks of those workers that answer in time, by process id.

        A worker does not answer while native code holds its interpreter.

        Args:
            pids: Those to ask; by default all children of this process that are workers.
            most: How many to ask; of more workers, that many by chance.
        """
        deadline = time.monotonic() + seconds
        poll = select.poll()
        waiting: dict[int, tuple[socket.socket, int, bytearray]] = {}
        found: list[WorkerStack] = []
        try:
            known = [*(_children() if pids is None else pids)]
            self._chance.shuffle(known)
            for pid in known[:_MAX_CHILDREN]:
                connection = self.connect(pid) if len(waiting) < most else None
                if connection is not None:
                    waiting[connection.fileno()] = connection, pid, bytearray()
                    poll.register(connection, select.POLLIN)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for number, _ in poll.poll(left * 1000):
                    connection, pid, data = waiting[number]
                    part = _receive(connection)
                    data += part
                    if not part or len(data) > _MAX_BYTES:
                        poll.unregister(number)
                        connection.close()
                        del waiting[number]
                        found += _read(pid, bytes(data))
        finally:
            for connection, _, _ in waiting.values():
                connection.close()
        return sorted(found)

    def connect(self, pid: int) -> socket.socket | None:
        """Return a connection to a worker; None if it does not listen, or is another process by now."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        # Without a listener, or with a queue that is full, this fails at once.
        with contextlib.suppress(OSError):
            connection.connect(_address(self.name, pid))
            if _peer(connection)[0] == pid:
                return connection
        connection.close()
        return None


def _answer(listener: socket.socket, ident: int, uid: int) -> None:
    failures = 0
    while failures < MAX_FAILURES:
        try:
            # The script's handlers run on the main thread, which a signal is to wake up.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_SEND_S)
                if _peer(connection)[1] == uid:
                    connection.sendall(_stack(ident))
                else:
                    failures += 1
        except Exception:  # noqa: BLE001 - a worker never fails for its stack
            failures += 1
    # Another user who goes on connecting would take time from the worker.
    listener.close()


def _stack(ident: int) -> bytes:
    lines = stack_lines(stacks_at_random().get(ident, ()))
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)()
    return json.dumps({"worker": getattr(worker_info, "id", -1), "lines": lines}).encode()


def _read(pid: int, data: bytes) -> list[WorkerStack]:
    """Return a worker's answer; nothing of one that is cut off."""
    try:
        answer = json.loads(data)
        return [WorkerStack(pid, int(answer["worker"]), [StackLine(*line) for line in answer["lines"]])]
    except (ValueError, KeyError, TypeError):
        return []


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""  # the worker has ended


def _children() -> list[int]:
    """Return the process ids of the children that multiprocessing knows; ended ones are not waited for."""
    children = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    return [child.pid for child in tuple(children) if child.pid is not None]


def _address(name: str, pid: int) -> str:
    return f"\0{name}-{pid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _text(name: str) -> str:
    """Return a name that JSON and protobuf take; bytes of a file's name that are no UTF-8 are replaced."""
    return name[:500].encode("utf-8", "replace").decode()
