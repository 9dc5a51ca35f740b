"""Stacks of a rank in which no Python thread can run: by py-spy from outside, or by a signal.

py-spy only copies the process's memory (``--nonblocking``): nothing is paused, interrupted or written. The
signal is sent only at a user's explicit request. Its handler is :mod:`faulthandler`'s and reads the frames of
all threads. If one of them runs Python meanwhile, the process can crash: two of three processes did not
survive 2,000 such signals. So the signal is sent only while the kernel's count of switches shows that the
client's thread waits for the interpreter.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

from torchperfd.model.formatting import one_line
from torchperfd.v1 import access, contract
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.collectors.procfs import parse_table, read
from torchperfd_daemon.service.rank_process import (
    GoneError,
    StackFile,
    UnreachableError,
    check_namespace,
    check_running,
    errors_translated,
    open_stack_file,
)
from torchperfd_daemon.stacks.model import Thread, parse_dump, parse_py_spy, tidy

_PROGRAM: Final = "py-spy"
_MAX_OUTPUT_BYTES: Final = 4 << 20
_MAX_ERROR_CHARACTERS: Final = 120
# It reads memory that another user controls; a dump takes about 40 ms and 20 MB.
_LIMITS: Final = {
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_FSIZE: _MAX_OUTPUT_BYTES,
    resource.RLIMIT_CPU: 10,
    resource.RLIMIT_CORE: 0,
}
_FORBIDDEN: Final = ("permission denied", "not permitted")


async def read_stacks_by_py_spy(
    process: RankProcess, seconds: float, program: Path | None = None, proc: Path = Path("/proc")
) -> tuple[Thread, ...]:
    """Return the stacks of a process, torchperfd's own threads marked.

    Args:
        program: py-spy; by default the one that :func:`find_program` finds.

    Raises:
        UnreachableError: They cannot be read.
    """
    check_namespace(process, proc)
    program = program or find_program(search_path())
    image = check_running(process, proc)
    training, package = await asyncio.to_thread(_marks, process, proc)
    code, output, errors = await _dump(program, process.pid, seconds)
    # Checked again after the dump: meanwhile another process may have got the id, and this one may have run
    # a program of other users, such as sudo, from one end to the other.
    if check_running(process, proc) != image:
        raise GoneError("the process has begun another program")
    if code != 0:
        raise UnreachableError(_explain(errors))
    try:
        threads = parse_py_spy(output, process.pid, training)
    except ValueError as error:
        raise UnreachableError(
            f"the daemon cannot read py-spy's output ({one_line(str(error), _MAX_ERROR_CHARACTERS)})"
        ) from None
    if not any(thread.frames for thread in threads):
        raise UnreachableError("py-spy found no Python frame in it")
    return tidy(threads, package)


def search_path() -> list[Path]:
    """Return the directories to search for py-spy: the one of the daemon's interpreter, then its ``PATH``."""
    return [Path(sys.executable).parent, *map(Path, os.get_exec_path())]


def find_program(directories: Iterable[Path]) -> Path:
    """Return the first py-spy that no other user can have written.

    Args:
        directories: In order; relative ones are passed over.

    Raises:
        UnreachableError: There is none.
    """
    reason = "py-spy is not installed for the daemon; install it beside torchperfd with `pip install py-spy`"
    for directory in directories:
        if not directory.is_absolute():
            continue
        with contextlib.suppress(OSError):
            program = (directory / _PROGRAM).resolve(strict=True)
            if not all(map(_is_trusted, (directory, program.parent, program))):
                reason = f"{directory / _PROGRAM} can be changed by other users, so it is not run"
            elif program.is_file() and os.access(program, os.X_OK):
                return program
    raise UnreachableError(reason)


def _is_trusted(path: Path) -> bool:
    status = path.stat()
    return status.st_uid in (0, os.geteuid()) and not access.may_others_write(status)


def _marks(process: RankProcess, proc: Path) -> tuple[int, str]:
    """Return the ident of the training thread and the directory of the client's code."""
    try:
        with open_stack_file(process, os.O_RDONLY, proc) as file:
            return file.training, file.package
    except UnreachableError:
        # No thread has this ident; and client and daemon are one package, in most places installed once.
        return 0, str(Path(contract.__file__).parents[1]) + os.sep


async def _dump(program: Path, pid: int, seconds: float) -> tuple[int, bytes, bytes]:
    with _memory_file() as output, _memory_file() as errors:
        child = await asyncio.create_subprocess_exec(
            *(program, "dump", "--json", "--nonblocking", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        try:
            _limit(child.pid)
            code = await asyncio.wait_for(child.wait(), seconds)
        except TimeoutError:
            raise UnreachableError(f"py-spy did not finish within {max(seconds, 0):.1f} s") from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        return code, _content(output), _content(errors)


def _limit(pid: int) -> None:
    for what, most in _LIMITS.items():
        # It has ended already, or its limit is lower.
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, what, (most, most))


def _memory_file() -> BinaryIO:
    return os.fdopen(os.memfd_create("torchperfd-py-spy"), "w+b")


def _content(file: BinaryIO) -> bytes:
    return os.pread(file.fileno(), _MAX_OUTPUT_BYTES, 0)


def _explain(errors: bytes) -> str:
    text = errors.decode("utf-8", "replace")
    if any(words in text.lower() for words in _FORBIDDEN):
        return (
            "py-spy may not read it; run the daemon as root or with CAP_SYS_PTRACE,"
            " or as the rank's user with kernel.yama.ptrace_scope at 0"
        )
    first = text.strip().partition("\n")[0]
    return f"py-spy failed: {one_line(first, _MAX_ERROR_CHARACTERS) or 'no error output'}"


_MAX_STACKS_BYTES: Final = 1 << 20
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
            data = os.pread(self._file.descriptor, _MAX_STACKS_BYTES, self._file.header_bytes)
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
