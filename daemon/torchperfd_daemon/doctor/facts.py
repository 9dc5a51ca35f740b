"""The facts that the doctor judges, with the pressure on the CPUs; None or empty if they are not known."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchperfd.model import own_commands
from torchperfd.model.formatting import one_line
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon.collectors.nvml_errors import DriverProblem
from torchperfd_daemon.collectors.procfs import parse_stat, parse_table, read

INTERVAL_S: Final = 0.5
_MAX_CONSUMERS: Final = 5
_MIN_CORES: Final = 0.1
_COUNTED: Final = 8
"""Columns of ``/proc/stat``'s CPU line that are no part of another: user to steal."""
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_MAX_NAME: Final = 40
_BEGINNING: Final = Path(own_commands.__file__).name


@dataclass(frozen=True, slots=True)
class Consumer:
    """A process that uses CPU time.

    Attributes:
        name: What it runs, for people: its program, and its script where that is an interpreter.
        cores: CPU seconds per second.
        parent: Number of its parent process.
    """

    pid: int
    name: str
    cores: float
    parent: int = 0


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPUs of a node over a moment.

    Attributes:
        busy: Share of their time in use, 0 to 1, steal included.
        stolen: Share of their time that the hypervisor gave to others, 0 to 1.
        runnable: Threads that run or want to.
        pressure: Share of the last ten seconds, 0 to 1, in which some task waited for a CPU; None where the
            kernel does not report it.
        consumers: The processes that use most, the greatest first.
    """

    cpus: int
    busy: float
    stolen: float
    runnable: int
    pressure: float | None
    consumers: tuple[Consumer, ...]


def read_cpu(
    proc: Path = Path("/proc"), sleep: Callable[[float], None] = time.sleep, interval: float = INTERVAL_S
) -> CpuFacts | None:
    """Return how busy the CPUs are over an interval of seconds; None where the kernel does not report it.

    Args:
        interval: Seconds.
    """
    try:
        before, cpus, runnable = _read_stat(proc)
        used = _used(proc)
        sleep(interval)
        after, _, later = _read_stat(proc)
    except (OSError, ValueError):
        return None
    spent = [max(0, now - then) for now, then in zip(after, before, strict=True)]
    total = sum(spent)
    if not total:
        return None
    consumers = [
        Consumer(pid, _name(proc, pid), (seconds - used[pid][0]) / interval, parent)
        for pid, (seconds, parent) in _used(proc).items()
        if pid in used and seconds - used[pid][0] >= _MIN_CORES * interval
    ]
    consumers.sort(key=lambda each: -each.cores)
    return CpuFacts(
        cpus=cpus,
        busy=1 - (spent[_IDLE] + spent[_IOWAIT]) / total,
        stolen=spent[_STEAL] / total,
        runnable=max(runnable, later),
        pressure=_pressure(proc),
        consumers=tuple(consumers[:_MAX_CONSUMERS]),
    )


def _read_stat(proc: Path) -> tuple[list[int], int, int]:
    """Return the CPUs' ticks by kind, how many CPUs there are, and how many threads want to run."""
    text = read(proc / "stat")
    lines = text.splitlines()
    columns = lines[0].split() if lines else []
    if columns[:1] != ["cpu"] or len(columns) <= _COUNTED:
        raise ValueError("/proc/stat has no line of all CPUs")
    cpus = sum(line.startswith("cpu") for line in lines[1:])
    runnable = parse_table(text, " ").get("procs_running", "0")
    # One of them is this command.
    return [int(ticks) for ticks in columns[1 : _COUNTED + 1]], max(1, cpus), max(0, int(runnable) - 1)


def _used(proc: Path) -> dict[int, tuple[float, int]]:
    """Return the CPU seconds that each process has used itself, and its parent."""
    used = {}
    own = os.getpid()
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            text = read(entry / "stat")
            parent = parse_stat(text).parent
            user, system = text.rpartition(")")[2].split()[11:13]
            if int(entry.name) != own:
                used[int(entry.name)] = ((int(user) + int(system)) / _TICKS_PER_SECOND, parent)
    return used


