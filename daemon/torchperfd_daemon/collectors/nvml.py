"""GPUs, through NVIDIA's management library.

Every value is read separately, so that a missing one affects no other.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pynvml

from torchperfd_daemon.collectors import nvml_counters
from torchperfd_daemon.collectors.base import CollectorUnavailableError, NothingToCollectError
from torchperfd_daemon.collectors.gpu_readings import GpuCollector, GpuReading
from torchperfd_daemon.collectors.nvml_counters import (
    FieldValue,
    Gpm,
    RateTotal,
    Throttle,
)
from torchperfd_daemon.collectors.nvml_errors import (
    DriverGoneError,
    GpuLostError,
    XidLog,
    ask,
    driver_problem,
    is_driver_loaded,
)
from torchperfd_daemon.collectors.process import Ranks

_CLOCKS: Final = {"graphics": pynvml.NVML_CLOCK_GRAPHICS, "sm": pynvml.NVML_CLOCK_SM}
_STEADY_CLOCKS: Final = {"memory": pynvml.NVML_CLOCK_MEM, "video": pynvml.NVML_CLOCK_VIDEO}
_ECC_TYPES: Final = {
    "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}
_ECC_SCOPES: Final = {"volatile": pynvml.NVML_VOLATILE_ECC, "aggregate": pynvml.NVML_AGGREGATE_ECC}
_RATIOS: Final = {
    "gpu_sm_active_ratio": nvml_counters.GPM_SM_ACTIVE,
    "gpu_sm_occupancy_ratio": nvml_counters.GPM_SM_OCCUPANCY,
    "gpu_tensor_active_ratio": nvml_counters.GPM_TENSOR_ACTIVE,
    "gpu_dram_active_ratio": nvml_counters.GPM_DRAM_ACTIVE,
}
_RATES: Final = {
    ("gpu_pcie_bytes", "receive"): nvml_counters.GPM_PCIE_RECEIVE,
    ("gpu_pcie_bytes", "transmit"): nvml_counters.GPM_PCIE_TRANSMIT,
    ("gpu_nvlink_bytes", "receive"): nvml_counters.GPM_NVLINK_RECEIVE,
    ("gpu_nvlink_bytes", "transmit"): nvml_counters.GPM_NVLINK_TRANSMIT,
}
_PCIE: Final = {"receive": nvml_counters.PCIE_RECEIVE_BYTES, "transmit": nvml_counters.PCIE_TRANSMIT_BYTES}
_NVLINK: Final = {"receive": nvml_counters.NVLINK_RECEIVE_KIB, "transmit": nvml_counters.NVLINK_TRANSMIT_KIB}
_MIB: Final = 1024 * 1024
# What rarely changes: errors of memory, the clocks of memory and video, and the split into instances.
_SELDOM_S: Final = 10.0
# A GPU may have GPM and yet give none: in MIG mode, or where profiling is for administrators.
_GPM_TRIALS: Final = 3


class NvmlDevice:
    """One GPU, with the state between two readings.

    Args:
        index: Of the GPU on the node.
        driver_version: For the info series.
        clock: Monotonic seconds.

    Raises:
        GpuLostError: The GPU does not answer.
        DriverGoneError: The driver does not.
    """

    def __init__(
        self,
        handle: Any,
        index: int,
        driver_version: str,
        clock: Callable[[], float],
        xids: XidLog,
    ) -> None:
        self._handle = handle
        self._clock = clock
        self._driver_version = driver_version
        self._gpu = str(index)
        self.uuid: str = ask("nvmlDeviceGetUUID", handle) or ""
        pci = ask("nvmlDeviceGetPciInfo", handle)
        self._pci_bus_id: str = pci.busId if pci is not None else ""
        self._model: str = ask("nvmlDeviceGetName", handle) or ""
        self._xids = xids
        self._seldom: dict[tuple[str, tuple[str, ...]], float] = {}
        self._seldom_due = -math.inf
        self._is_split = False
        self._fields = nvml_counters.Fields(handle)
        self._throttle = Throttle(handle, clock)
        self._gpm: Gpm | None = None
        self._has_gpm = nvml_counters.is_gpm_supported(handle)
        if self._has_gpm:
            self._gpm = Gpm(
                lambda sample: ask("nvmlGpmSampleGet", handle, sample),
                (*_RATIOS.values(), *_RATES.values()),
                clock,
            )
        self._gpm_trials = _GPM_TRIALS
        self._rates = {key: RateTotal() for key in _RATES}
        self._wraps = {direction: nvml_counters.WrappingTotal() for direction in _PCIE}
        self._instances: dict[str, Gpm] = {}

    def read(self) -> list[GpuReading]:
        """Return the GPU's reading, then those of its MIG instances.

        Raises:
            GpuLostError: The GPU has fallen off the bus, or answers nothing.
            DriverGoneError: The driver does not answer.
        """
        reading = GpuReading(self._gpu, self.uuid)
        self._read_load(reading)
        fields = self._fields.read()
        reading.put("gpu_temperature_celsius", _value(fields, nvml_counters.MEMORY_TEMPERATURE), "memory")
        for reason, seconds in self._throttle.read(fields).items():
            reading.put("gpu_throttle_seconds", seconds, reason)
        self._read_traffic(reading, fields)
        if not self._read_seldom() and not reading.values:
            raise GpuLostError("not one value can be read")
        reading.values.update(self._seldom)
        reading.put("gpu_info", 1, self._model, self._driver_version, self._pci_bus_id)
        reading.put("gpu_up", 1)
        self._put_xids(reading)
        reading.process_bytes.update(_processes(self._handle))
        return [reading, *self._read_instances()]

    def lost(self) -> GpuReading:
        """Return the reading of a GPU that does not answer: ``gpu_up`` 0, and its reported errors."""
        self._throttle.pause()
        self._seldom_due = -math.inf
        reading = GpuReading(self._gpu, self.uuid)
        reading.put("gpu_up", 0)
        self._put_xids(reading)
        return reading

    def _put_xids(self, reading: GpuReading) -> None:
        for xid, count in self._xids.of(self.uuid).items():
            reading.put("gpu_xid_errors", count.errors, str(xid))
            reading.put("gpu_xid_last_timestamp_seconds", count.last_unix_seconds, str(xid))

    def _read_load(self, reading: GpuReading) -> None:
        handle = self._handle
        rates = ask("nvmlDeviceGetUtilizationRates", handle)
        if rates is not None:
            reading.put("gpu_utilization_ratio", rates.gpu / 100)
        _put_memory(reading, handle)
        power_mw = ask("nvmlDeviceGetPowerUsage", handle)
        reading.put("gpu_power_watts", _divided(power_mw, 1000))
        energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        reading.put("gpu_energy_joules", _divided(energy_mj, 1000))
        _put_clocks(reading, handle, _CLOCKS)
        celsius = ask("nvmlDeviceGetTemperatureV", handle, pynvml.NVML_TEMPERATURE_GPU)
        if celsius is None:
            celsius = ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)
        reading.put("gpu_temperature_celsius", celsius, "gpu")

    def _read_seldom(self) -> bool:
        """Read the values that rarely change, if that is due; return whether any was read."""
        now = self._clock()
        if now < self._seldom_due:
            return False
        self._seldom_due = now + _SELDOM_S
        self._fields.ask_for_all()
        handle, health = self._handle, GpuReading(self._gpu, self.uuid)
        mode = ask("nvmlDeviceGetMigMode", handle)
        self._is_split = mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        for kind, error in _ECC_TYPES.items():
            for scope, counter in _ECC_SCOPES.items():
                count = ask("nvmlDeviceGetTotalEccErrors", handle, error, counter)
                health.put("gpu_ecc_errors", count, kind, scope)
        _put_clocks(health, handle, _STEADY_CLOCKS)
        remapped = ask("nvmlDeviceGetRemappedRows", handle)
        if remapped is not None:
            _, _, pending, failure = remapped
            health.put("gpu_row_remap_pending", pending)
            health.put("gpu_row_remap_failure", failure)
        self._seldom = health.values
        return bool(health.values)

    def _read_traffic(self, reading: GpuReading, fields: Mapping[int, FieldValue]) -> None:
        rates, seconds = self._gpm_rates()
        for family, metric in _RATIOS.items():
            reading.put(family, _divided(rates.get(metric), 100))
        for key, metric in _RATES.items():
            if metric in rates:
                self._rates[key].add(rates[metric] * _MIB, seconds)
        for direction, number in _PCIE.items():
            # GPM where there is GPM: the driver's own counter has 32 bits, which a fast link
            # fills several times a second.
            if self._gpm is not None:
                if _RATES["gpu_pcie_bytes", direction] in rates:
                    total = self._rates["gpu_pcie_bytes", direction].total
                    reading.put("gpu_pcie_bytes", total, direction)
            elif number in fields:
                self._wraps[direction].update(fields[number].value, fields[number].bits)
                reading.put("gpu_pcie_bytes", self._wraps[direction].total, direction)
        for direction, number in _NVLINK.items():
            if number in fields:
                reading.put("gpu_nvlink_bytes", fields[number].value * 1024, direction)
            # A GPU without links has a rate of zero.
            elif (
                _value(fields, nvml_counters.NVLINK_COUNT) and _RATES["gpu_nvlink_bytes", direction] in rates
            ):
                total = self._rates["gpu_nvlink_bytes", direction].total
                reading.put("gpu_nvlink_bytes", total, direction)

    def _gpm_rates(self) -> tuple[dict[int, float], float]:
        if self._gpm is None:
            return {}, 0.0
        rates, seconds = self._gpm.read()
        if rates:
            self._gpm_trials = 0
        elif self._gpm_trials:
            self._gpm_trials -= 1
            if not self._gpm_trials:
                self._gpm.close()
                self._gpm = None
        return rates, seconds

    def _read_instances(self) -> Iterator[GpuReading]:
        """Yield the MIG instances there are now: they come and go while the GPU stays."""
        seen = set()
        for position, handle in _instances(self._handle) if self._is_split else ():
            uuid: str = ask("nvmlDeviceGetUUID", handle) or ""
            seen.add(uuid)
            reading = GpuReading(f"{self._gpu}:{position}", uuid)
            model: str = ask("nvmlDeviceGetName", handle) or ""
            reading.put("gpu_info", 1, model, self._driver_version, self._pci_bus_id)
            reading.put("gpu_mig_info", 1, self._gpu, self.uuid)
            _put_memory(reading, handle)
            rates = self._instance_rates(uuid, handle)
            for family, metric in _RATIOS.items():
                reading.put(family, _divided(rates.get(metric), 100))
            yield reading
        for uuid in self._instances.keys() - seen:
            self._instances.pop(uuid).close()

    def _instance_rates(self, uuid: str, handle: Any) -> dict[int, float]:
        if not self._has_gpm:
            return {}
        if uuid not in self._instances:
            parent, instance = self._handle, ask("nvmlDeviceGetGpuInstanceId", handle)
            if instance is None:
                return {}
            self._instances[uuid] = Gpm(
                lambda sample: ask("nvmlGpmMigSampleGet", parent, instance, sample),
                _RATIOS.values(),
                self._clock,
            )
        return self._instances[uuid].read()[0]


def _instances(handle: Any) -> Iterator[tuple[int, Any]]:
    for position in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
        if instance is not None:
            yield position, instance


def _put_memory(reading: GpuReading, handle: Any) -> None:
    # The second version counts what the driver reserves for itself apart, as nvidia-smi does.
    memory = ask("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    if memory is None:
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is not None:
        reading.put("gpu_memory_used_bytes", memory.used)
        reading.put("gpu_memory_total_bytes", memory.total)


def _put_clocks(reading: GpuReading, handle: Any, clocks: Mapping[str, int]) -> None:
    for domain, clock in clocks.items():
        mhz = ask("nvmlDeviceGetClockInfo", handle, clock)
        reading.put("gpu_clock_hertz", None if mhz is None else mhz * 1_000_000, domain)


def _processes(handle: Any) -> Iterator[tuple[int, int]]:
    # By version: the function without one turns a missing symbol into an error of another family.
    found = ask("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    if found is None:
        found = ask("nvmlDeviceGetComputeRunningProcesses_v2", handle) or ()
    held: dict[int, int] = {}
    for process in found:
        # Once per MIG instance that it uses; None where the driver does not report it.
        if process.usedGpuMemory is not None:
            held[process.pid] = held.get(process.pid, 0) + process.usedGpuMemory
    yield from held.items()


def _value(fields: Mapping[int, FieldValue], number: int) -> float | None:
    return fields[number].value if number in fields else None


def _divided(value: float | None, by: int) -> float | None:
    return None if value is None else value / by


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
