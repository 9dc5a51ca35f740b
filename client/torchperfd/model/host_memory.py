"""Memory of a training process on the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final

from torchperfd.model.formatting import size
from torchperfd.model.messages import AtMost, Count, Quantity, Seconds

_STATUS: Final = "/proc/self/status"
MAX_COURSE: Final = 60
"""Values in a course of memory."""
_FIRST_INTERVAL_S: Final = 1.0
_MIN_TREND: Final = 8
_MIN_GROWTH: Final = 1 << 20
_MAX_BYTES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Resident memory of one process, without its workers, in bytes.

    Attributes:
        resident_bytes: Now.
        first_bytes: At the first reading; 0 from an older client, like all that follows.
        growth_bytes_per_second: Over the newer half of the course; 0 if it does not grow, or is short.
        course_seconds: From the first value of the course to the last one.
        course_bytes: The resident bytes at about equal distances, the oldest first.
    """

    resident_bytes: Count
    peak_bytes: Count
    first_bytes: Count = 0
    growth_bytes_per_second: Quantity = 0.0
    course_seconds: Seconds = 0.0
    course_bytes: Annotated[tuple[Count, ...], AtMost(MAX_COURSE)] = ()

    @property
    def words(self) -> str:
        """It in one line, such as ``441 MiB resident · 1.4 GiB at the peak · 300 MiB at first``."""
        words = f"{size(self.resident_bytes)} resident · {size(self.peak_bytes)} at the peak"
        if self.first_bytes:
            words += f" · {size(self.first_bytes)} at first"
        return words + (f", growing by {self.growth}" if self.growth else "")

    @property
    def growth(self) -> str:
        """By how much it grows, such as ``2.1 MiB a minute``; empty below 1 MiB."""
        grown = int(60 * self.growth_bytes_per_second)
        return f"{size(grown)} a minute" if grown >= _MIN_GROWTH else ""

    @property
    def cell(self) -> str:
        """Both for a table: ``441 MiB / 1.37 GiB``."""
        return f"{size(self.resident_bytes)} / {size(self.peak_bytes)}"


def read_host_memory(path: str = _STATUS) -> HostMemory | None:
    """Return the memory of this process; None if the kernel does not show it."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - no pathlib on the flusher's thread
            lines = file.read(_MAX_BYTES).splitlines()
        found = {
            name: int(value.split()[0]) << 10
            for name, _, value in (each.partition(b":") for each in lines)
            if name in (b"VmRSS", b"VmHWM")
        }
        return HostMemory(found[b"VmRSS"], max(found[b"VmHWM"], found[b"VmRSS"]))
    except (OSError, ValueError, LookupError):
        return None


class MemoryReader:
    """Reads the memory of this process over time, and keeps few values: every second one of a long course.

    Args:
        read: Returns the memory now; None if unknown.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[], HostMemory | None] = read_host_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._interval = _FIRST_INTERVAL_S
        self._first = 0
        self._at: list[float] = []
        self._bytes: list[int] = []
        self._newest: HostMemory | None = None

    def read(self) -> HostMemory | None:
        """Return the memory with its course; the newest known if it cannot be read, None without any."""
        found, now = self._read(), self._clock()
        if found is None:
            return self._newest
        self._first = self._first or found.resident_bytes
        # Readings come about as often as this at the shortest, a little earlier or later.
        if not self._at or now - self._at[-1] >= 0.9 * self._interval:
            if len(self._at) == MAX_COURSE:
                del self._at[1::2], self._bytes[1::2]
                self._interval *= 2
            self._at.append(now)
            self._bytes.append(found.resident_bytes)
        self._newest = replace(
            found,
            first_bytes=self._first,
            growth_bytes_per_second=self._growth(),
            course_seconds=self._at[-1] - self._at[0],
            course_bytes=tuple(self._bytes),
        )
        return self._newest

    def _growth(self) -> float:
        """Return the slope of the newer half, by least squares; start-up allocates in the older one."""
        at, held = self._at[len(self._at) // 2 :], self._bytes[len(self._at) // 2 :]
        if len(at) < _MIN_TREND:
            return 0.0
        middle, mean = sum(at) / len(at), sum(held) / len(held)
        moved = sum((when - middle) * (each - mean) for when, each in zip(at, held, strict=True))
        return max(0.0, moved / sum((when - middle) ** 2 for when in at))
