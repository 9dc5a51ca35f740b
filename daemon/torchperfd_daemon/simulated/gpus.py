"""GPUs that do not exist, for trying dashboards and commands on a machine without any."""

import math
import time
from collections.abc import Callable
from typing import Final

from torchperfd_daemon.collectors.gpu_base import GpuCollector, GpuReading

_GIB: Final = 1024**3
_STEP_SECONDS: Final = 0.4
# Out of each of these spans, GPU 5 is too hot for the last part, so that there is something to see.
_HOT_EVERY_SECONDS: Final = 120.0
_HOT_FOR_SECONDS: Final = 30.0
_HOT_GPU: Final = 5
_IDLE_WATTS: Final = 90.0
_BUSY_WATTS: Final = 600.0


class SimulatedGpuCollector(GpuCollector):
    """GPUs under a training job that never ends: waves of load, and one GPU that gets hot at times.

    Everything follows from the clock, so that two samples at the same moment are equal.
    """

    name = "simulated"

    def __init__(self, count: int = 8, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._count = count
        self._clock = clock
        self._began = clock()

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU."""
        seconds = self._clock() - self._began
        return [_reading(index, seconds) for index in range(self._count)]


def _reading(index: int, seconds: float) -> GpuReading:
    hot, hot_seconds = _heat(seconds) if index == _HOT_GPU else (False, 0.0)
    # A slow swell, a little different on each GPU: batches are not all alike.
    load = 0.88 + 0.08 * math.sin(seconds / 17 + index)
    speed = 0.7 if hot else 1.0
    steps = (seconds - 0.3 * hot_seconds) / _STEP_SECONDS
    watts = _IDLE_WATTS + (_BUSY_WATTS - _IDLE_WATTS) * load * speed
    # The integral of the swell, so that energy and power agree.
    swell = 0.88 * seconds - 0.08 * 17 * (math.cos(seconds / 17 + index) - math.cos(index))
    joules = _IDLE_WATTS * seconds + (_BUSY_WATTS - _IDLE_WATTS) * (swell - 0.3 * 0.88 * hot_seconds)

    reading = GpuReading(str(index), f"GPU-51a7ed00-0000-4000-8000-{index:012d}")
    reading.put("gpu_up", 1)
    reading.put("gpu_info", 1, "Simulated H100", "0.0", f"00000000:{0x1B + index:02X}:00.0")
    reading.put("gpu_utilization_ratio", min(1.0, load + 0.05))
    reading.put("gpu_sm_active_ratio", load * 0.9)
    reading.put("gpu_sm_occupancy_ratio", load * 0.4)
    reading.put("gpu_tensor_active_ratio", load * 0.45 * speed)
    reading.put("gpu_dram_active_ratio", load * 0.6)
    reading.put("gpu_memory_used_bytes", 61 * _GIB)
    reading.put("gpu_memory_total_bytes", 80 * _GIB)
    reading.put("gpu_power_watts", watts)
    reading.put("gpu_energy_joules", joules)
    reading.put("gpu_temperature_celsius", round(48 + 18 * load) + 20 * hot, "gpu")
    reading.put("gpu_temperature_celsius", round(56 + 20 * load) + 18 * hot, "memory")
    reading.put("gpu_clock_hertz", 1.98e9 * speed, "graphics")
    reading.put("gpu_clock_hertz", 1.98e9 * speed, "sm")
    reading.put("gpu_clock_hertz", 2.619e9, "memory")
    reading.put("gpu_clock_hertz", 1.545e9, "video")
    reading.put("gpu_throttle_seconds", hot_seconds, "hw_thermal_slowdown")
    reading.put("gpu_throttle_seconds", 0, "hw_power_brake_slowdown")
    reading.put("gpu_throttle_seconds", seconds * 0.02, "sw_power_cap")
    reading.put("gpu_pcie_bytes", steps * 40e6, "receive")
    reading.put("gpu_pcie_bytes", steps * 2e6, "transmit")
    reading.put("gpu_nvlink_bytes", steps * 6e9, "receive")
    reading.put("gpu_nvlink_bytes", steps * 6e9, "transmit")
    for kind in ("corrected", "uncorrected"):
        for scope in ("volatile", "aggregate"):
            reading.put("gpu_ecc_errors", 0, kind, scope)
    reading.put("gpu_row_remap_pending", 0)
    reading.put("gpu_row_remap_failure", 0)
    return reading


def _heat(seconds: float) -> tuple[bool, float]:
    """Return whether the hot GPU is hot after some seconds, and for how long it has been so far."""
    spans, within = divmod(seconds, _HOT_EVERY_SECONDS)
    hot_for = max(0.0, within - (_HOT_EVERY_SECONDS - _HOT_FOR_SECONDS))
    return hot_for > 0, spans * _HOT_FOR_SECONDS + hot_for
