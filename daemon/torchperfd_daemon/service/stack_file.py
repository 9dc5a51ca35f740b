"""Reads the in-memory file that a rank's client keeps open for its stacks.

The first line names the training thread, the client's code, and the signal that writes stacks behind it.
The file is trusted because it is among the process's own descriptors; a client's message is not.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd.v1 import contract
from torchperfd_daemon.collectors.procfs import open_memory_file
from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.service.process_state import UnreachableError, check_running

_MAX_HEADER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class StackFile:
    """An open stack file.

    Attributes:
        descriptor: The daemon's descriptor of the file.
        signal: The real-time signal whose handler writes the stacks.
        thread: The kernel's id of the client's thread that takes it.
        training: ``threading.get_ident()`` of the training thread.
        package: Directory of the client's code, with a slash at its end.
        header_bytes: Length of the first line; stacks come behind it.
    """

    descriptor: int
    signal: int
    thread: int
    training: int
    package: str
    header_bytes: int


@contextlib.contextmanager
def open_stack_file(process: RankProcess, flags: int, proc: Path = Path("/proc")) -> Iterator[StackFile]:
    """Open a rank's stack file.

    Args:
        flags: As :func:`os.open` takes them.

    Raises:
        UnreachableError: It has none, it is damaged, or the daemon may not read it.
    """
    with errors_translated(process, proc):
        descriptor = open_memory_file(proc / str(process.pid), contract.STACKS_FILE, flags)
    if descriptor is None:
        raise UnreachableError("its client has prepared no signal")
    try:
        with errors_translated(process, proc):
            line, end, _ = os.pread(descriptor, _MAX_HEADER_BYTES, 0).partition(b"\n")
        yield _parse(descriptor, line if end else b"")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def errors_translated(process: RankProcess, proc: Path = Path("/proc")) -> Iterator[None]:
    """Turn the system's errors about a process into UnreachableError."""
    try:
        yield
    except PermissionError:
        raise UnreachableError("it belongs to another user; run the daemon as that user or as root") from None
    except (FileNotFoundError, ProcessLookupError):
        check_running(process, proc)
        raise UnreachableError("its thread that takes the signal has ended") from None
    except OSError as error:
        raise UnreachableError(f"reading its stack file failed: {error.strerror}") from None


def _parse(descriptor: int, line: bytes) -> StackFile:
    try:
        header: dict[str, Any] = json.loads(line)
        file = StackFile(
            descriptor,
            int(header["signal"]),
            int(header["thread"]),
            int(header["training"]),
            str(header["package"]),
            len(line) + 1,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise UnreachableError("its stack file is damaged") from None
    # Ordinary signals have a meaning, and end a process that has no handler.
    if not signal.SIGRTMIN <= file.signal <= signal.SIGRTMAX:
        raise UnreachableError(f"it names signal {file.signal}, which the daemon does not send")
    return file
