"""Stacks of a rank in which no Python thread can run: the signal it has prepared for, and what that wrote.

The client has left a file in memory open that says which signal writes its stacks, and which of its
threads to send it to. Nothing that a client says over the wire decides here: the process's own
descriptors do, so that nobody can have a process signalled that has not asked for it.
"""

import asyncio
import contextlib
import ctypes
import json
import math
import os
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd.v1 import contract
from torchperfd_daemon.collectors.procfs import open_memory_file, parse_stat, parse_table, read
from torchperfd_daemon.collectors.ranks import RankProcess, own_namespace
from torchperfd_daemon.stacks import Thread, parse_dump, tidy

_MOST_FIRST_LINE: Final = 4096
_MOST_BYTES: Final = 1 << 20
_POLL_S: Final = 0.005
# A thread that waits for the interpreter looks again 200 times per second, fewer when the node is busy; the
# client's otherwise wakes up a dozen times per second.
_SAMPLE_S: Final = 0.25
_WAITING_SWITCHES_PER_S: Final = 100
# The C library has a function for it only since glibc 2.30.
_TGKILL: Final = {"x86_64": 234, "aarch64": 131}


class UnreachableError(Exception):
    """The rank's stacks cannot be had; ``str()`` says why."""


class GoneError(UnreachableError):
    """The process has ended."""


class StoppedError(UnreachableError):
    """The process is stopped, so that nothing in it runs."""


@dataclass(frozen=True, slots=True)
class _Invitation:
    """What a process says on the first line of its file."""

    signal: int
    thread: int
    training: int
    package: str
    length: int


def look(process: RankProcess, proc: Path = Path("/proc")) -> None:
    """Make sure that a rank's process is there and is not stopped.

    A process of another pid namespace is taken to be there.

    Raises:
        GoneError: It has ended, or another process has its id now.
        StoppedError: It is stopped.
    """
    if process.pid_namespace != own_namespace(proc):
        return
    try:
        text = read(f"{proc}/{process.pid}/stat")
        start = parse_stat(text).start_ticks
    except (OSError, ValueError):
        raise GoneError("the process has ended") from None
    state = text.rpartition(")")[2].split()[0]
    if start != process.start_ticks or state in "ZX":
        raise GoneError("the process has ended")
    if state == "T":
        raise StoppedError(f"by a signal; let it go on with `kill -CONT {process.pid}`")
    if state == "t":
        tracer = parse_table(read(f"{proc}/{process.pid}/status")).get("TracerPid", "?")
        raise StoppedError(f"by a debugger, process {tracer}")


