"""How hard a node's CPUs are pressed right now, and by which processes."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd.model import own_commands
from torchperfd_daemon.collectors.procfs import parse_stat, parse_table, read
from torchperfd_daemon.text import one_line

INTERVAL_S: Final = 0.5
_MAX_CONSUMERS: Final = 5
_MIN_CORES: Final = 0.1
_COUNTED: Final = 8
"""Columns of ``/proc/stat``'s CPU line that are no part of another: user to steal."""
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_MAX_NAME: Final = 40
_BEGINNING: Final = Path(own_commands.__file__).name


@dataclass(frozen=True, slots=True)
class Consumer:
    """A process that uses CPU time.

    Attributes:
        name: What it runs, for people: its program, and its script where that is an interpreter.
        cores: CPU seconds per second.
        parent: Number of its parent process.
    """

    pid: int
    name: str
    cores: float
    parent: int = 0


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPUs of a node over a moment.

    Attributes:
        busy: Share of their time in use, 0 to 1, steal included.
        stolen: Share of their time that the hypervisor gave to others, 0 to 1.
        runnable: Threads that run or want to.
        pressure: Share of the last ten seconds, 0 to 1, in which some task waited for a CPU; None where the
            kernel does not report it.
        consumers: The processes that use most, the greatest first.
    """

    cpus: int
    busy: float
    stolen: float
    runnable: int
    pressure: float | None
    consumers: tuple[Consumer, ...]


def read_cpu(
    proc: Path = Path("/proc"), sleep: Callable[[float], None] = time.sleep, interval: float = INTERVAL_S
) -> CpuFacts | None:
    """Return how busy the CPUs are over an interval of seconds; None where the kernel does not report it.

    Args:
        interval: Seconds.
    """
    try:
        before, cpus, runnable = _read_stat(proc)
        used = _used(proc)
        sleep(interval)
        after, _, later = _read_stat(proc)
    except (OSError, ValueError):
        return None
    spent = [max(0, now - then) for now, then in zip(after, before, strict=True)]
    total = sum(spent)
    if not total:
        return None
    consumers = [
        Consumer(pid, _name(proc, pid), (seconds - used[pid][0]) / interval, parent)
        for pid, (seconds, parent) in _used(proc).items()
        if pid in used and seconds - used[pid][0] >= _MIN_CORES * interval
    ]
    consumers.sort(key=lambda each: -each.cores)
    return CpuFacts(
        cpus=cpus,
        busy=1 - (spent[_IDLE] + spent[_IOWAIT]) / total,
        stolen=spent[_STEAL] / total,
        runnable=max(runnable, later),
        pressure=_pressure(proc),
        consumers=tuple(consumers[:_MAX_CONSUMERS]),
    )


def _read_stat(proc: Path) -> tuple[list[int], int, int]:
    """Return the CPUs' ticks by kind, how many CPUs there are, and how many threads want to run."""
    text = read(proc / "stat")
    lines = text.splitlines()
    columns = lines[0].split() if lines else []
    if columns[:1] != ["cpu"] or len(columns) <= _COUNTED:
        raise ValueError("/proc/stat has no line of all CPUs")
    cpus = sum(line.startswith("cpu") for line in lines[1:])
    runnable = parse_table(text, " ").get("procs_running", "0")
    # One of them is this command.
    return [int(ticks) for ticks in columns[1 : _COUNTED + 1]], max(1, cpus), max(0, int(runnable) - 1)


def _used(proc: Path) -> dict[int, tuple[float, int]]:
    """Return the CPU seconds that each process has used itself, and its parent."""
    used = {}
    own = os.getpid()
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            text = read(entry / "stat")
            parent = parse_stat(text).parent
            user, system = text.rpartition(")")[2].split()[11:13]
            if int(entry.name) != own:
                used[int(entry.name)] = ((int(user) + int(system)) / _TICKS_PER_SECOND, parent)
    return used


def _name(proc: Path, pid: int) -> str:
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = [word for word in read(proc / str(pid) / "cmdline").split("\0") if word]
    if not words:
        with contextlib.suppress(OSError, ValueError):
            text = read(proc / str(pid) / "stat")
            words = [text[text.index("(") + 1 : text.rindex(")")]]
    names = [Path(word).name for word in words[1:] if not word.startswith("-")]
    # `torchperfd run` and the processes of `tune` and `bench` begin in this file.
    script = next((name for name in names if name != _BEGINNING), "")
    name = " ".join(filter(None, (Path(words[0]).name if words else "?", script)))
    return one_line(name, _MAX_NAME)


def _pressure(proc: Path) -> float | None:
    """Return the share of the last ten seconds in which some task waited for a CPU."""
    try:
        fields = read(proc / "pressure" / "cpu").splitlines()[0].split()
        return float(dict(field.split("=") for field in fields[1:])["avg10"]) / 100
    except (OSError, ValueError, LookupError):
        return None
