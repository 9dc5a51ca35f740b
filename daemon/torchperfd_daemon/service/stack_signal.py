"""Stacks of a rank in which no Python thread can run, by a signal; only at a user's explicit request.

The handler is :mod:`faulthandler`'s and reads the frames of all threads. If one of them runs Python meanwhile
the process can crash: two of three processes did not survive 2,000 such signals. So the signal is sent only
while the kernel's count of switches shows that the client's thread waits for the interpreter.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import platform
import time
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.procfs import parse_table, read
from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.service.process_state import UnreachableError, check_namespace, check_running
from torchperfd_daemon.service.stack_file import StackFile, errors_translated, open_stack_file
from torchperfd_daemon.stacks import Thread, parse_dump, tidy

_MAX_BYTES: Final = 1 << 20
_POLL_S: Final = 0.005
# A thread that waits for the interpreter wakes up 200 times per second, less often on a busy node; the
# client's otherwise wakes up a dozen times per second.
_SAMPLE_S: Final = 0.25
_WAITING_SWITCHES_PER_S: Final = 100
# The C library has a function for it only since glibc 2.30.
_TGKILL: Final = {"x86_64": 234, "aarch64": 131}


async def request_stacks_by_signal(
    process: RankProcess, seconds: float, proc: Path = Path("/proc")
) -> tuple[Thread, ...]:
    """Have a process write its stacks, and return them, with torchperfd's own threads marked.

    Raises:
        UnreachableError: They cannot be read.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    check_namespace(process, proc)
    await asyncio.to_thread(check_running, process, proc)
    with contextlib.ExitStack() as opened:
        file = await asyncio.to_thread(opened.enter_context, open_stack_file(process, os.O_RDWR, proc))
        request = _SignalRequest(process, file, proc)
        await asyncio.to_thread(request.prepare)
        while not await asyncio.to_thread(request.send):
            if loop.time() > deadline:
                raise UnreachableError("Python runs in it, or may run, and asking it by a signal is not safe")
            await asyncio.sleep(_SAMPLE_S)
        while await asyncio.to_thread(request.is_under_way):
            if loop.time() > deadline:
                await asyncio.to_thread(check_running, process, proc)
                raise UnreachableError("it does not take signals")
            await asyncio.sleep(_POLL_S)
        return await asyncio.to_thread(request.read)


class _SignalRequest:
    """One signal to one process. Every method raises UnreachableError when it fails."""

    def __init__(self, process: RankProcess, file: StackFile, proc: Path) -> None:
        self._process = process
        self._file = file
        self._proc = proc
        self._sample = 0, math.inf
        self._returned = False

    def prepare(self) -> None:
        """Make sure that the signal is expected, and cut off what was written before."""
        with errors_translated(self._process, self._proc):
            if not self._has("SigCgt"):
                raise UnreachableError(f"it no longer has a handler of signal {self._file.signal}")
            if self._has("SigBlk"):
                raise UnreachableError(f"it blocks signal {self._file.signal}")
            os.ftruncate(self._file.descriptor, self._file.header_bytes)

    def send(self) -> bool:
        """Send the signal if the client's thread has waited for the interpreter since the last call.

        While it waits, looking every 5 ms, no thread runs Python, or the interpreter would be handed to it.
        """
        number = _TGKILL.get(platform.machine())
        if number is None:
            raise UnreachableError(f"the daemon cannot signal a single thread on {platform.machine()}")
        with errors_translated(self._process, self._proc):
            check_running(self._process, self._proc)
            before, since = self._sample
            switches, now = int(self._status()["voluntary_ctxt_switches"]), time.monotonic()
            self._sample = switches, now
            if now - since < _SAMPLE_S or switches - before < (now - since) * _WAITING_SWITCHES_PER_S:
                return False
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syscall(number, self._process.pid, self._file.thread, self._file.signal):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return True

    def is_under_way(self) -> bool:
        """Return whether the handler has yet to return.

        Until it has, the signal is pending, then blocked; there is a moment in between, so that it
        has to be neither twice in a row.
        """
        with errors_translated(self._process, self._proc):
            idle = not self._has("SigPnd") and not self._has("SigBlk")
            returned = idle and os.fstat(self._file.descriptor).st_size > self._file.header_bytes
        under_way, self._returned = not (returned and self._returned), returned
        return under_way

    def read(self) -> tuple[Thread, ...]:
        """Return what was written."""
        with errors_translated(self._process, self._proc):
            data = os.pread(self._file.descriptor, _MAX_BYTES, self._file.header_bytes)
            check_running(self._process, self._proc)
        threads = parse_dump(data.decode("utf-8", "replace"), self._file.training)
        if not any(thread.frames for thread in threads):
            raise UnreachableError("its handler of the signal wrote nothing")
        return tidy(threads, self._file.package)

    def _has(self, mask: str) -> bool:
        """Return whether the signal is in one of the thread's masks, of its process for ``SigCgt``."""
        return bool(int(self._status()[mask], 16) >> (self._file.signal - 1) & 1)

    def _status(self) -> dict[str, str]:
        return parse_table(read(f"{self._proc}/{self._process.pid}/task/{self._file.thread}/status"))