def _name(proc: Path, pid: int) -> str:
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = [word for word in read(proc / str(pid) / "cmdline").split("\0") if word]
    if not words:
        with contextlib.suppress(OSError, ValueError):
            text = read(proc / str(pid) / "stat")
            words = [text[text.index("(") + 1 : text.rindex(")")]]
    names = [Path(word).name for word in words[1:] if not word.startswith("-")]
    # `torchperfd run` and the processes of `tune` and `bench` begin in this file.
    script = next((name for name in names if name != _BEGINNING), "")
    name = " ".join(filter(None, (Path(words[0]).name if words else "?", script)))
    return one_line(name, _MAX_NAME)


def _pressure(proc: Path) -> float | None:
    """Return the share of the last ten seconds in which some task waited for a CPU."""
    try:
        fields = read(proc / "pressure" / "cpu").splitlines()[0].split()
        return float(dict(field.split("=") for field in fields[1:])["avg10"]) / 100
    except (OSError, ValueError, LookupError):
        return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        pci_bus_id: As in ``0000:3b:00.0``.
        pcie_generation: Of the link as it is now; it falls while the GPU idles.
        pcie_width: Lanes of the link as it is now.
        throttled_by: Reasons that hold its clocks down now, of those that mean a fault.
        numa_node: Where it is plugged in.
        pids: Processes that compute on it.
    """

    index: int
    name: str
    pci_bus_id: str
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    throttled_by: tuple[str, ...] = ()
    persistence_mode: bool | None = None
    is_idle: bool = True
    numa_node: int | None = None
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ReportedFacts:
    """What the client of a training process reports of it; None if it does not.

    Attributes:
        loader: How it uses its loader.
        threads: How many threads an operation on the CPU may use.
    """

    loader: LoaderFacts | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One training process.

    Attributes:
        allowed: CPUs its affinity lets it run on.
        cgroup_cpus: CPUs its control group lets it run on.
        cpu_cores: CPU seconds per second that its control group has a quota for.
        workers: DataLoader workers it has now.
        threads: How many threads an operation on the CPU may use: as its client reports, else OMP_NUM_THREADS
            of its environment; None if unknown.
        loader: How it uses its loader; None if its client does not report it.
        shm_bytes: Size of its ``/dev/shm``.
    """

    run: str
    rank: int
    pid: int
    allowed: frozenset[int] = frozenset()
    cgroup_cpus: frozenset[int] | None = None
    cpu_cores: float | None = None
    workers: int = 0
    threads: int | None = None
    loader: LoaderFacts | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """A node.

    Attributes:
        gpus: None when there is no driver, or it cannot be used.
        driver_problem: Why the driver cannot be used; None if it can, or if there is none.
        unreachable_gpus: Indices of GPUs that do not answer.
        driver_cuda: Newest CUDA that the driver runs, (major, minor).
        torch_cuda: CUDA that the installed torch was built for; None for a build without.
        torch_version: Of the installed torch; empty when there is none.
        ranks: None when no daemon answers.
        numa_cpus: CPUs by NUMA node.
        shm_bytes: Size of ``/dev/shm``.
        clock_synchronised: Whether the kernel reports that its clock is synchronised.
        clock_error_seconds: The most by which the kernel takes its clock to be wrong.
        cpu: How hard the CPUs are pressed right now; None where the kernel does not report it.
        missing_native: Modules of the client that were not compiled when the package was built.
        skipped: The checks that could not be made, by name, with the reason.
    """

    gpus: tuple[Gpu, ...] | None = None
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: tuple[int, int] | None = None
    torch_version: str = ""
    ranks: tuple[RankFacts, ...] | None = None
    numa_cpus: Mapping[int, frozenset[int]] = field(default_factory=dict)
    shm_bytes: int | None = None
    clock_synchronised: bool | None = None
    clock_error_seconds: float | None = None
    cpu: CpuFacts | None = None
    missing_native: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    driver_problem: DriverProblem | None = None
    unreachable_gpus: tuple[int, ...] = ()
