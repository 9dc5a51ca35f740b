"""The checks: each a pure function from facts to findings."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.model.card import SCRIPT
from torchperfd_daemon.diagnosis.remedies import OWN_SHARE, computing_threads
from torchperfd_daemon.doctor.facts import Consumer, CpuFacts, Facts, Gpu, RankFacts
from torchperfd_daemon.loader_workers import most_computing_workers

_MIN_SHM_BYTES: Final = 1 << 30
_MAX_CLOCK_ERROR_S: Final = 0.1
_MAX_STOLEN: Final = 0.05
_ALL_BUSY: Final = 0.9
_MAX_PRESSURE: Final = 0.2
# Workers that wait for a CPU for a smaller share of their time than this have CPUs enough.
_MIN_QUEUED: Final = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check.

    Attributes:
        subject: What it is about: ``GPU 3``, ``rank 0 of bert-17``, ``node``.
        fix: The command or setting that corrects it.
    """

    check: str
    subject: str
    problem: str
    why: str
    fix: str


Check = Callable[[Facts], Iterator[Finding]]


def examine(facts: Facts) -> list[Finding]:
    """Return all that is wrong, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]


def check_driver(facts: Facts) -> Iterator[Finding]:
    """A driver that is installed and cannot be used, and GPUs that do not answer."""
    found = facts.driver_problem
    why = "jobs lose their GPUs: they fail, or train on the CPU"
    if found is not None:
        yield Finding("driver", "node", found.problem, why, found.fix)
    for index in facts.unreachable_gpus:
        yield Finding(
            "driver",
            f"GPU {index}",
            "it does not answer",
            why,
            "`sudo dmesg | grep -i xid` shows why; reset it with `sudo nvidia-smi --gpu-reset -i"
            f" {index}`, or reboot",
        )


def check_pcie(facts: Facts) -> Iterator[Finding]:
    """A link narrower or slower than card and slot allow."""
    for gpu in facts.gpus or ():
        lspci = f"`sudo lspci -vv -s {gpu.pci_bus_id} | grep -i lnksta`"
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            yield Finding(
                "pcie",
                _name(gpu),
                f"its PCIe link has {gpu.pcie_width} lanes of {gpu.pcie_width_max}",
                "batches take longer to reach the GPU, in the same proportion",
                f"reseat the card or its riser, then look at {lspci}",
            )
        # An idle GPU slows its link down to save power; that is intended.
        if (
            not gpu.is_idle
            and gpu.pcie_generation
            and gpu.pcie_generation_max
            and gpu.pcie_generation < gpu.pcie_generation_max
        ):
            yield Finding(
                "pcie",
                _name(gpu),
                f"its PCIe link runs at generation {gpu.pcie_generation} of {gpu.pcie_generation_max}",
                "each generation less halves the bandwidth to the GPU",
                f"set the slot's link speed to Auto in the firmware, then look at {lspci}",
            )


def check_throttling(facts: Facts) -> Iterator[Finding]:
    """Clocks held down by heat or by a power supply, not by the ordinary power cap."""
    for gpu in facts.gpus or ():
        if gpu.throttled_by:
            yield Finding(
                "throttling",
                _name(gpu),
                f"its clocks are held down by {' and '.join(gpu.throttled_by)}",
                "every kernel runs slower, and in synchronous training all ranks wait for this one",
                "mend cooling or power; watch it with"
                f" `nvidia-smi -q -i {gpu.index} -d PERFORMANCE,TEMPERATURE`",
            )


def check_persistence(facts: Facts) -> Iterator[Finding]:
    """A driver that unloads itself when no process uses the GPU."""
    off = [gpu for gpu in facts.gpus or () if gpu.persistence_mode is False]
    if off:
        yield Finding(
            "persistence",
            ", ".join(map(_name, off)),
            "persistence mode is off",
            "the driver sets the GPU up anew for each job that finds it unused, which takes seconds",
            "`sudo nvidia-smi -pm 1`, or `sudo systemctl enable --now nvidia-persistenced` to keep it so",
        )


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """A ``/dev/shm`` of a container's default size."""
    fix = (
        "`docker run --shm-size=16g …`, in Kubernetes an emptyDir of medium Memory on /dev/shm, on a host"
        " `sudo mount -o remount,size=16G /dev/shm`"
    )
    why = "DataLoader workers hand batches over in it, and die of a bus error when it is full"
    sizes = [(_rank(rank), rank.shm_bytes) for rank in facts.ranks or ()]
    # The node's own matters where no rank's can be seen.
    for subject, size in [one for one in sizes if one[1] is not None] or [("node", facts.shm_bytes)]:
        if size is not None and size < _MIN_SHM_BYTES:
            yield Finding("shared-memory", subject, f"/dev/shm holds {size / 2**20:.0f} MiB", why, fix)


