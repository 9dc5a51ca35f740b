"""Facts of a training process besides its steps.

Its place in each parallel dimension and its CPUs, which hooks are on, and the settings that
decide how fast it can be.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd.model.messages import Name, Reason, Sentence


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place in one dimension.

    Attributes:
        dimension: Its name, as a ``DeviceMesh`` or another maker of process groups has it, such as ``tp``.
        rank: The place, from 0 on.
    """

    dimension: Name
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A rank's progress in one process group, by torch's flight recorder; collectives are counted from 1.

    Attributes:
        name: The name of the group, equal on all its ranks.
        description: Such as ``default_pg``; may be empty.
        begun: The number of the newest collective that the rank has entered.
        number: The number of the earliest collective that has not ended; 0 if all have.
        call: The function of that collective, such as ``all_reduce``.
        sizes: The sizes of its inputs, such as ``4x4, 10``.
    """

    name: Sentence
    description: Sentence
    begun: int
    number: int
    call: Sentence
    sizes: Sentence


@dataclass(frozen=True, slots=True)
class HookState:
    """Whether a hook is on.

    Attributes:
        reason: Why it is off, in one line; empty while it is on.
    """

    name: Name
    reason: Reason = ""

    @property
    def is_on(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'on'}"


ANOMALY_DETECTION: Final = "torch.autograd.set_detect_anomaly(True)"
DETERMINISTIC: Final = "torch.use_deterministic_algorithms(True)"
PYTHON_PROFILER: Final = "a Python profiler (sys.setprofile)"
PYTHON_TRACER: Final = "a Python debugger or coverage (sys.settrace)"
TORCH_PROFILER: Final = "torch.profiler.profile"
_MAX_READINGS: Final = 3
_DEBUG_ALLOCATORS: Final = frozenset({"debug", "malloc_debug", "pymalloc_debug", "mimalloc_debug"})


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """The CPUs that a process is bound to, if these are fewer than its share of the node's.

    Attributes:
        allowed: How many its affinity allows; 0 if it is not bound.
        share: How many its share is: those of its control group, divided by the ranks on the node.
    """

    allowed: int = 0
    share: int = 0


UNBOUND: Final = CpuBinding()


class ProcessSettings:
    """Reads the settings on the training thread: torch keeps the number of threads by thread.

    Attributes:
        threads: How many threads an operation on the CPU may use, at the newest reading; None before one.
        switched_on: The switches of torch and of the interpreter that were on at the newest reading.
        binding: To how many CPUs the training thread is bound. An import may bind that thread and the workers
            that it starts, and none of the other threads.
    """

    def __init__(self) -> None:
        self.threads: int | None = None
        self.switched_on: tuple[str, ...] = ()
        self.binding: CpuBinding | None = None
        self._count_threads: Callable[[], int] | None = None
        self._checks: Mapping[str, Callable[[], bool]] = {}
        self._readings = 0

    def install(self, count_threads: Callable[[], int], checks: Mapping[str, Callable[[], bool]]) -> None:
        """Take the functions of torch that are read, once it is imported.

        Args:
            checks: By the name of each switch of torch, whether it is on.
        """
        self._count_threads, self._checks = count_threads, checks

    def read(self) -> None:
        """Read the settings; called on the training thread."""
        if self._count_threads is not None:
            self.threads = self._count_threads()
        if self.binding is None:
            self.binding = cpu_binding()
        # Both are of the calling thread.
        of_python = {PYTHON_PROFILER: sys.getprofile() is not None, PYTHON_TRACER: sys.gettrace() is not None}
        is_on = {**{name: check() for name, check in self._checks.items()}, **of_python}
        self.switched_on = tuple(name for name, on in is_on.items() if on)

    def read_at_step(self) -> None:
        """Read the settings at one of the first steps of an optimizer; without a loader nothing else does."""
        if self._readings < _MAX_READINGS:
            self._readings += 1
            self.read()

    @property
    def switches(self) -> tuple[str, ...]:
        """The debugging switches that are on, as they are written."""
        return self.switched_on + debug_variables(os.environ, dev_mode=sys.flags.dev_mode)


def debug_variables(environ: Mapping[str, str], *, dev_mode: bool) -> tuple[str, ...]:
    """Return the environment's debugging switches, as a shell writes them.

    Args:
        dev_mode: Whether Python runs in its development mode, which checks memory.
    """
    is_on: dict[str, Callable[[str], bool]] = {
        "CUDA_LAUNCH_BLOCKING": lambda value: value != "0",
        "TORCH_DISTRIBUTED_DEBUG": lambda value: value.upper() == "DETAIL",
        "PYTHONMALLOC": lambda value: value in _DEBUG_ALLOCATORS,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": lambda value: value != "0",
    }
    found = [
        f"{name}={environ[name]}"
        for name, check in is_on.items()
        if environ.get(name) and environ[name].isprintable() and check(environ[name])
    ]
    return (*found, *(("python -X dev",) if dev_mode else ()))


def cpu_binding(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup"), ranks: int | None = None
) -> CpuBinding:
    """Return to how many CPUs this thread is bound, compared with its process's share of the node's.

    Args:
        proc: Where the control groups of the process are listed.
        root: Where these are mounted.
        ranks: How many ranks share the node; the launcher's by default.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return UNBOUND
    if ranks is None:
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(text) if text.isdecimal() else 1
    granted = _cpuset_size(proc, root) or os.cpu_count() or 1
    share = granted // max(1, ranks)
    return CpuBinding(allowed, share) if allowed < share else UNBOUND


