"""The state of the node around its ranks at one moment, from the collectors' samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_base import GpuReading

# A software power cap is normal operation; only the reasons that protect the hardware count.
_HELD_DOWN: Final = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
_OF_RANKS: Final = {
    "process_run_delay_seconds": "queued",
    "process_collective_run_delay_seconds": "exchange_queued",
    "process_throttled_seconds": "throttled",
    "process_resident_memory_bytes": "resident",
    "process_memory_limit_bytes": "limit",
}
_THREADS: Final = "process_thread_cpu_seconds"
_OF_THREADS: Final = {"main": "ran", "other": "others_ran"}
_AVAILABLE: Final = "node_memory_available_bytes"
_MOVED: Final = "node_disk_bytes"
_BUSY: Final = "node_disk_busy_seconds"
_READ: Final = "process_io_bytes"
_PRESSURE: Final = "node_pressure_seconds"

RankKey = tuple[str, int]
"""Run and rank."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU.

    Attributes:
        throttled_seconds: Total time for which heat or power have lowered its clock.
        clock_hertz: Its present clock; 0 when unknown.
        utilization: The share of time with a kernel running; None when unknown.
        processes: The ids, as the driver sees them, of the processes that hold memory on it.
    """

    throttled_seconds: float = 0.0
    clock_hertz: float = 0.0
    utilization: float | None = None
    processes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Storage:
    """Cumulative counters of storage at one moment. Only differences have a meaning.

    Attributes:
        pressed_seconds: Time for which some task of the node waited for storage (PSI).
        busy_seconds: Time for which the node's disks were busy.
        moved_bytes: Bytes that the node's disks have read and written.
        read: Bytes that storage has read for each rank.
        seconds: Time for which each rank kept storage busy or waited for it; see :meth:`after`.
    """

    pressed_seconds: float = 0.0
    busy_seconds: float = 0.0
    moved_bytes: float = 0.0
    read: dict[RankKey, float] = field(default_factory=dict)
    seconds: dict[RankKey, float] = field(default_factory=dict)

    def after(self, last: "Storage") -> "Storage":
        """Return the counters with each rank's ``seconds`` continued from the previous sample.

        Pressure is a mean over processors, weighted by their load, so one waiting rank changes little of it
        on a node of many processors. A rank therefore gets the larger of two times: the pressure, or its
        share, by bytes read, of the time for which the disks were busy.
        """
        waited = max(0.0, self.pressed_seconds - last.pressed_seconds)
        busy = max(0.0, self.busy_seconds - last.busy_seconds)
        moved = max(1.0, self.moved_bytes - last.moved_bytes)

        def spent(rank: RankKey, read: float) -> float:
            # Bytes count when the transfer ends, which may have begun earlier: at most all busy time.
            return max(waited, min(busy, busy * max(0.0, read - last.read.get(rank, read)) / moved))

        return replace(
            self,
            seconds={
                rank: last.seconds.get(rank, 0.0) + spent(rank, self.read.get(rank, 0.0))
                for rank in self.seconds
            },
        )


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Cumulative counters in seconds, and amounts in bytes; a rank without data is absent.

    Attributes:
        queued: Time for which each rank's main thread was runnable without a processor.
        exchange_queued: The same for its threads that carry out collectives, summed.
        throttled: Time for which the quota of each rank's control group throttled it.
        ran: CPU time of each rank's main thread.
        others_ran: CPU time of each rank's other threads.
        memory_seconds: Time for which some task of the node waited for memory (PSI).
        resident: Bytes that each rank and its workers hold.
        limit: Bytes that each rank may hold; absent without a limit.
        available_bytes: The free memory of the node; None when unknown.
    """

    queued: dict[RankKey, float] = field(default_factory=dict)
    exchange_queued: dict[RankKey, float] = field(default_factory=dict)
    throttled: dict[RankKey, float] = field(default_factory=dict)
    storage: Storage = field(default_factory=Storage)
    memory_seconds: float = 0.0
    gpus: dict[str, GpuState] = field(default_factory=dict)
    resident: dict[RankKey, float] = field(default_factory=dict)
    limit: dict[RankKey, float] = field(default_factory=dict)
    available_bytes: float | None = None
    ran: dict[RankKey, float] = field(default_factory=dict)
    others_ran: dict[RankKey, float] = field(default_factory=dict)

    def room(self, rank: RankKey) -> float | None:
        """Return the number of bytes by which a rank can grow; None when unknown."""
        limit = self.limit.get(rank)
        left = None if limit is None else max(0.0, limit - self.resident.get(rank, 0.0))
        return min((each for each in (left, self.available_bytes) if each is not None), default=None)


def survey(
    families: Iterable[Family], gpus: Sequence[GpuReading], last: Storage | None = None
) -> NodeContext:
    """Select the values that diagnosis needs from the collectors' newest samples.

    Args:
        last: Storage at the previous sample; None at the first.
    """
    ranks: dict[str, dict[RankKey, float]] = {
        name: {} for name in (*_OF_RANKS.values(), *_OF_THREADS.values())
    }
    read: dict[RankKey, float] = {}
    pressure: dict[str, float] = {}
    moved = busy = 0.0
    available = None
    for family in families:
        if family.name in _OF_RANKS:
            known = ranks[_OF_RANKS[family.name]]
            for (run, rank), value in family.samples:
                known[run, int(rank)] = value
        elif family.name == _THREADS:
            for (run, rank, thread), value in family.samples:
                ranks[_OF_THREADS[thread]][run, int(rank)] = value
        elif family.name == _READ:
            read = {(run, int(rank)): value for (run, rank, way), value in family.samples if way == "read"}
        elif family.name == _MOVED:
            moved = sum(value for _, value in family.samples)
        elif family.name == _BUSY and family.samples:
            busy = family.samples[0][1]
        elif family.name == _PRESSURE:
            pressure.update({labels[0]: value for labels, value in family.samples if labels[1] == "some"})
        elif family.name == _AVAILABLE and family.samples:
            available = family.samples[0][1]
    nothing = dict.fromkeys(ranks["resident"] | read, 0.0)
    storage = Storage(pressure.get("io", 0.0), busy, moved, read, nothing)
    return NodeContext(
        ranks["queued"],
        ranks["exchange_queued"],
        ranks["throttled"],
        storage.after(last) if last is not None else storage,
        pressure.get("memory", 0.0),
        {reading.uuid: _gpu(reading) for reading in gpus if reading.uuid},
        ranks["resident"],
        ranks["limit"],
        available,
        ranks["ran"],
        ranks["others_ran"],
    )


def _gpu(reading: GpuReading) -> GpuState:
    held_down = [
        value
        for (name, labels), value in reading.values.items()
        if name == "gpu_throttle_seconds" and labels[0] in _HELD_DOWN
    ]
    return GpuState(
        # Several reasons can hold at the same time, so the longest is used instead of the sum.
        max(held_down, default=0.0),
        reading.values.get(("gpu_clock_hertz", ("sm",)), 0.0),
        reading.values.get(("gpu_utilization_ratio", ())),
        frozenset(reading.process_bytes),
    )
