"""Reading the facts: from the kernel, the driver, and the installed torch; nothing is changed."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torchperfd._version import missing_native_modules
from torchperfd_daemon.collectors.cgroup import read_limits
from torchperfd_daemon.collectors.process import RankProcess, is_here
from torchperfd_daemon.collectors.procfs import parse_cpu_list, parse_stat, parse_table, read
from torchperfd_daemon.doctor.clock import read_clock
from torchperfd_daemon.doctor.cpu import read_cpu
from torchperfd_daemon.doctor.facts import Facts, RankFacts, ReportedFacts
from torchperfd_daemon.doctor.gpus import BrokenDriverError, NoDriverError, read_gpus

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
