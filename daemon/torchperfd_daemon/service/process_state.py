"""Checks whether a rank's process still runs, and reads the kernel's state of one that does not answer."""

from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.procfs import parse_stat, parse_table, read
from torchperfd_daemon.collectors.ranks import RankProcess, has_users, is_here, own_namespace

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
