"""CPUs: how many this process may use, and how long its thread waits for one."""

import contextlib
import os
from pathlib import Path
from typing import Final

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
    try:
        groups = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in (each for each in groups if len(each) == 3):
        if not controllers:
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        group = top / path.lstrip("/")
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
