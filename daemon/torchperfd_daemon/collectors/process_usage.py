"""What training processes use of CPU, memory and I/O."""

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import Family, Kind
from torchperfd_daemon.collectors.process import RankFiles, RankProcess, Ranks, has_users
from torchperfd_daemon.collectors.procfs import ProcessStat, parse_cpu_list, parse_lines, parse_stat, read

_RANK_LABELS: Final = ("run", "rank")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_DIRECTIONS: Final = {"read": "read_bytes", "write": "write_bytes"}
# Gloo's and NCCL's threads, by the names that they and torch give them.
_EXCHANGES: Final = re.compile("gloo|nccl", re.IGNORECASE)
_LIST_PROCESSES_EVERY: Final = 5  # samples: a node has thousands of processes, and few are new
_LIST_THREADS_EVERY: Final = 10

_FAMILIES: Final[dict[str, tuple[str, Kind, tuple[str, ...]]]] = {
    "process_cpu_seconds": ("CPU time of the rank and its workers.", "counter", ()),
    "process_resident_memory_bytes": (
        "Memory of the rank plus that of its workers; pages they share count in each.", "gauge", (),
    ),
    "process_io_bytes": ("Bytes that storage moved for the rank and its workers.", "counter", ("direction",)),
    "process_run_delay_seconds": (
        "Time that the rank's main thread was ready to run and had no CPU.", "counter", (),
    ),
    "process_collective_run_delay_seconds": (
        "Time that the rank's threads which carry out collectives were ready to run and had no CPU, summed.",
        "counter", (),
    ),
    "process_thread_cpu_seconds": (
        "CPU time of the rank's main thread, which trains, and of all its other threads.", "counter",
        ("thread",),
    ),
    "process_involuntary_switches": (
        "Times that the rank's main thread had its CPU taken away.", "counter", (),
    ),
    "process_allowed_cpus": ("CPUs of a NUMA node that the rank may run on.", "gauge", ("numa_node",)),
}  # fmt: skip
"""By name: help, kind, and labels beyond those of the rank."""

Readings = dict[tuple[str, ...], float]
"""Values by the family's name and the labels that follow the rank's."""


