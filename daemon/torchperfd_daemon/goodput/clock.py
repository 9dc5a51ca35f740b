"""The clock of goodput: it stays continuous when the wall clock is set or the daemon restarts."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of the node; nanoseconds since boot, Unix nanoseconds, monotonic seconds."""

    boottime_ns: Callable[[], int] = _boottime_ns
    unix_ns: Callable[[], int] = time.time_ns
    monotonic: Callable[[], float] = time.monotonic


class GoodputClock:
    """Time since boot plus an offset, so that it equals the wall clock at the first use on this boot.

    Args:
        offset_ns: Added to the time since boot.
    """

    def __init__(self, offset_ns: int, clocks: Clocks) -> None:
        self._offset_ns = offset_ns
        self._clocks = clocks

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return self._clocks.boottime_ns() + self._offset_ns

    def of_unix(self, unix_ns: int) -> int:
        """Convert a time of the wall clock, which may have been set since then."""
        return self.now() - (self._clocks.unix_ns() - unix_ns)

    def of_monotonic(self, seconds: float) -> int:
        """Convert a time of the monotonic clock."""
        return self.now() - int((self._clocks.monotonic() - seconds) * 1e9)

    def of_ticks(self, ticks: int) -> int:
        """Convert clock ticks since boot, the unit of a process's start time in procfs."""
        return self._offset_ns + ticks * 1_000_000_000 // _TICKS_PER_SECOND


def boot_id(proc: Path = Path("/proc")) -> str:
    """Return the kernel's id of this boot; empty if it is not readable."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
