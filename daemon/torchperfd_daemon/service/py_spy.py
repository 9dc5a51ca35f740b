"""Stacks of a rank in which no Python thread can run, read from outside by py-spy.

py-spy only copies the process's memory (``--nonblocking``): nothing is paused, interrupted or written.
"""

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

from torchperfd.v1 import access, contract
from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.service.process_state import (
    GoneError,
    UnreachableError,
    check_namespace,
    check_running,
)
from torchperfd_daemon.service.stack_file import open_stack_file
from torchperfd_daemon.stacks import Thread, parse_py_spy, tidy
from torchperfd_daemon.text import one_line

_PROGRAM: Final = "py-spy"
_MAX_BYTES: Final = 4 << 20
_MAX_ERROR_CHARACTERS: Final = 120
# It reads memory that another user controls; a dump takes about 40 ms and 20 MB.
_LIMITS: Final = {
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_FSIZE: _MAX_BYTES,
    resource.RLIMIT_CPU: 10,
    resource.RLIMIT_CORE: 0,
}
_FORBIDDEN: Final = ("permission denied", "not permitted")


async def read_stacks(
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
    """Return py-spy's exit code, output and error output."""
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
    return os.pread(file.fileno(), _MAX_BYTES, 0)


def _explain(errors: bytes) -> str:
    text = errors.decode("utf-8", "replace")
    if any(words in text.lower() for words in _FORBIDDEN):
        return (
            "py-spy may not read it; run the daemon as root or with CAP_SYS_PTRACE,"
            " or as the rank's user with kernel.yama.ptrace_scope at 0"
        )
    first = text.strip().partition("\n")[0]
    return f"py-spy failed: {one_line(first, _MAX_ERROR_CHARACTERS) or 'no error output'}"
