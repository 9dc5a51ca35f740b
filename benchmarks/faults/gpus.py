"""The GPUs of a job on the simulated device, as NVML shows them to the daemon."""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.faults.journal import Step
from tests.fakes.nvml import GIB, Driver, gpu, scenario

_CLOCK_MHZ: Final = 1965
_TOO_HOT: Final = 0x48
"""The reasons ``hw_slowdown`` and ``hw_thermal_slowdown``."""
_HOT_NS: Final = "field.252"
"""The driver's counter of the time for which heat held the clock down."""
_RECENT: Final = 10


class Gpus:
    """A GPU for each rank. Its clock is lowered as much as the rank's kernels are longer.

    Args:
        directory: Where the state of the fake driver is kept.
        ranks: How many there are.
        kernel_seconds: What the kernels of a step take at the full clock.

    Attributes:
        env: The daemon's environment, in which it finds the driver.
    """

    def __init__(self, directory: Path, ranks: int, kernel_seconds: float) -> None:
        self._kernel_seconds = kernel_seconds
        self._hot_ns = [0] * ranks
        self._followed = time.monotonic()
        self._driver = Driver(directory, scenario(*map(gpu, range(ranks))))
        self.env = self._driver.env

    def follow(self, pids: Mapping[int, int], ranks: Mapping[int, Sequence[Step]]) -> None:
        """Show what the ranks have measured of their newest steps.

        Args:
            pids: Process ids by rank, as far as they are known.
            ranks: Their steps.
        """
        now = time.monotonic()
        passed_ns, self._followed = int((now - self._followed) * 1e9), now
        blocks = []
        for rank in range(len(self._hot_ns)):
            steps = ranks[rank][-_RECENT:]
            longer = steps[-1].injected_ns / 1e9 if steps else 0.0
            self._hot_ns[rank] += passed_ns if longer else 0
            holder = (f"process {pids[rank]} {GIB}",) if rank in pids else ()
            facts = {
                "utilization_percent": round(100 * self._busy(steps)),
                "sm_mhz": round(_CLOCK_MHZ * self._kernel_seconds / (self._kernel_seconds + longer)),
                "reasons": _TOO_HOT if longer else 0,
                _HOT_NS: f"ull:{self._hot_ns[rank]}",
            }
            blocks.append(gpu(rank, *holder, **facts))
        self._driver.follow(scenario(*blocks))

    def _busy(self, steps: Sequence[Step]) -> float:
        if not steps:
            return 0.0
        worked = self._kernel_seconds + statistics.fmean(step.injected_ns for step in steps) / 1e9
        return min(1.0, worked / (statistics.fmean(step.duration_ns for step in steps) / 1e9))
