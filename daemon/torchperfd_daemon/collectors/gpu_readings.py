"""Readings of GPUs: the base of all their sources, the families made of them, and the newest ones."""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import HANGS_AFTER_S, Family, Kind
from torchperfd_daemon.collectors.process import Ranks
from torchperfd_daemon.collectors.procfs import parse_stat, parse_table, read

_LABELS: Final = ("gpu", "gpu_uuid")
FAMILIES: Final[dict[str, tuple[str, Kind, tuple[str, ...]]]] = {
    "gpu_up": ("Whether the GPU answers: 0 once it has fallen off the bus.", "gauge", ()),
    "gpu_info": ("A GPU, or an instance of one.", "gauge", ("model", "driver_version", "pci_bus_id")),
    "gpu_mig_info": (
        "An instance of a GPU, and the GPU that it is part of.",
        "gauge",
        ("parent_gpu", "parent_gpu_uuid"),
    ),
    "gpu_utilization_ratio": ("Share of time with a kernel running.", "gauge", ()),
    "gpu_sm_active_ratio": ("Share of the multiprocessors that were busy.", "gauge", ()),
    "gpu_sm_occupancy_ratio": ("Warps in flight, of those that fit.", "gauge", ()),
    "gpu_tensor_active_ratio": ("Share of time in which tensor cores worked.", "gauge", ()),
    "gpu_dram_active_ratio": ("Memory bandwidth in use, of what there is.", "gauge", ()),
    "gpu_memory_used_bytes": ("GPU memory in use, without what the driver keeps.", "gauge", ()),
    "gpu_memory_total_bytes": ("GPU memory there is.", "gauge", ()),
    "gpu_power_watts": ("Power drawn.", "gauge", ()),
    "gpu_energy_joules": ("Energy used since the driver was loaded.", "counter", ()),
    "gpu_temperature_celsius": ("Temperature.", "gauge", ("sensor",)),
    "gpu_clock_hertz": ("Clock frequency.", "gauge", ("domain",)),
    "gpu_throttle_seconds": ("Time in which clocks were held down, by reason.", "counter", ("reason",)),
    "gpu_pcie_bytes": ("Bytes over PCIe, seen from the GPU.", "counter", ("direction",)),
    "gpu_nvlink_bytes": ("Payload bytes over all NVLinks, seen from the GPU.", "counter", ("direction",)),
    "gpu_ecc_errors": ("Memory errors, since the driver was loaded or ever.", "counter", ("type", "scope")),
    "gpu_row_remap_pending": ("Whether a row waits for a reset of the GPU to be remapped.", "gauge", ()),
    "gpu_row_remap_failure": ("Whether a row could not be remapped.", "gauge", ()),
    "gpu_xid_errors": ("Errors that the driver reported since the daemon started.", "counter", ("xid",)),
    "gpu_xid_last_timestamp_seconds": ("When the driver last reported the error.", "gauge", ("xid",)),
}
"""Families of GPUs, in the page's order. By name: help, kind, and labels beyond those of the GPU."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of a GPU or MIG instance. Values that it does not provide are absent.

    Attributes:
        gpu: Index on the node; ``0:2`` for instance 2 of GPU 0.
        uuid: As the driver knows it; empty when it was lost before it could be asked.
        values: By family and its labels beyond the GPU's, in base units.
        process_bytes: Memory held by each process, by the pid that the driver sees.
    """

    gpu: str
    uuid: str
    values: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    process_bytes: dict[int, int] = field(default_factory=dict)

    def put(self, family: str, value: float | None, *labels: str) -> None:
        """Add a value in base units; one that is unknown, or no number, stays absent."""
        if value is not None and math.isfinite(value):
            self.values[family, labels] = value


def gpu_model(readings: Iterable[GpuReading], uuid: str) -> str:
    """Return the model of the GPU or MIG instance with a UUID; empty if it is not known.

    Args:
        uuid: Without ``GPU-`` or ``MIG-``.
    """
    whole = {f"{kind}-{uuid}" for kind in ("GPU", "MIG")}
    found = (
        labels[0]
        for each in readings
        if each.uuid in whole
        for name, labels in each.values
        if name == "gpu_info"
    )
    return next(found, "")