async def stacks_by_signal(
    process: RankProcess, seconds: float, proc: Path = Path("/proc")
) -> tuple[Thread, ...]:
    """Have a process write its stacks down, and return them, torchperfd's own threads marked.

    Args:
        process: Whose.
        seconds: How long to wait for them.
        proc: Root of procfs.

    Raises:
        UnreachableError: They cannot be had.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    request = await asyncio.to_thread(_Request, process, proc)
    try:
        await asyncio.to_thread(request.prepare)
        while not await asyncio.to_thread(request.send):
            if loop.time() > deadline:
                raise UnreachableError("Python runs in it, or may run, and asking it by a signal is not safe")
            await asyncio.sleep(_SAMPLE_S)
        while await asyncio.to_thread(request.is_under_way):
            if loop.time() > deadline:
                await asyncio.to_thread(look, process, proc)
                raise UnreachableError("it does not take signals")
            await asyncio.sleep(_POLL_S)
        return await asyncio.to_thread(request.read)
    finally:
        request.close()


def waits_in(process: RankProcess, proc: Path = Path("/proc")) -> str:
    """Return what the kernel says of a process that does not answer; empty when it says nothing."""
    try:
        if process.pid_namespace != own_namespace(proc):
            return ""
        state = parse_table(read(f"{proc}/{process.pid}/status")).get("State", "")
        channel = read(f"{proc}/{process.pid}/wchan")
    except OSError:
        return ""
    return f"its main thread is in state {state}" + (f" in {channel}" if channel not in ("", "0") else "")


class _Request:
    """A process's file, and the signal that has it written.

    Every method raises UnreachableError where it cannot do its part.
    """

    def __init__(self, process: RankProcess, proc: Path) -> None:
        if process.pid_namespace != own_namespace(proc):
            raise UnreachableError("it runs in a pid namespace of its own, where the daemon cannot signal it")
        self._process = process
        self._proc = proc
        with self._told_of_failures():
            file = open_memory_file(proc / str(process.pid), contract.STACKS_FILE, os.O_RDWR | os.O_NONBLOCK)
        if file is None:
            raise UnreachableError("it has not prepared for being asked by a signal")
        self._file = file
        self._sample = 0, math.inf
        self._returned = False
        try:
            with self._told_of_failures():
                self._invitation = _read_invitation(file)
        except UnreachableError:
            self.close()
            raise

    def prepare(self) -> None:
        """Make sure that the signal is expected, and cut off what was written before."""
        wanted = self._invitation
        with self._told_of_failures():
            if not self._has("SigCgt"):
                raise UnreachableError(f"it no longer has a handler of signal {wanted.signal}")
            if self._has("SigBlk"):
                raise UnreachableError(f"it blocks signal {wanted.signal}")
            os.ftruncate(self._file, wanted.length)

    def send(self) -> bool:
        """Send the signal if the thread was waiting for the interpreter ever since the last call.

        The handler reads the frames of all threads. If one of them ran Python meanwhile, the process could
        crash. While the thread waits, which it does in turns of 5 ms, none does: the
        interpreter would have been handed over to it.
        """
        number = _TGKILL.get(platform.machine())
        if number is None:
            raise UnreachableError(f"the daemon cannot signal a single thread on {platform.machine()}")
        wanted = self._invitation
        with self._told_of_failures():
            look(self._process, self._proc)
            before, since = self._sample
            switches, now = int(self._status()["voluntary_ctxt_switches"]), time.monotonic()
            self._sample = switches, now
            if now - since < _SAMPLE_S or switches - before < (now - since) * _WAITING_SWITCHES_PER_S:
                return False
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syscall(number, self._process.pid, wanted.thread, wanted.signal):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return True

    def is_under_way(self) -> bool:
        """Return whether the handler has yet to return.

        Until it has, the signal is pending, then blocked; there is a moment in between, so that it
        has to be neither twice in a row.
        """
        with self._told_of_failures():
            idle = not self._has("SigPnd") and not self._has("SigBlk")
            returned = idle and os.fstat(self._file).st_size > self._invitation.length
        under_way, self._returned = not (returned and self._returned), returned
        return under_way

    def read(self) -> tuple[Thread, ...]:
        """Return what was written."""
        with self._told_of_failures():
            text = os.pread(self._file, _MOST_BYTES, self._invitation.length).decode("utf-8", "replace")
        threads = tidy(parse_dump(text, self._invitation.training), self._invitation.package)
        if not any(thread.frames for thread in threads):
            raise UnreachableError("its handler of the signal wrote nothing")
        return threads

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _has(self, mask: str) -> bool:
        """Return whether the signal is in one of the thread's masks, of its process for ``SigCgt``."""
        return bool(int(self._status()[mask], 16) >> (self._invitation.signal - 1) & 1)

    def _status(self) -> dict[str, str]:
        return parse_table(read(f"{self._proc}/{self._process.pid}/task/{self._invitation.thread}/status"))

    @contextlib.contextmanager
    def _told_of_failures(self) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            raise UnreachableError(
                "it belongs to another user; run the daemon as that user or as root"
            ) from None
        except (FileNotFoundError, ProcessLookupError):
            look(self._process, self._proc)
            raise UnreachableError("its thread that takes the signal has ended") from None
        except OSError as error:
            raise UnreachableError(f"asking it by a signal failed: {error.strerror}") from None


def _read_invitation(file: int) -> _Invitation:
    line, end, _ = os.pread(file, _MOST_FIRST_LINE, 0).partition(b"\n")
    try:
        told: dict[str, Any] = json.loads(line) if end else {}
        invitation = _Invitation(
            int(told["signal"]),
            int(told["thread"]),
            int(told["training"]),
            str(told["package"]),
            len(line) + 1,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise UnreachableError("it has not said how it can be asked by a signal") from None
    # An ordinary signal means something, and would end what does not expect it.
    if not signal.SIGRTMIN <= invitation.signal <= signal.SIGRTMAX:
        raise UnreachableError(f"it asks for signal {invitation.signal}, which the daemon does not send")
    return invitation
