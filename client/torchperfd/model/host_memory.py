"""Memory of a training process on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torchperfd.model.formatting import size
from torchperfd.model.messages import Count

_STATUS: Final = "/proc/self/status"
_MAX_BYTES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Resident memory of one process, without its workers, in bytes.

    Attributes:
        resident_bytes: Now.
        peak_bytes: The most there ever was.
    """

    resident_bytes: Count
    peak_bytes: Count

    @property
    def words(self) -> str:
        """Both in one line."""
        return f"{size(self.resident_bytes)} resident · {size(self.peak_bytes)} at the peak"

    @property
    def cell(self) -> str:
        """Both for a table: ``441 MiB / 1.37 GiB``."""
        return f"{size(self.resident_bytes)} / {size(self.peak_bytes)}"


def read_host_memory(path: str = _STATUS) -> HostMemory | None:
    """Return the memory of this process; None if the kernel does not show it.

    Args:
        path: Of the process's status in procfs.
    """
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
    """Reads the memory of this process.

    Args:
        read: Returns the memory now; None if unknown.
    """

    def __init__(self, read: Callable[[], HostMemory | None] = read_host_memory) -> None:
        self._read = read
        self._newest: HostMemory | None = None

    def read(self) -> HostMemory | None:
        """Return the memory; the newest known if it cannot be read, None without any."""
        self._newest = self._read() or self._newest
        return self._newest
