"""The node around its ranks, by the collectors' samples, and each rank's device and memory over time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import GpuReading
from torchperfd_daemon.diagnosis.detect.trends import MIN_SHARE, GrowthDetector, theil_sen
from torchperfd_daemon.diagnosis.evidence import FULL_SOON_S

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


class GpuWatch:
    """Adds up what the driver shows once per second.

    Args:
        now: Monotonic seconds.

    Attributes:
        busy_seconds: The time for which the device was busy so far; meaningless if ``is_known`` is false.
        foreign: Other processes on the device.
    """

    def __init__(self, now: float) -> None:
        self.busy_seconds = 0.0
        self.foreign = 0
        self._state = GpuState()
        self._sampled_at = now
        self._top_clock = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the driver shows for how long the device is busy."""
        return self._state.utilization is not None

    @property
    def slowdown(self) -> float:
        """The part of its highest clock that the device has lost, 0 to 1."""
        return max(0.0, 1 - self._state.clock_hertz / self._top_clock) if self._top_clock else 0.0

    def follow(self, now: float, gpu: GpuState, pid: int, ours: frozenset[int]) -> None:
        """Add a sample.

        Args:
            now: Monotonic seconds.
            pid: The rank's process.
            ours: The process ids of all ranks.
        """
        self._state = gpu
        # Unknown for some seconds at first, and whenever the driver does not answer: not idle by that.
        busy = 1.0 if gpu.utilization is None else gpu.utilization
        self.busy_seconds += busy * (now - self._sampled_at)
        self._sampled_at = now
        self._top_clock = max(self._top_clock, gpu.clock_hertz)
        # In its own container a rank has another id than the driver sees, and all processes seem foreign.
        self.foreign = len(gpu.processes - ours) if pid in gpu.processes else 0


_READINGS: Final = 64
_GROWTH_EVERY: Final = 10

Float64 = npt.NDArray[np.float64]


class MemoryWatch:
    """Finds slow growth over the whole run, and fast growth in the newest samples.

    Attributes:
        free_bytes: What the rank may still take, as last seen; None if unknown.
    """

    def __init__(self) -> None:
        self.free_bytes: float | None = None
        self._detector = GrowthDetector(readings=_READINGS)
        self._measured = 0
        self._grows_by = self._grows_for = 0.0

    def observe(self, now: float, resident: float, free_bytes: float | None) -> None:
        """Add a sample: monotonic seconds, and bytes."""
        self.free_bytes = free_bytes
        self._detector.observe(now, resident)
        self._measured += 1
        if self._measured % _GROWTH_EVERY == 0:
            growth = self._detector.find()
            grows = growth is not None and growth.grows
            self._grows_by = growth.slope.per_second if growth is not None and grows else 0.0
            self._grows_for = growth.seconds if growth is not None and grows else 0.0

    def growth(self, at: Float64, resident: Float64) -> tuple[float, float]:
        """Return the growth in bytes per second, and its observed time in seconds; 0 if none.

        Args:
            at: When the newest samples with steps were taken, in monotonic seconds.
            resident: Their bytes.
        """
        if self._grows_by or self.free_bytes is None:
            return self._grows_by, self._grows_for
        gained, seconds = resident[-1] - resident[0], float(at[-1] - at[0])
        if self.free_bytes * seconds > gained * FULL_SOON_S or gained < MIN_SHARE * resident[-1]:
            return 0.0, 0.0
        slope = theil_sen(at, resident)
        return (slope.per_second, seconds) if slope.low > 0 else (0.0, 0.0)
