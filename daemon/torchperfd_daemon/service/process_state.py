"""Checks whether a rank's process still runs, and reads the kernel's state of one that does not answer."""

from pathlib import Path

from torchperfd_daemon.collectors.procfs import parse_stat, parse_table, read
from torchperfd_daemon.collectors.ranks import RankProcess, own_namespace


class UnreachableError(Exception):
    """The rank's stacks cannot be read; ``str()`` is the reason."""


class GoneError(UnreachableError):
    """The process has ended."""


class StoppedError(UnreachableError):
    """The process is stopped, so that nothing in it runs."""


def check_running(process: RankProcess, proc: Path = Path("/proc")) -> None:
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
        if process.pid_namespace != own_namespace(proc):
            return ""
        state = parse_table(read(f"{proc}/{process.pid}/status")).get("State", "")
        channel = read(f"{proc}/{process.pid}/wchan")
    except OSError:
        return ""
    return f"its main thread is in state {state}" + (f" in {channel}" if channel not in ("", "0") else "")
