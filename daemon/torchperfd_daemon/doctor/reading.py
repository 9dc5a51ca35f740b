"""Reading the facts: from the kernel, the driver, and the installed torch; nothing is changed."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import pynvml

from torchperfd._version import missing_native_modules
from torchperfd_daemon.collectors.cgroup import read_limits
from torchperfd_daemon.collectors.nvml_errors import DriverProblem, driver_problem
from torchperfd_daemon.collectors.process import RankProcess, is_here
from torchperfd_daemon.collectors.procfs import parse_cpu_list, parse_stat, parse_table, read
from torchperfd_daemon.doctor.facts import Facts, Gpu, RankFacts, ReportedFacts, read_cpu

_UNSYNCHRONISED: Final = 0x40


class ClockState(NamedTuple):
    """Whether something keeps the clock right, and the most by which it may be wrong, in seconds."""

    synchronised: bool
    error_seconds: float


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux as far as its status, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> ClockState | None:
    """Ask the kernel, which needs no privilege; None if the kernel does not report it."""
    state = _Timex()  # no modes: nothing is changed
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    if answer < 0:
        return None
    return ClockState(not state.status & _UNSYNCHRONISED, state.maxerror / 1e6)


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


_THREADS: Final = re.compile(r"[1-9][0-9]{0,4}")
_TORCH_FIELD: Final = re.compile(r"^(?P<name>__version__|cuda)\b[^=]*=\s*'(?P<value>[^']*)'", re.MULTILINE)


def read_facts(
    ranks: Mapping[RankProcess, ReportedFacts] | None,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    shm: Path = Path("/dev/shm"),
) -> Facts:
    """Read all there is to read; what cannot be looked at is named, and no error.

    Args:
        ranks: The training processes on this node, with what they report; None when no daemon answers.
    """
    skipped = {}
    gpus = driver_cuda = problem = None
    unreachable: tuple[int, ...] = ()
    try:
        gpus, unreachable, driver_cuda = read_gpus(sys, proc)
    except NoDriverError as error:
        skipped["gpus"] = str(error)
    except BrokenDriverError as error:
        problem = error.found
    seen = []
    if ranks is None:
        skipped["ranks"] = "no daemon answers; start one with `torchperfd serve`"
    for rank, reported in (ranks or {}).items():
        if not is_here(proc, rank):
            skipped[f"rank {rank.rank} of {rank.run}"] = "it has ended, or runs in another container"
            continue
        with contextlib.suppress(OSError):
            facts = _read_rank(rank, reported, proc, sys)
            if is_here(proc, rank):
                seen.append(facts)
    torch_version, torch_cuda = read_torch()
    clock = read_clock()
    if clock is None:
        skipped["clock"] = "the kernel does not report it"
    return Facts(
        gpus=gpus,
        driver_cuda=driver_cuda,
        torch_version=torch_version,
        torch_cuda=torch_cuda,
        cpu=read_cpu(proc),
        missing_native=tuple(missing_native_modules()),
        ranks=None if ranks is None else tuple(seen),
        numa_cpus={
            int(path.parent.name.removeprefix("node")): parse_cpu_list(read(path))
            for path in sorted((sys / "devices" / "system" / "node").glob("node[0-9]*/cpulist"))
        },
        shm_bytes=_size(shm),
        clock_synchronised=None if clock is None else clock.synchronised,
        clock_error_seconds=None if clock is None else clock.error_seconds,
        skipped=skipped,
        driver_problem=problem,
        unreachable_gpus=unreachable,
    )


def read_torch(version_file: Path | None = None) -> tuple[str, tuple[int, int] | None]:
    """Return version and CUDA, (major, minor), of the installed torch, without importing it.

    Args:
        version_file: Its ``version.py``; looked for when None.
    """
    if version_file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return "", None
        version_file = Path(spec.origin).parent / "version.py"
    try:
        text = version_file.read_text()
    except OSError:
        return "", None
    fields = {match["name"]: match["value"] for match in _TORCH_FIELD.finditer(text)}
    cuda = re.match(r"(\d+)\.(\d+)", fields.get("cuda", ""))
    return fields.get("__version__", ""), (int(cuda[1]), int(cuda[2])) if cuda else None


def _read_rank(rank: RankProcess, reported: ReportedFacts, proc: Path, sys: Path) -> RankFacts:
    directory = proc / str(rank.pid)
    limits = read_limits(rank.pid, proc, sys / "fs" / "cgroup")
    return RankFacts(
        run=rank.run,
        rank=rank.rank,
        pid=rank.pid,
        allowed=parse_cpu_list(parse_table(read(directory / "status"))["Cpus_allowed_list"]),
        cgroup_cpus=limits.cpus,
        cpu_cores=limits.cpu_cores,
        workers=_count_workers(rank.pid, proc),
        threads=reported.threads or _read_threads(directory),
        loader=reported.loader,
        shm_bytes=_size(directory / "root" / "dev" / "shm"),
    )


def _read_threads(directory: Path) -> int | None:
    """Return OMP_NUM_THREADS as a process was started with it; None if that is not set, or not for us."""
    with contextlib.suppress(OSError):
        variables = dict(each.partition("=")[::2] for each in read(directory / "environ").split("\0"))
        # For nested teams of threads it is a list; the first one is that of operators.
        first = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        return int(first) if _THREADS.fullmatch(first) else None
    return None


def _count_workers(pid: int, proc: Path) -> int:
    """Count the loader workers of a process: its forks, and what multiprocessing spawned for it."""
    parents, commands = {}, {}
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = parse_stat(read(entry / "stat")).parent
            commands[int(entry.name)] = read(entry / "cmdline")
    return sum(
        (parent == pid and (commands[child] == commands[pid] or "multiprocessing.spawn" in commands[child]))
        or (parents.get(parent) == pid and "multiprocessing.forkserver" in commands.get(parent, ""))
        for child, parent in parents.items()
        if child in commands and pid in commands
    )


def _size(shm: Path) -> int | None:
    try:
        status = os.statvfs(shm)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
