"""Seconds for which the clocks of a GPU were throttled, by reason."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from torchperfd_daemon.collectors import nvml_fields
from torchperfd_daemon.collectors.gpu_counters import ActiveTime
from torchperfd_daemon.collectors.nvml_call import ask
from torchperfd_daemon.collectors.nvml_fields import FieldValue, slowdown_ns

# The names that nvidia-smi prints. Idle clocks are not throttled, so that bit is left out.
_REASONS: Final = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}


class Throttle:
    """Seconds for which clocks were throttled, by reason.

    Read from the driver's own counters where it has them; for the other reasons from the active
    reasons at each sample. The first reading chooses between the two, since a counter that changes
    its source would jump.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, handle: Any, clock: Callable[[], float]) -> None:
        self._handle = handle
        self._clock = clock
        self._watched: ActiveTime | None = None

    def read(self, fields: Mapping[int, FieldValue]) -> dict[str, float]:
        """Return seconds since the driver was loaded, or since the first reading for those watched.

        Raises:
            GpuLostError: The GPU does not answer.
            DriverGoneError: The driver does not.
        """
        counted = _counted_seconds(fields)
        if self._watched is None:
            supported = _reasons("nvmlDeviceGetSupportedClocksEventReasons", self._handle)
            self._watched = ActiveTime((supported or _REASONS.keys()) - counted.keys())
        active = _reasons("nvmlDeviceGetCurrentClocksEventReasons", self._handle)
        if active is None:
            self._watched.pause()
            return counted
        self._watched.update(self._clock(), active)
        return self._watched.seconds | {
            reason: seconds for reason, seconds in counted.items() if reason not in self._watched.seconds
        }

    def pause(self) -> None:
        """Count nothing until the next reading."""
        if self._watched is not None:
            self._watched.pause()


def _counted_seconds(fields: Mapping[int, FieldValue]) -> dict[str, float]:
    counted = {}
    for reason, number in (
        ("sw_power_cap", nvml_fields.SW_POWER_CAP_NS),
        ("sync_boost", nvml_fields.SYNC_BOOST_NS),
    ):
        if number in fields:
            counted[reason] = fields[number].value / 1e9
    slowdowns = slowdown_ns(fields)
    if slowdowns is not None:
        names = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
        counted.update(zip(names, (ns / 1e9 for ns in slowdowns), strict=True))
    return counted


def _reasons(function: str, handle: Any) -> frozenset[str] | None:
    bits = ask(function, handle)
    if bits is None:
        # Drivers before 535 know it by its old name.
        bits = ask(function.replace("Event", "Throttle"), handle)
    return None if bits is None else frozenset(name for name, bit in _REASONS.items() if bits & bit)
