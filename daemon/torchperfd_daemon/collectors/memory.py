"""Memory of the node."""

from collections.abc import Sequence
from pathlib import Path

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.procfs import parse_table, read


class MemoryCollector:
    """Samples total and available memory."""

    name = "memory"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._meminfo = proc / "meminfo"

    def sample(self) -> Sequence[Family]:
        """Return available and total memory; a value that the kernel does not provide is absent.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        available = Family("node_memory_available_bytes", "Memory that can be had without swapping.", "gauge")
        total = Family("node_memory_total_bytes", "Memory of the node.", "gauge")
        table = parse_table(read(self._meminfo))
        for family, name in ((available, "MemAvailable"), (total, "MemTotal")):
            if name in table:
                family.add(int(table[name].removesuffix("kB")) * 1024)
        return [available, total]
