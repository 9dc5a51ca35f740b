"""What the node's collectors say of the ranks' surroundings at one moment."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_base import GpuReading

# The driver keeps to a power cap all the time; only what protects the hardware is out of the ordinary.
_HELD_DOWN: Final = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
_OF_RANKS: Final = {
    "process_run_delay_seconds": "queued",
    "process_throttled_seconds": "throttled",
    "process_resident_memory_bytes": "resident",
    "process_memory_limit_bytes": "limit",
}
_AVAILABLE: Final = "node_memory_available_bytes"
_PRESSURE: Final = "node_pressure_seconds"

RankKey = tuple[str, int]
"""Run and rank."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU.

    Attributes:
        throttled_seconds: For how long heat or power have held its clock down so far.
        clock_hertz: Its present clock; 0 when unknown.
        utilization: The share of time with a kernel running; None when unknown.
        processes: Those that hold memory on it, by the ids that the driver sees.
    """

    throttled_seconds: float = 0.0
    clock_hertz: float = 0.0
    utilization: float | None = None
    processes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Counters in seconds since any time, and bytes; a rank that nothing is known of is absent.

    Attributes:
        queued: For how long each rank's main thread was ready and had no processor.
        throttled: For how long the quota of each rank's control group held it back.
        disk_seconds: For how long some task of the node waited for a disk (PSI).
        memory_seconds: For how long some task of the node waited for memory (PSI).
        gpus: By UUID.
        resident: Bytes that each rank and its workers hold.
        limit: Bytes that each rank may hold; absent without a limit.
        available_bytes: What the node has left; None when unknown.
    """

    queued: dict[RankKey, float] = field(default_factory=dict)
    throttled: dict[RankKey, float] = field(default_factory=dict)
    disk_seconds: float = 0.0
    memory_seconds: float = 0.0
    gpus: dict[str, GpuState] = field(default_factory=dict)
    resident: dict[RankKey, float] = field(default_factory=dict)
    limit: dict[RankKey, float] = field(default_factory=dict)
    available_bytes: float | None = None

    def room(self, rank: RankKey) -> float | None:
        """Return by how many bytes a rank can grow; None when unknown."""
        limit = self.limit.get(rank)
        left = None if limit is None else max(0.0, limit - self.resident.get(rank, 0.0))
        return min((each for each in (left, self.available_bytes) if each is not None), default=None)


def survey(families: Iterable[Family], gpus: Sequence[GpuReading]) -> Surroundings:
    """Return what matters of the collectors' newest samples."""
    ranks: dict[str, dict[RankKey, float]] = {name: {} for name in _OF_RANKS.values()}
    pressure: dict[str, float] = {}
    available = None
    for family in families:
        if family.name in _OF_RANKS:
            known = ranks[_OF_RANKS[family.name]]
            for (run, rank), value in family.samples:
                known[run, int(rank)] = value
        elif family.name == _PRESSURE:
            pressure.update({labels[0]: value for labels, value in family.samples if labels[1] == "some"})
        elif family.name == _AVAILABLE and family.samples:
            available = family.samples[0][1]
    return Surroundings(
        ranks["queued"],
        ranks["throttled"],
        pressure.get("io", 0.0),
        pressure.get("memory", 0.0),
        {reading.uuid: _gpu(reading) for reading in gpus if reading.uuid},
        ranks["resident"],
        ranks["limit"],
        available,
    )


def _gpu(reading: GpuReading) -> GpuState:
    held_down = [
        value
        for (name, labels), value in reading.values.items()
        if name == "gpu_throttle_seconds" and labels[0] in _HELD_DOWN
    ]
    return GpuState(
        # Reasons hold at the same time: the longest is the one that counts.
        max(held_down, default=0.0),
        reading.values.get(("gpu_clock_hertz", ("sm",)), 0.0),
        reading.values.get(("gpu_utilization_ratio", ())),
        frozenset(reading.process_bytes),
    )