def check_affinity(facts: Facts) -> Iterator[Finding]:
    """Affinity that fits neither the control group nor the GPU."""
    ranks = facts.ranks or ()
    for rank in ranks:
        if rank.cpu_cores is not None and rank.allowed and rank.cpu_cores < len(rank.allowed):
            quota, threads = max(1, int(rank.cpu_cores)), _threads(rank)
            if threads is None or threads > quota:
                now = "" if threads is None else f" (now {rank.threads or threads})"
                unless = ", unless the script sets its threads" if threads is None else ""
                yield Finding(
                    "affinity",
                    _rank(rank),
                    f"it may run on {len(rank.allowed)} CPUs, and its control group has a quota of"
                    f" {rank.cpu_cores:g}",
                    "libraries start a thread per CPU they see, use the quota up and then all stand still",
                    f"`export OMP_NUM_THREADS={quota}`{now} before it starts{unless}, or give the container"
                    " whole CPUs",
                )
        granted = rank.cgroup_cpus or frozenset()
        share = len(granted) // sum(other.cgroup_cpus == rank.cgroup_cpus for other in ranks)
        # A rank with a whole NUMA node was put there on purpose.
        on_node = any(cpus & granted and cpus & granted <= rank.allowed for cpus in facts.numa_cpus.values())
        if rank.allowed and len(rank.allowed) < share and not on_node:
            yield Finding(
                "affinity",
                _rank(rank),
                f"it may run on {len(rank.allowed)} CPUs, and its share of the control group's is {share}",
                "its workers inherit that and crowd each other, while other CPUs idle",
                f"`taskset -acp {format_cpu_list(granted)} {rank.pid}`",
            )
        yield from _far_from_gpu(rank, facts)


