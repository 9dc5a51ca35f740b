"""Limits of each rank's control groups, and the time in which they throttled it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from torchperfd_daemon.collectors.base import Family, NothingToCollectError
from torchperfd_daemon.collectors.process import RankFiles, Ranks
from torchperfd_daemon.collectors.procfs import parse_cpu_list, parse_table, read

_RANK: Final = ("run", "rank")
# Version 1 has no word for "no limit": it writes the largest number of whole pages.
_NO_LIMIT: Final = 1 << 60

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The tightest limits that bind a process; None where nothing does.

    Attributes:
        cpu_cores: CPU seconds per second.
        memory_bytes: Memory that the group may use.
        cpus: CPUs that the group may run on.
        throttled_seconds: Time throttled for using up ``cpu_cores``, since the group was created.
    """

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    cpus: frozenset[int] | None = None
    throttled_seconds: float | None = None


class CgroupCollector:
    """Samples the control groups of every rank that runs in our pid namespace, of version 2 or 1.

    Args:
        root: Where the cgroup2 file system is mounted, or those of version 1 below.
    """

    name = "cgroup"

    def __init__(
        self,
        ranks: Ranks,
        proc: Path = Path("/proc"),
        root: Path = Path("/sys/fs/cgroup"),
        files: RankFiles | None = None,
    ) -> None:
        self._ranks = ranks
        self._proc = proc
        self._root = root
        self._files = files or RankFiles(proc)

    def sample(self) -> Sequence[Family]:
        """Return limits and throttling of all ranks; a limit that is not set is absent.

        Raises:
            NothingToCollectError: The node has no cgroups.
            OSError: procfs cannot be read.
            ValueError: A file is damaged.
        """
        if not (self._root / "cgroup.controllers").exists() and not _is_split(self._root):
            raise NothingToCollectError(
                f"no control groups are mounted at {self._root}; mount them to have limits and throttling"
            )
        throttled = Family(
            "process_throttled_seconds",
            "Time that the rank's control group was held back for using up its CPU quota.",
            "counter",
            _RANK,
        )
        cores = Family("process_cpu_limit_cores", "CPUs' worth of time the rank may use.", "gauge", _RANK)
        memory = Family("process_memory_limit_bytes", "Memory the rank may use.", "gauge", _RANK)
        ranks = list(self._ranks())
        self._files.keep(ranks)
        # Ranks of a job are mostly in one group.
        known: dict[str, Limits] = {}
        for rank in ranks:
            if not self._files.status(rank):
                continue
            membership = _membership(self._proc, rank.pid)
            if membership not in known:
                known[membership] = _limits_of(membership, self._root)
            limits = known[membership]
            if not self._files.status(rank):
                continue
            for family, value in (
                (throttled, limits.throttled_seconds),
                (cores, limits.cpu_cores),
                (memory, limits.memory_bytes),
            ):
                if value is not None:
                    family.add(value, *rank.labels)
        return [throttled, cores, memory]