def _cpuset_size(proc: Path, root: Path) -> int:
    """Return how many CPUs the control group of this process has; 0 if unknown."""
    for controllers, path in _control_groups(proc):
        top, name = root, "cpuset.cpus.effective"
        if "cpuset" in controllers:
            top, name = root / "cpuset", "cpuset.effective_cpus"
        elif controllers:
            continue
        for folder in (top / path, top):
            try:
                return _count_cpus((folder / name).read_text())
            except (OSError, ValueError):
                continue
    return 0


def _control_groups(proc: Path) -> list[tuple[list[str], str]]:
    """Return the controllers of each hierarchy, none for the unified one, and this process's group in it."""
    try:
        groups = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return []
    return [(each[1].split(",") if each[1] else [], each[2].lstrip("/")) for each in groups if len(each) == 3]


def _count_cpus(text: str) -> int:
    """Return how many CPUs a list such as ``0-3,8`` has.

    Raises:
        ValueError: It is no such list.
    """
    total = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


_SCHEDSTAT: Final = "/proc/thread-self/schedstat"


def available_cpus(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> float:
    """Return how many CPUs this process may use: by affinity, by quota, and beside the node's other ranks."""
    try:
        bound = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        bound = os.cpu_count() or 1
    quota = _quota(root, proc)
    cpus = float(bound) if quota is None else min(float(bound), quota)
    # Ranks that are each bound to CPUs of their own share none.
    if cpus < bound or bound == os.cpu_count():
        with contextlib.suppress(ValueError):
            cpus /= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return cpus


def _quota(root: Path, proc: Path) -> float | None:
    """Return the least quota of this process's control group and of those around it; None without one."""
    found = []
    for controllers, path in _control_groups(proc):
        if controllers and "cpu" not in controllers:
            continue
        top = root / "cpu" if controllers else root
        group = top / path
        for folder in (group, *group.parents):
            found.append(_quota_of(folder))
            if folder == top:
                break
    return min((each for each in found if each), default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(most) / int(period) if int(most) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None  # "max" is no number


def thread_queued_ns() -> int:
    """Return how long this thread has been ready to run without a CPU; 0 where it is not counted."""
    try:
        with open(_SCHEDSTAT, "rb") as file:  # noqa: PTH123 - on the training thread, and pathlib is slow
            fields = file.read(128).split()
    except OSError as error:
        if error.filename != _SCHEDSTAT:
            raise  # a signal handler's, such as a timeout
        return 0
    return int(fields[1]) if len(fields) > 1 else 0
