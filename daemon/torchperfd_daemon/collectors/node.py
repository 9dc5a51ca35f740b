"""Collectors of the node's hardware: CPUs, memory, disks, network interfaces and pressure stalls."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import Family, NothingToCollectError
from torchperfd_daemon.collectors.procfs import parse_table, read

_IDLE_COLUMNS: Final = slice(3, 5)
"""Idle columns of the CPU line: idle, and idle while waiting for a disk."""

_COUNTED_COLUMNS: Final = 8
"""The columns after these, guest time, are part of user time already."""


class CpuCollector:
    """Samples the CPUs' use since the sample before; the first sample has none to show."""

    name = "cpu"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._stat = proc / "stat"
        self._before: tuple[int, int] | None = None

    def sample(self) -> Sequence[Family]:
        """Return the utilisation.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        family = Family(
            "node_cpu_utilization_ratio", "Share of all CPUs in use since the last sample.", "gauge"
        )
        now = parse_cpu_ticks(read(self._stat))
        if self._before is not None:
            busy, total = now[0] - self._before[0], now[1] - self._before[1]
            if total > 0:
                # The kernel's idle columns may run backwards a little.
                family.add(min(1.0, max(0.0, busy / total)))
        self._before = now
        return [family]


def parse_cpu_ticks(text: str) -> tuple[int, int]:
    """Return (busy, total) clock ticks of all CPUs since boot, from ``/proc/stat``.

    Raises:
        ValueError: It is damaged.
    """
    name, *columns = text.partition("\n")[0].split()[: _COUNTED_COLUMNS + 1] or [""]
    if name != "cpu" or len(columns) < 5:
        raise ValueError(f"{text[:80]!r} is no CPU line")
    ticks = list(map(int, columns))
    total = sum(ticks)
    return total - sum(ticks[_IDLE_COLUMNS]), total


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


class _WithDevice:
    """Finds the names that stand on a device of their own, and asks again when the names have changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: list[str] = []
        self._found: list[str] = []

    def of(self, names: Iterable[str]) -> list[str]:
        if self._names != [*names]:
            self._names = [*names]
            self._found = [name for name in self._names if (self._directory / name / "device").exists()]
        return self._found


class DiskCollector:
    """Samples bytes read from and written to disks, each byte once, and the time that took.

    A byte for a partition is one for its disk, and one for a mapped or a RAID volume is one for
    the disks below: only disks that stand on a device of their own count.
    """

    name = "disk"

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._diskstats = proc / "diskstats"
        self._with_device = _WithDevice(sys / "block")

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
        traffic = parse_diskstats(read(self._diskstats))
        disks = [traffic[name] for name in self._with_device.of(traffic)]
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


class NetworkCollector:
    """Samples bytes received and transmitted, each byte once.

    Bridges, tunnels and bonds pass on what a real interface has counted, so only interfaces with
    a device count. Where there is none, as in a container, all but the loopback do.
    """

    name = "network"

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._dev = proc / "net" / "dev"
        self._with_device = _WithDevice(sys / "class" / "net")

    def sample(self) -> Sequence[Family]:
        """Return bytes by direction; none on a node without interfaces.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        family = Family("node_network_bytes", "Bytes over the network interfaces.", "counter", ("direction",))
        interfaces = parse_interfaces(read(self._dev))
        interfaces.pop("lo", None)
        real = self._with_device.of(interfaces)
        counted = [traffic for name, traffic in interfaces.items() if name in real or not real]
        if counted:
            family.add(sum(received for received, _ in counted), "receive")
            family.add(sum(transmitted for _, transmitted in counted), "transmit")
        return [family]


def parse_interfaces(text: str) -> dict[str, tuple[int, int]]:
    """Return (bytes received, bytes transmitted) by interface, from ``/proc/net/dev``.

    Raises:
        ValueError: It is damaged.
    """
    interfaces = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.rpartition(":")
        fields = rest.split()
        if not name or len(fields) < 9:
            raise ValueError(f"{line!r} is no line of an interface")
        interfaces[name.strip()] = (int(fields[0]), int(fields[8]))
    return interfaces


_PRESSURE_RESOURCES: Final = ("cpu", "io", "memory")


class PressureCollector:
    """Samples the node's stall times."""

    name = "pressure"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._pressure = proc / "pressure"

    def sample(self) -> Sequence[Family]:
        """Return stall times by resource and kind.

        Raises:
            NothingToCollectError: The kernel keeps none, or a container hides them.
            ValueError: A file is damaged.
        """
        family = Family(
            "node_pressure_seconds",
            "Time in which some or all tasks waited for a resource (PSI).",
            "counter",
            ("resource", "kind"),
        )
        for resource in _PRESSURE_RESOURCES:
            try:
                text = read(self._pressure / resource)
            except OSError:
                continue
            for kind, seconds in parse_pressure(text):
                # A node whose CPUs all wait for a CPU cannot be: the kernel writes a zero there.
                if (resource, kind) != ("cpu", "full"):
                    family.add(seconds, resource, kind)
        if not family.samples:
            raise NothingToCollectError(
                f"nothing readable in {self._pressure}; boot the kernel with psi=1 to have pressure metrics"
            )
        return [family]


def parse_pressure(text: str) -> Iterator[tuple[str, float]]:
    """Yield (``some`` or ``full``, seconds stalled since boot) from a file of ``/proc/pressure``.

    Raises:
        ValueError: It is damaged.
    """
    for line in text.splitlines():
        kind, _, fields = line.partition(" ")
        _, found, total = fields.rpartition("total=")
        if not found:
            raise ValueError(f"{line!r} is no line of pressure")
        yield kind, int(total) / 1e6
