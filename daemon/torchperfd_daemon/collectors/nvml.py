"""GPUs, through NVIDIA's management library."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pynvml

from torchperfd_daemon.collectors.base import CollectorUnavailableError, Family

_ABSENT: Final = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_NoPermission,
)
_LABELS: Final = ("gpu", "gpu_uuid")


class NvmlCollector:
    """Samples every GPU that the driver shows. What a GPU cannot tell is absent, never zero."""

    name = "nvml"

    def __init__(self) -> None:
        self._driver_version = ""
        self._initialised = False

    def sample(self) -> Sequence[Family]:
        """Return all GPU families.

        Raises:
            CollectorUnavailableError: There is no driver on this node.
        """
        self._initialise()
        info = Family("gpu_info", "A GPU.", "gauge", (*_LABELS, "model", "driver_version", "pci_bus_id"))
        readings: list[tuple[Family, Callable[[Any], float]]] = [
            (
                Family("gpu_utilization_ratio", "Share of time with a kernel running.", "gauge", _LABELS),
                lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            ),
            (
                Family("gpu_memory_used_bytes", "GPU memory in use.", "gauge", _LABELS),
                lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
            ),
            (
                Family("gpu_memory_total_bytes", "GPU memory there is.", "gauge", _LABELS),
                lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
            ),
            (
                Family("gpu_power_watts", "Power drawn.", "gauge", _LABELS),
                lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            ),
            (
                Family("gpu_energy_joules", "Energy used since the driver was loaded.", "counter", _LABELS),
                lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
            ),
        ]
        temperature = Family("gpu_temperature_celsius", "Temperature.", "gauge", (*_LABELS, "sensor"))
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            labels = (str(index), pynvml.nvmlDeviceGetUUID(gpu))
            info.add(
                1,
                *labels,
                pynvml.nvmlDeviceGetName(gpu),
                self._driver_version,
                pynvml.nvmlDeviceGetPciInfo(gpu).busId,
            )
            for family, read in readings:
                _add_if_known(family, read, gpu, labels)
            _add_if_known(temperature, _core_temperature, gpu, (*labels, "gpu"))
        return [info, *(family for family, _ in readings), temperature]

    def _initialise(self) -> None:
        if self._initialised:
            return
        try:
            pynvml.nvmlInit()
            self._driver_version = pynvml.nvmlSystemGetDriverVersion()
        except pynvml.NVMLError as error:
            raise CollectorUnavailableError(
                f"no NVIDIA driver here ({error}); GPU metrics are off"
            ) from error
        self._initialised = True


def _core_temperature(gpu: Any) -> float:
    return float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))


def _add_if_known(family: Family, read: Callable[[Any], float], gpu: Any, labels: tuple[str, ...]) -> None:
    try:
        family.add(read(gpu), *labels)
    except _ABSENT:
        return