def _far_from_gpu(rank: RankFacts, facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus or ():
        near = facts.numa_cpus.get(gpu.numa_node) if gpu.numa_node is not None else None
        if rank.pid in gpu.pids and near and rank.allowed and not near & rank.allowed:
            yield Finding(
                "affinity",
                _rank(rank),
                f"it runs on no CPU of NUMA node {gpu.numa_node}, where its {_name(gpu)} is",
                "each batch and each kernel launch crosses the link between the sockets",
                f"`taskset -acp {format_cpu_list(near)} {rank.pid}`",
            )


def check_workers(facts: Facts) -> Iterator[Finding]:
    """More DataLoader workers than CPUs to run them."""
    sharing: dict[frozenset[int], list[RankFacts]] = defaultdict(list)
    for rank in facts.ranks or ():
        if rank.allowed and rank.workers:
            sharing[rank.allowed].append(rank)
    for allowed, ranks in sharing.items():
        cpus = min([float(len(allowed)), *(rank.cpu_cores for rank in ranks if rank.cpu_cores is not None)])
        workers = sum(rank.workers for rank in ranks)
        processes = workers + len(ranks)
        if processes <= cpus or not any(map(_may_compute, ranks)):
            continue
        queued = [rank.loader.worker_queued for rank in ranks if rank.loader and rank.loader.worker_queued]
        seen = f"; the workers stand in line for a CPU {max(queued):.0%} of the time" if queued else ""
        fitting = most_computing_workers(cpus / len(ranks))
        yield Finding(
            "workers",
            ", ".join(map(_rank, ranks)),
            f"{processes} processes share {cpus:g} CPUs, {workers} of them loader workers{seen}",
            "they take turns: the training thread waits for a CPU while workers have it",
            # Fewer workers that compute all the time make fewer batches, where they are what is short.
            "more CPUs, or items that take less CPU time"
            if queued
            else f"`DataLoader(num_workers={fitting})` in each rank, or more CPUs",
        )


def _may_compute(rank: RankFacts) -> bool:
    """Return whether a rank's workers may need CPUs of their own: not where they are known to wait."""
    queued = None if rank.loader is None else rank.loader.worker_queued
    return queued is None or queued >= _MIN_QUEUED


def check_cuda(facts: Facts) -> Iterator[Finding]:
    """A torch that the driver is too old for, or that cannot use a GPU at all."""
    if facts.gpus is None:
        return
    why = "CUDA does not start, and training runs on the CPU or fails"
    if facts.torch_version and facts.torch_cuda is None:
        yield Finding(
            "cuda",
            "node",
            f"torch {facts.torch_version} is a build without CUDA, on a node with {len(facts.gpus)} GPUs",
            "training runs on the CPU",
            "`pip install --force-reinstall torch`, which is a build with CUDA",
        )
    # Within a major version an older driver runs what was built for a newer minor one.
    if facts.torch_cuda and facts.driver_cuda and facts.torch_cuda[0] > facts.driver_cuda[0]:
        driver, torch = (".".join(map(str, version)) for version in (facts.driver_cuda, facts.torch_cuda))
        yield Finding(
            "cuda",
            "node",
            f"torch {facts.torch_version} is built for CUDA {torch}, the driver runs {driver} at most",
            why,
            f"update the driver, or install a torch for CUDA {facts.driver_cuda[0]}",
        )


def check_cpu_pressure(facts: Facts) -> Iterator[Finding]:
    """CPUs that more threads want than there are, or that a hypervisor gives to others."""
    cpu = facts.cpu
    if cpu is None:
        return
    if cpu.stolen >= _MAX_STOLEN:
        yield Finding(
            "cpu-steal",
            "node",
            f"the hypervisor gives {cpu.stolen:.0%} of its CPUs' time to other machines",
            "programs wait for a CPU although none looks busy from in here",
            "ask for CPUs of its own (a dedicated or larger machine type), or move the job",
        )
    waiting = cpu.pressure >= _MAX_PRESSURE if cpu.pressure is not None else cpu.runnable > cpu.cpus
    if cpu.busy < _ALL_BUSY or not waiting:
        return
    ranks = {rank.pid: _rank(rank) for rank in facts.ranks or ()}
    names, strangers = [], list[Consumer]()
    for each in cpu.consumers:
        name = ranks.get(each.pid, each.name)
        if each.parent in ranks:
            name = f"a child of {ranks[each.parent]}"
        elif each.pid not in ranks:
            strangers.append(each)
        names.append(f"{name} (pid {each.pid}) {each.cores:.1f}")
    yield Finding(
        "cpu-pressure",
        "node",
        f"its {cpu.cpus} CPUs are {cpu.busy:.0%} busy, and {cpu.runnable} threads want to run; CPUs in use by"
        f" {', '.join(names) or 'many small processes'}",
        "the training thread waits for a CPU while others have it"
        if ranks
        else "programs wait for a CPU, and so will a training that starts now",
        "; or ".join(_less_pressure(facts, cpu, strangers)),
    )


def _less_pressure(facts: Facts, cpu: CpuFacts, strangers: Sequence[Consumer]) -> Iterator[str]:
    """Yield what takes load off the CPUs.

    Args:
        strangers: The processes that use most and belong to no rank.
    """
    if strangers:
        yield f"see with `top -p {','.join(str(each.pid) for each in strangers)}` what can move elsewhere"
    ranks = facts.ranks or ()
    setting = _fewer_threads(ranks, cpu.cpus, sum(each.cores for each in strangers))
    if setting:
        yield setting
    on_gpu = frozenset(pid for gpu in facts.gpus or () for pid in gpu.pids)
    if any(rank.pid not in on_gpu and _threads(rank) != 1 for rank in ranks):
        yield (
            f"fewer threads, which may be faster beside other load: `torchperfd tune --only threads {SCRIPT}`"
            " measures that"
        )
    if any(rank.workers for rank in ranks):
        yield "fewer loader workers that compute"
    yield "more CPUs"


def _fewer_threads(ranks: Sequence[RankFacts], cpus: int, strangers: float) -> str:
    """Return the setting of threads for ranks that have more than CPUs together; empty where none is sure.

    Args:
        strangers: CPUs in use by processes that belong to no rank.
    """
    allowed = frozenset[int]().union(*(rank.allowed for rank in ranks))
    available = min(cpus, len(allowed) or cpus)
    threads = {rank: _threads(rank) or 1 for rank in ranks}
    if sum(threads.values()) <= available:
        return ""
    fitting = max(1, available // len(ranks))
    crowded = {rank: count for rank, count in threads.items() if count > fitting}
    if not crowded or (fitting > 1 and strangers > (1 - OWN_SHARE) * available):
        return ""
    which = "each rank" if len(crowded) == len(ranks) else ", ".join(map(_rank, crowded))
    counts = {rank.threads or count for rank, count in crowded.items()}
    now = f"{max(counts)}" + ("" if len(counts) == 1 else " at most")
    return f"`export OMP_NUM_THREADS={fitting}` (now {now}) before {which} starts"


def _threads(rank: RankFacts) -> int | None:
    """Return how many threads of a rank compute, None if unknown: no more than set, and than seen running."""
    computing = computing_threads(rank.loader, rank.threads)
    return None if computing is None else max(1, round(computing))


def check_clock(facts: Facts) -> Iterator[Finding]:
    """A clock that drifts from those of other nodes."""
    why = "steps and traces of several nodes cannot be laid side by side"
    fix = "`sudo timedatectl set-ntp true`, or `sudo systemctl enable --now chronyd`"
    if facts.clock_synchronised is False:
        yield Finding("clock", "node", "nothing keeps the clock right", why, fix)
    elif facts.clock_error_seconds is not None and facts.clock_error_seconds > _MAX_CLOCK_ERROR_S:
        yield Finding(
            "clock",
            "node",
            f"the clock may be wrong by {facts.clock_error_seconds:.2g} s",
            why,
            "`chronyc tracking` or `timedatectl timesync-status` names the server to replace",
        )


def check_native_hooks(facts: Facts) -> Iterator[Finding]:
    """Hooks that run in Python, since their C modules are missing or left from another version."""
    if facts.missing_native:
        yield Finding(
            "native-hooks",
            "torchperfd",
            "its hooks are not compiled from this version, so they run in Python",
            "they cost each training step about ten times as much",
            "install a C compiler (`sudo apt-get install gcc libc6-dev`), then install again from the"
            " checkout: `pip install --force-reinstall --no-deps .`, or `pip install -e .` if it was so",
        )


CHECKS: Final[tuple[Check, ...]] = (
    check_driver,
    check_pcie,
    check_throttling,
    check_persistence,
    check_cuda,
    check_shared_memory,
    check_affinity,
    check_workers,
    check_cpu_pressure,
    check_clock,
    check_native_hooks,
)


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def _rank(rank: RankFacts) -> str:
    return f"rank {rank.rank} of {rank.run}"


def format_cpu_list(cpus: frozenset[int]) -> str:
    """Return CPUs as ``taskset`` takes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
