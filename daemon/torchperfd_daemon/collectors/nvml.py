"""GPUs, through NVIDIA's management library."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pynvml

from torchperfd_daemon.collectors.base import CollectorUnavailableError, NothingToCollectError
from torchperfd_daemon.collectors.gpu_readings import GpuCollector, GpuReading
from torchperfd_daemon.collectors.nvml_device import NvmlDevice
from torchperfd_daemon.collectors.nvml_errors import (
    DriverGoneError,
    GpuLostError,
    XidLog,
    ask,
    driver_problem,
    is_driver_loaded,
)
from torchperfd_daemon.collectors.process import Ranks

log = logging.getLogger("torchperfd.collectors")


class NvmlCollector(GpuCollector):
    """Samples every GPU that the driver shows. A value that a GPU does not provide is absent, never zero.

    Args:
        ranks: Returns the ranks whose memory on GPUs is reported.
        proc: Root of procfs, where the processes on the GPUs are looked up.
    """

    name = "nvml"

    def __init__(
        self,
        ranks: Ranks = tuple,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ranks, proc)
        self._clock = clock
        self._wall = wall
        self._xids = XidLog(wall)
        self._count: int | None = None
        self._driver_version = ""
        self._devices: dict[int, NvmlDevice] = {}
        self._lost: set[int] = set()

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU and instance.

        Raises:
            NothingToCollectError: There is no driver on this node.
            CollectorUnavailableError: The driver cannot be used, or was just unloaded.
        """
        if self._count is None:
            self._count = self._initialise()
        readings: list[GpuReading] = []
        try:
            self._xids.update()
            for index in range(self._count):
                readings += self._read(index)
        except DriverGoneError as error:
            self._forget()
            raise CollectorUnavailableError(f"the NVIDIA driver was unloaded ({error})") from error
        return readings

    def _initialise(self) -> int:
        try:
            pynvml.nvmlInit()
            self._driver_version = pynvml.nvmlSystemGetDriverVersion()
            return int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            absent = isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded)
            found = driver_problem(error, self._proc)
            # Nodes without a GPU may have the driver's packages, and never load its module.
            if found is None or (absent and not self._driver_version and not is_driver_loaded(self._proc)):
                raise NothingToCollectError(
                    f"no NVIDIA driver here ({error}); GPU metrics are off"
                ) from error
            raise CollectorUnavailableError(f"{found.problem}; GPU metrics are off; {found.fix}") from error

    def _read(self, index: int) -> list[GpuReading]:
        try:
            device = self._devices.get(index)
            if device is None:
                handle = ask("nvmlDeviceGetHandleByIndex", index)
                if handle is None:
                    # It exists, but may not be used, for example by a container's device list: not reported.
                    return []
                device = NvmlDevice(handle, index, self._driver_version, self._clock, self._xids)
                self._xids.follow(handle, device.uuid)
                self._devices[index] = device
            readings = device.read()
        except GpuLostError as error:
            device = self._devices.get(index)
            if index not in self._lost:
                self._lost.add(index)
                log.warning("GPU %d %s is lost: %s", index, device.uuid if device else "", error)
            if device is not None:
                return [device.lost()]
            reading = GpuReading(str(index), "")
            reading.put("gpu_up", 0)
            return [reading]
        self._lost.discard(index)
        return readings

    def _forget(self) -> None:
        """Drop all state, so that the next reading initialises the driver again."""
        self._count = None
        self._devices.clear()
        self._lost.clear()
        self._xids = XidLog(self._wall)
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.debug("nvmlShutdown: %s", error)