class ProcessCollector:
    """Samples every rank that runs in the daemon's pid namespace; others have no series.

    CPU, memory and I/O include the rank's descendants, which are its DataLoader workers. Waiting
    and switches are the main thread's, the one that trains.
    """

    name = "process"

    def __init__(
        self,
        ranks: Ranks,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        files: RankFiles | None = None,
    ) -> None:
        self._ranks = ranks
        self._proc = proc
        self._files = files or RankFiles(proc)
        self._samples = 0
        self._nodes = sys / "devices" / "system" / "node"
        self._numa_cpus: dict[str, frozenset[int]] | None = None
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._counted: dict[RankProcess, Readings] = {}
        self._exchangers: dict[int, dict[str, bool]] = {}

    def sample(self) -> Sequence[Family]:
        """Return the families of all ranks.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        families = {
            name: Family(name, text, kind, (*_RANK_LABELS, *labels))
            for name, (text, kind, labels) in _FAMILIES.items()
        }
        ranks = list(self._ranks())
        self._samples += 1
        # A rank that has ended keeps its totals for as long as it is named, for a last scrape.
        self._counted = {rank: self._counted.get(rank, {}) for rank in ranks}
        exchangers = {rank.pid: self._exchangers.get(rank.pid, {}) for rank in ranks}
        if exchangers.keys() != self._exchangers.keys() or self._samples % _LIST_PROCESSES_EVERY == 0:
            self._children = self._list_children() if ranks else {}
        self._exchangers = exchangers
        if self._numa_cpus is None:
            self._numa_cpus = self._numa_nodes()
        self._files.keep(ranks)
        for rank in ranks:
            counted, gauges = Readings(self._counted[rank]), Readings()
            # Before its workers: time of one that ends in between is missed until the next sample,
            # where the other order would count it twice and then never let the total shrink again.
            own = self._files.stat(rank)
            if own is not None and (status := self._files.status(rank)):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    gauges = self._read(rank, own, status, self._numa_cpus, counted)
                if not self._files.status(rank):
                    gauges = Readings()  # it has ended or changed users meanwhile
                else:
                    self._counted[rank] = counted
            of_rank = rank.labels
            for key, value in (*self._counted[rank].items(), *gauges.items()):
                families[key[0]].samples.append(((*of_rank, *key[1:]), value))
        return list(families.values())

    def _read(
        self,
        rank: RankProcess,
        own: ProcessStat,
        status: str,
        nodes: dict[str, frozenset[int]],
        counted: Readings,
    ) -> Readings:
        """Update a rank's totals, and return its gauges."""
        members = {rank.pid: own, **self._descendants(rank.pid)}
        switches, allowed_list = parse_lines(status, "nonvoluntary_ctxt_switches", "Cpus_allowed_list")
        now: Readings = {
            ("process_cpu_seconds",): sum(stat.cpu_seconds for stat in members.values()),
            ("process_involuntary_switches",): int(switches),
        }
        if schedstat := self._files.schedstat(rank):
            ran_ns, delay_ns = map(int, schedstat.split()[:2])
            now["process_run_delay_seconds",] = delay_ns / 1e9
            now["process_thread_cpu_seconds", "main"] = ran_ns / 1e9
            now["process_thread_cpu_seconds", "other"] = max(0.0, own.own_cpu_seconds - ran_ns / 1e9)
            now["process_collective_run_delay_seconds",] = self._exchange_delay(rank.pid, own.threads)
        # Some kernels do not count I/O, and that of another user's process is for root only.
        if io := self._files.io(rank):
            with contextlib.suppress(PermissionError):
                for direction, count in self._transferred(rank, _moved(io), members).items():
                    now["process_io_bytes", direction] = count
        for key, value in now.items():
            counted[key] = max(value, counted.get(key, 0))
        allowed = parse_cpu_list(allowed_list)
        resident = sum(stat.resident_pages for stat in members.values()) * _PAGE_BYTES
        shares: Readings = {
            ("process_allowed_cpus", node): float(len(allowed & cpus))
            for node, cpus in nodes.items()
            if allowed & cpus
        }
        return {("process_resident_memory_bytes",): resident, **shares}

    def _exchange_delay(self, pid: int, threads: int) -> float:
        """Return for how long a rank's threads that carry out collectives had no CPU, all of them together.

        There may be hundreds of threads: each name is read once, and threads are listed when their number has
        changed, or every tenth time.

        Raises:
            FileNotFoundError: The rank is gone, or the kernel has no scheduler statistics.
        """
        tasks = f"{self._proc}/{pid}/task"
        known = self._exchangers[pid]
        if len(known) != threads or self._samples % _LIST_THREADS_EVERY == 0:
            self._exchangers[pid] = {
                thread: known[thread] if thread in known else self._exchanges(f"{tasks}/{thread}")
                for thread in os.listdir(tasks)  # noqa: PTH208
            }
        delay_ns = 0
        for thread, exchanges in self._exchangers[pid].items():
            if exchanges:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    delay_ns += int(read(f"{tasks}/{thread}/schedstat").split()[1])
        return delay_ns / 1e9

    @staticmethod
    def _exchanges(thread: str) -> bool:
        try:
            return _EXCHANGES.search(read(f"{thread}/comm")) is not None
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _transferred(self, rank: RankProcess, own: dict[str, int], members: Iterable[int]) -> dict[str, int]:
        """Return bytes that storage moved for a rank and its workers, by direction.

        Args:
            own: Those of the rank itself.

        Raises:
            PermissionError: It is not for us to know.
        """
        total = own
        for member in members:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if member != rank.pid:
                    more = _moved(read(f"{self._proc}/{member}/io"))
                    # A child that has changed users is no worker.
                    if has_users(self._proc, member, rank.uid, rank.gid):
                        total = {direction: count + more[direction] for direction, count in total.items()}
        return total

    def _descendants(self, pid: int) -> dict[int, ProcessStat]:
        found: dict[int, ProcessStat] = {}
        unvisited = [pid]
        while unvisited:
            parent = unvisited.pop()
            for child in self._children.get(parent, ()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    stat = parse_stat(read(f"{self._proc}/{child}/stat"))
                    if stat.parent == parent:
                        found[child] = stat
                        unvisited.append(child)
        return found

    def _list_children(self) -> dict[int, list[int]]:
        """Return the children of every process.

        Who the parent is, is asked once per process.
        """
        present = {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208
        for pid in self._parents.keys() - present:
            del self._parents[pid]
        for pid in present - self._parents.keys():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self._parents[pid] = parse_stat(read(f"{self._proc}/{pid}/stat")).parent
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            children.setdefault(parent, []).append(pid)
        return children

    def _numa_nodes(self) -> dict[str, frozenset[int]]:
        """Return the CPUs of each NUMA node; empty where the kernel knows no such nodes."""
        return {
            path.parent.name.removeprefix("node"): parse_cpu_list(read(path))
            for path in sorted(self._nodes.glob("node[0-9]*/cpulist"))
        }


def _moved(io: str) -> dict[str, int]:
    return dict(zip(_DIRECTIONS, map(int, parse_lines(io, *_DIRECTIONS.values())), strict=True))
