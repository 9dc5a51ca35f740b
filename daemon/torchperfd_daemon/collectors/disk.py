"""Traffic of the node's disks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.procfs import read

_SECTOR_BYTES: Final = 512
"""The unit of diskstats, whatever the disk's own sectors are."""


class DiskCollector:
    """Samples bytes read from and written to disks, each byte once.

    A byte for a partition is one for its disk, and one for a mapped or a RAID volume is one for
    the disks below: only disks that stand on a device of their own count.

    Args:
        proc: Root of procfs.
        sys: Root of sysfs.
    """

    name = "disk"

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._diskstats = proc / "diskstats"
        self._block = sys / "block"

    def sample(self) -> Sequence[Family]:
        """Return bytes by direction; none on a node without disks.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        family = Family("node_disk_bytes", "Bytes read from and written to disks.", "counter", ("direction",))
        disks = [
            traffic
            for name, traffic in parse_diskstats(read(self._diskstats)).items()
            if (self._block / name / "device").exists()
        ]
        if disks:
            family.add(sum(read_bytes for read_bytes, _ in disks), "read")
            family.add(sum(written_bytes for _, written_bytes in disks), "write")
        return [family]


def parse_diskstats(text: str) -> dict[str, tuple[int, int]]:
    """Return (bytes read, bytes written) since boot by device, from ``/proc/diskstats``.

    Raises:
        ValueError: It is damaged.
    """
    devices = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10:
            raise ValueError(f"{line!r} is no line of diskstats")
        # sysfs has another letter for the slash in names like cciss/c0d0.
        name = fields[2].replace("/", "!")
        devices[name] = (int(fields[5]) * _SECTOR_BYTES, int(fields[9]) * _SECTOR_BYTES)
    return devices
