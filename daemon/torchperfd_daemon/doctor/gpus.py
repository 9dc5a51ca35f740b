"""What the doctor reads of GPUs, through NVIDIA's management library."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import pynvml

from torchperfd_daemon.collectors.nvml_errors import DriverProblem, driver_problem
from torchperfd_daemon.doctor.facts import Gpu

# Not the ordinary power cap: a GPU at full load runs at it.
_FAULTS: Final = {
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat (driver)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "the power brake",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "a hardware slowdown",
}

T = TypeVar("T")


class NoDriverError(Exception):
    """There are no GPUs to look at, and why."""


class BrokenDriverError(Exception):
    """There is a driver that cannot be used."""

    def __init__(self, found: DriverProblem) -> None:
        super().__init__(found.problem)
        self.found = found


class GpuReading(NamedTuple):
    """The data from the driver.

    Attributes:
        gpus: Those that answer.
        unreachable: Indices of those that do not.
        driver_cuda: Newest CUDA, (major, minor), that the driver runs.
    """

    gpus: tuple[Gpu, ...]
    unreachable: tuple[int, ...]
    driver_cuda: tuple[int, int] | None


def read_gpus(sys: Path, proc: Path = Path("/proc")) -> GpuReading:
    """Read all GPUs; a value that a GPU does not have is None.

    Raises:
        NoDriverError: There is no driver.
        BrokenDriverError: There is one that cannot be used.
    """
    with _driver(proc):
        version = _known(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        gpus = [_known(functools.partial(_read, index, sys)) for index in range(pynvml.nvmlDeviceGetCount())]
        return GpuReading(
            tuple(gpu for gpu in gpus if gpu is not None),
            tuple(index for index, gpu in enumerate(gpus) if gpu is None),
            None if version is None else (version // 1000, version % 1000 // 10),
        )


@contextlib.contextmanager
def _driver(proc: Path) -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        found = driver_problem(error, proc)
        if found is None:
            raise NoDriverError(f"no NVIDIA driver here ({error})") from None
        raise BrokenDriverError(found) from None
    try:
        yield
    except pynvml.NVMLError as error:
        found = driver_problem(error, proc)
        if found is None:
            raise
        raise BrokenDriverError(found) from None
    finally:
        pynvml.nvmlShutdown()


def _read(index: int, sys: Path) -> Gpu:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    bus_id = _sysfs_name(pynvml.nvmlDeviceGetPciInfo(gpu).busId)
    reasons = _known(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
    persistence = _known(lambda: pynvml.nvmlDeviceGetPersistenceMode(gpu))
    processes = _known(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)) or []
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(gpu),
        pci_bus_id=bus_id,
        pcie_generation=_known(lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
        pcie_generation_max=_known(lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
        pcie_width=_known(lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
        pcie_width_max=_known(lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
        throttled_by=tuple(name for bit, name in _FAULTS.items() if reasons & bit),
        persistence_mode=None if persistence is None else bool(persistence),
        is_idle=not _known(lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        numa_node=_numa_node(sys, bus_id),
        pids=frozenset(process.pid for process in processes),
    )


def _known(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except pynvml.NVMLError:
        return None


def _sysfs_name(bus_id: str) -> str:
    """Return a PCI address as sysfs writes it; NVML's has a domain of eight digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _numa_node(sys: Path, bus_id: str) -> int | None:
    try:
        node = int((sys / "bus" / "pci" / "devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
