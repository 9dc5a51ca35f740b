"""The facts that the doctor judges; None, or empty, if they could not be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchperfd.model.loader_workers import LoaderFacts
from torchperfd_daemon.collectors.nvml_errors import DriverProblem
from torchperfd_daemon.doctor.cpu import CpuFacts


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