class GpuCollector(ABC):
    """A collector whose families come from readings.

    Args:
        ranks: Returns the ranks whose memory on GPUs is reported.
        proc: Root of procfs, where the processes on the GPUs are looked up.
    """

    name: str

    def __init__(self, ranks: Ranks = tuple, proc: Path = Path("/proc")) -> None:
        self._ranks = ranks
        self._proc = proc

    @abstractmethod
    def read(self) -> list[GpuReading]:
        """Return one reading per GPU and instance.

        Raises:
            CollectorUnavailableError: There is no GPU to be read.
        """

    def sample(self) -> Sequence[Family]:
        """Return the families of GPUs, and the memory that ranks hold on them.

        Raises:
            CollectorUnavailableError: There is no GPU to be read.
        """
        readings = self.read()
        memory = self._memory_of_ranks(readings)
        return [*to_families(readings), *([memory] if memory.samples else [])]

    def _memory_of_ranks(self, readings: Iterable[GpuReading]) -> Family:
        family = Family(
            "process_gpu_memory_bytes",
            "Memory that the rank's process holds on GPUs.",
            "gauge",
            ("run", "rank"),
        )
        held: dict[int, int] = {}
        for reading in readings:
            for pid, size in reading.process_bytes.items():
                held[pid] = held.get(pid, 0) + size
        found: dict[tuple[int, int], int] = {}
        for pid, size in held.items():
            with contextlib.suppress(OSError):  # it has just ended, or may not be read
                found[_own_identity(self._proc, pid)] = size
        for rank in self._ranks():
            if (rank.pid, rank.start_ticks) in found:
                family.add(found[rank.pid, rank.start_ticks], *rank.labels)
        return family


def to_families(readings: Iterable[GpuReading]) -> list[Family]:
    """Return the families that have at least one series, in the page's order."""
    made = {
        name: Family(name, text, kind, (*_LABELS, *labels)) for name, (text, kind, labels) in FAMILIES.items()
    }
    for reading in readings:
        own = (reading.gpu, reading.uuid)
        for (name, labels), value in reading.values.items():
            made[name].samples.append(((*own, *labels), value))
    return [family for family in made.values() if family.samples]


def _own_identity(proc: Path, pid: int) -> tuple[int, int]:
    """Return a process's id as it sees itself, and its start in clock ticks since boot.

    The driver reports ids in the daemon's namespace; a rank in a container reports its own, and those repeat
    across containers, but the time of the start does not.
    """
    status = parse_table(read(proc / str(pid) / "status"))
    # Kernels without pid namespaces have no such line: then there is only one id.
    own = status.get("NSpid", str(pid)).split()[-1]
    return int(own), parse_stat(read(proc / str(pid) / "stat")).start_ticks


class NewestGpuReadings(GpuCollector):
    """Samples GPUs through another collector, and keeps the newest readings for other parts.

    Args:
        ranks: Returns the ranks whose memory on GPUs is reported.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        gpus: GpuCollector,
        ranks: Ranks = tuple,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ranks, proc)
        self._gpus = gpus
        self.name = gpus.name
        self._clock = clock
        self._newest: Sequence[GpuReading] = ()
        self._began: float | None = None

    def newest(self) -> Sequence[GpuReading]:
        """Return the newest readings; empty if the last read failed, and while the driver hangs.

        A read takes a good part of a second on some drivers. Meanwhile the readings before it are the newest.
        """
        began = self._began
        return () if began is not None and self._clock() - began > HANGS_AFTER_S else self._newest

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU and instance.

        Raises:
            CollectorUnavailableError: There is no GPU to be read.
        """
        self._began = self._clock()
        try:
            readings = self._gpus.read()
        except Exception:
            self._newest = ()
            raise
        finally:
            self._began = None
        self._newest = readings
        return readings
