"""Traffic of the node's disks, and how long they were busy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.procfs import read

_SECTOR_BYTES: Final = 512
"""The unit of diskstats, whatever the disk's own sectors are."""


@dataclass(frozen=True, slots=True)
class DiskTraffic:
    """What one device did since boot.

    Attributes:
        busy_seconds: For how long it had something to do, however much at a time.
    """

    read_bytes: int
    written_bytes: int
    busy_seconds: float


class DiskCollector:
    """Samples bytes read from and written to disks, each byte once, and the time that took.

    A byte for a partition is one for its disk, and one for a mapped or a RAID volume is one for
    the disks below: only disks that stand on a device of their own count.
    """

    name = "disk"

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._diskstats = proc / "diskstats"
        self._block = sys / "block"

    def sample(self) -> Sequence[Family]:
        """Return bytes by direction, and busy time; nothing on a node without disks.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        family = Family("node_disk_bytes", "Bytes read from and written to disks.", "counter", ("direction",))
        busy = Family(
            "node_disk_busy_seconds",
            "Time in which a disk had requests to serve, summed over disks.",
            "counter",
        )
        disks = [
            traffic
            for name, traffic in parse_diskstats(read(self._diskstats)).items()
            if (self._block / name / "device").exists()
        ]
        if disks:
            family.add(sum(disk.read_bytes for disk in disks), "read")
            family.add(sum(disk.written_bytes for disk in disks), "write")
            busy.add(sum(disk.busy_seconds for disk in disks))
        return [family, busy]


def parse_diskstats(text: str) -> dict[str, DiskTraffic]:
    """Return each device's traffic since boot, from ``/proc/diskstats``.

    Raises:
        ValueError: It is damaged.
    """
    devices = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 13:
            raise ValueError(f"{line!r} is no line of diskstats")
        # sysfs has another letter for the slash in names like cciss/c0d0.
        name = fields[2].replace("/", "!")
        devices[name] = DiskTraffic(
            int(fields[5]) * _SECTOR_BYTES, int(fields[9]) * _SECTOR_BYTES, int(fields[12]) / 1e3
        )
    return devices
