"""CPU, memory, network, disk and pressure of the node."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from torchperfd_daemon.collectors.base import Family

_RESOURCES: Final = ("cpu", "io", "memory")


class HostCollector:
    """Samples the node through psutil, and pressure stall information from procfs.

    Args:
        proc: Root of procfs, for the pressure files.
    """

    name = "host"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._pressure = proc / "pressure"
        psutil.cpu_percent()  # the first call only sets the mark that the next one measures from

    def sample(self) -> Sequence[Family]:
        """Return all families of the node."""
        cpu = Family("node_cpu_utilization_ratio", "Share of all CPUs in use since the last sample.", "gauge")
        cpu.add(psutil.cpu_percent() / 100)
        memory = psutil.virtual_memory()
        available = Family("node_memory_available_bytes", "Memory that can be had without swapping.", "gauge")
        available.add(memory.available)
        total = Family("node_memory_total_bytes", "Memory of the node.", "gauge")
        total.add(memory.total)
        return [cpu, available, total, *self._traffic(), *self._stalls()]

    def _traffic(self) -> list[Family]:
        families = []
        network = psutil.net_io_counters()
        if network is not None:
            family = Family(
                "node_network_bytes", "Bytes over all network interfaces.", "counter", ("direction",)
            )
            family.add(network.bytes_recv, "receive")
            family.add(network.bytes_sent, "transmit")
            families.append(family)
        disk = psutil.disk_io_counters()
        if disk is not None:
            family = Family(
                "node_disk_bytes", "Bytes read from and written to disks.", "counter", ("direction",)
            )
            family.add(disk.read_bytes, "read")
            family.add(disk.write_bytes, "write")
            families.append(family)
        return families

    def _stalls(self) -> list[Family]:
        family = Family(
            "node_pressure_seconds",
            "Time in which some or all tasks waited for a resource (PSI).",
            "counter",
            ("resource", "kind"),
        )
        for resource in _RESOURCES:
            try:
                text = (self._pressure / resource).read_text()
            except OSError:
                # Kernels without PSI, and containers that hide it: absent, not zero.
                continue
            for line in text.splitlines():
                kind, *fields = line.split()
                values = dict(part.split("=", 1) for part in fields)
                family.add(int(values["total"]) / 1e6, resource, kind)
        return [family] if family.samples else []
