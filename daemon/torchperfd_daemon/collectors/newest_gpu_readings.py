"""Keeps the newest readings of the GPUs, for the parts that need them between two samples."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchperfd_daemon.collectors.base import HANGS_AFTER_S
from torchperfd_daemon.collectors.gpu_base import GpuCollector, GpuReading
from torchperfd_daemon.collectors.ranks import Ranks


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
