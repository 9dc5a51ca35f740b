"""A process's CPU time and memory, from the kernel."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_TO_THE_NANOSECOND: Final = Path("/proc/self/schedstat").exists()
MIB: Final = 1024 * 1024


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's threads, to the nanosecond where the kernel keeps it."""
    if not _TO_THE_NANOSECOND:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += thread_cpu_seconds(pid, int(task.name))
    return total


def thread_cpu_seconds(pid: int, thread: int) -> float:
    """Return the CPU time of one thread, by the kernel's id of it.

    Raises:
        OSError: It has ended, or the kernel keeps no such record.
    """
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process cost over a while.

    Attributes:
        seconds: How long the while was.
        cpu_seconds: CPU time in it.
        peak_bytes: Most memory, looked at once a second.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int

    @property
    def cores(self) -> float:
        return self.cpu_seconds / self.seconds


def watch(pid: int, seconds: float) -> Cost:
    began, cpu = time.monotonic(), cpu_seconds(pid)
    peak = 0
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        peak = max(peak, resident_bytes(pid))
    return Cost(time.monotonic() - began, cpu_seconds(pid) - cpu, peak)
