"""A rank's process: whether it runs, its state in the kernel, and the stack file of its client.

The first line of that file names the training thread, the client's code, and the signal that writes stacks
behind it. The file is trusted because it is among the process's own descriptors; a client's message is not.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from torchperfd.v1 import contract
from torchperfd_daemon.collectors.process import RankProcess, has_users, is_here, own_namespace
from torchperfd_daemon.collectors.procfs import open_memory_file, parse_stat, parse_table, read
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.store.store import Rank

LISTED: Final = "`torchperfd ps` lists those there are"
_MAX_NAMED_RANKS: Final = 20
T = TypeVar("T")


def chosen_ranks(run: str, there: Iterable[T], rank_of: Callable[[T], int], chosen: Iterable[int]) -> list[T]:
    """Return what is chosen of a run's ranks on this node, all of it when none is chosen.

    Raises:
        NoSuchTargetError: The run lacks one of the ranks.
    """
    numbered = [(rank_of(each), each) for each in there]
    wanted, known = set(chosen), {rank for rank, _ in numbered}
    if missing := sorted(wanted - known):
        raise NoSuchTargetError(
            f"run {run} has no rank {', '.join(map(str, missing[:_MAX_NAMED_RANKS]))} on this node",
            f"it has {', '.join(map(str, sorted(known)))}",
        )
    return [each for rank, each in numbered if rank in wanted or not wanted]


def no_run(are_others: bool, of_job: str = "") -> NoSuchTargetError:
    """Return the error about a caller without a run.

    Args:
        are_others: Whether other users have such runs.
        of_job: The job that was meant, for the message; empty for any.
    """
    if are_others:
        return NoSuchTargetError(
            f"this node has no run{of_job} of yours",
            "`torchperfd ps` lists those of other users, which root and the admin_group may command",
        )
    if of_job:
        return NoSuchTargetError(f"this node has no run{of_job}", LISTED)
    return NoSuchTargetError("this node has no run", "start one with `torchperfd run`")


def check_real(ranks: Iterable[Rank]) -> None:
    """Refuse to ask ranks that are simulated, if all are; there may be none at all.

    Raises:
        NoSuchTargetError: There is no process behind any of them.
    """
    asked = list(ranks)
    if asked and all(rank.identity.is_simulated for rank in asked):
        raise NoSuchTargetError(
            f"run {asked[0].identity.run} is simulated (`torchperfd serve --demo`): it has no processes",
            "start a real one with `torchperfd run train.py`",
        )


_START_OF_STACK: Final = 24
"""Its place among the fields of ``/proc/PID/stat`` behind the state."""


class UnreachableError(Exception):
    """The rank's stacks cannot be read; ``str()`` is the reason."""


class GoneError(UnreachableError):
    """The process has ended."""


class ChangedUsersError(GoneError):
    """The process has other users or groups than its session."""


class StoppedError(UnreachableError):
    """The process is stopped, so that nothing in it runs."""


def check_running(process: RankProcess, proc: Path = Path("/proc")) -> str:
    """Make sure that a rank's process is there, has the users of its session and is not stopped.

    A process of another pid namespace is taken to be there.

    Returns:
        Text that changes when the process begins another program; empty if the daemon may not see it.

    Raises:
        GoneError: It has ended, or another process has its id now.
        ChangedUsersError: It has changed users.
        StoppedError: It is stopped.
    """
    if process.pid_namespace != own_namespace(proc):
        return ""
    try:
        text = read(f"{proc}/{process.pid}/stat")
        start = parse_stat(text).start_ticks
        is_same_user = has_users(proc, process.pid, process.uid, process.gid)
    except (OSError, ValueError):
        raise GoneError("the process has ended") from None
    state, *fields = text.rpartition(")")[2].split()
    if start != process.start_ticks or state in "ZX":
        raise GoneError("the process has ended")
    if not is_same_user:
        raise ChangedUsersError("the process has changed users since it connected, and is not read any more")
    if state == "T":
        raise StoppedError(f"by a signal; let it go on with `kill -CONT {process.pid}`")
    if state == "t":
        tracer = parse_table(read(f"{proc}/{process.pid}/status")).get("TracerPid", "?")
        raise StoppedError(f"by a debugger, process {tracer}")
    # Where its stack begins, which is at random for each program.
    return fields[_START_OF_STACK] if len(fields) > _START_OF_STACK else ""


def check_namespace(process: RankProcess, proc: Path = Path("/proc")) -> None:
    """Make sure that a rank's process id means the same process here.

    Raises:
        UnreachableError: It is of another pid namespace.
    """
    if process.pid_namespace != own_namespace(proc):
        raise UnreachableError("it runs in a pid namespace of its own, where the daemon cannot reach it")


def describe_wait(process: RankProcess, proc: Path = Path("/proc")) -> str:
    """Return the kernel's state of a process that does not answer; empty when it is not known."""
    try:
        if process.pid_namespace != own_namespace(proc) or not is_here(proc, process):
            return ""
        state = parse_table(read(f"{proc}/{process.pid}/status")).get("State", "")
        channel = read(f"{proc}/{process.pid}/wchan")
    except OSError:
        return ""
    if not is_here(proc, process):
        return ""
    return f"its main thread is in state {state}" + (f" in {channel}" if channel not in ("", "0") else "")


_MAX_HEADER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class StackFile:
    """An open stack file.

    Attributes:
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
        yield _parse_header(descriptor, line if end else b"")
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


def _parse_header(descriptor: int, line: bytes) -> StackFile:
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