def read_limits(pid: int, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Return the limits of a process: of its own group, and of all groups around it.

    Raises:
        ValueError: A file is damaged.
    """
    return _limits_of(_membership(proc, pid), root)


def _membership(proc: Path, pid: int) -> str:
    """Return the text of a process's ``cgroup``; empty if it has ended, or may not be read."""
    try:
        return read(f"{proc}/{pid}/cgroup")
    except OSError:
        return ""


def _limits_of(membership: str, root: Path) -> Limits:
    return _limits_v1(root, membership) if _is_split(root) else _limits(root, membership)


def _is_split(root: Path) -> bool:
    """Return whether each controller has a tree of its own, as in version 1."""
    return not (root / "cgroup.controllers").exists() and (root / "cpu").exists()


def _limits(root: Path, membership: str) -> Limits:
    path = parse_membership(membership)
    if path is None:
        return Limits()
    groups = list(_groups(root, path))
    # Groups around each other are throttled at the same time: the longest is the one that counts.
    return Limits(
        cpu_cores=min(_values(groups, "cpu.max", parse_cpu_max), default=None),
        memory_bytes=min(_values(groups, "memory.max", parse_memory_max), default=None),
        cpus=next(_values(groups, "cpuset.cpus.effective", parse_cpu_list), None),
        throttled_seconds=max(_values(groups, "cpu.stat", parse_throttled), default=None),
    )


def _limits_v1(root: Path, membership: str) -> Limits:
    """Return the limits in groups of version 1: a tree for each controller."""

    def groups(controller: str) -> list[str]:
        path = parse_membership(membership, controller)
        return [] if path is None else list(_groups(root / controller, path))

    processors = groups("cpu")
    return Limits(
        cpu_cores=min(filter(None, map(_cores_v1, processors)), default=None),
        memory_bytes=min(
            _values(groups("memory"), "memory.limit_in_bytes", parse_memory_limit), default=None
        ),
        cpus=next(_values(groups("cpuset"), "cpuset.effective_cpus", parse_cpu_list), None),
        throttled_seconds=max(_values(processors, "cpu.stat", parse_throttled), default=None),
    )


def _cores_v1(group: str) -> float | None:
    try:
        return parse_cfs_quota(read(f"{group}/cpu.cfs_quota_us"), read(f"{group}/cpu.cfs_period_us"))
    except OSError:
        return None


def parse_membership(text: str, controller: str = "") -> str | None:
    """Return the path of a process's group below the mount, from ``/proc/<pid>/cgroup``.

    None when it is in no such group, or in one outside what we can see.

    Args:
        controller: Whose tree of version 1; empty for the one of version 2.
    """
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and path.startswith("/"):
            return None if ".." in path.split("/") else path.lstrip("/")
    return None


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Return CPU seconds per second of ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``; None for no limit.

    Raises:
        ValueError: They are damaged.
    """
    if int(quota) < 0:
        return None
    if not int(period) > 0:
        raise ValueError(f"{period!r} is no period of a CPU limit")
    return int(quota) / int(period)


def parse_memory_limit(text: str) -> int | None:
    """Return the bytes of ``memory.limit_in_bytes``; None for no limit.

    Raises:
        ValueError: It is damaged.
    """
    return int(text) if int(text) < _NO_LIMIT else None


def parse_cpu_max(text: str) -> float | None:
    """Return CPU seconds per second of ``cpu.max``; None for no limit.

    Raises:
        ValueError: It is damaged.
    """
    quota, _, period = text.strip().partition(" ")
    if quota == "max":
        return None
    if not int(period or 100_000) > 0:
        raise ValueError(f"{text!r} is no CPU limit")
    return int(quota) / int(period or 100_000)


def parse_memory_max(text: str) -> int | None:
    """Return the bytes of ``memory.max``; None for no limit.

    Raises:
        ValueError: It is damaged.
    """
    return None if text.strip() == "max" else int(text)


def parse_throttled(text: str) -> float | None:
    """Return the seconds throttled of ``cpu.stat``, of version 2 or 1; None without such a controller.

    Raises:
        ValueError: It is damaged.
    """
    table = parse_table(text, " ")
    for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        if name in table:
            return int(table[name]) / unit
    return None


def _groups(root: Path, path: str) -> Iterator[str]:
    """Yield a group's directory, and those around it up to the mount."""
    # As texts: these files are read every second, and pathlib is slow.
    while path:
        yield f"{root}/{path}"
        path = path.rpartition("/")[0]
    yield str(root)


def _values(groups: list[str], name: str, parse: Callable[[str], T | None]) -> Iterator[T]:
    for group in groups:
        try:
            text = read(f"{group}/{name}")
        except OSError:
            # The root group has no limits, and a controller may be off.
            continue
        value = parse(text)
        if value is not None:
            yield value
