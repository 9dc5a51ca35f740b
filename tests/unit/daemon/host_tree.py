"""A small fake procfs and sysfs for collectors: real files in a temporary directory."""

import shutil
from pathlib import Path

from torchperfd_daemon.collectors.process import RankProcess


class HostTree:
    """Roots of a fake ``/proc`` and ``/sys``, and what puts processes into them."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.sys = directory / "proc", directory / "sys"
        self.write("proc/self/ns/pid", "")
        self.namespace = (self.proc / "self/ns/pid").stat().st_ino

    def write(self, path: str, text: str) -> Path:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def add_process(
        self,
        pid: int,
        parent: int = 1,
        *,
        ticks: tuple[int, int, int, int] = (0, 0, 0, 0),
        start: int = 500,
        pages: int = 10,
        command: str = "python\0train.py\0",
        moved: tuple[int, int] | None = (0, 0),
        delay_ns: int | None = 0,
        switches: int = 0,
        cpus: str = "0-3",
        cgroup: str = "/",
        users: str = "1000 1000 1000 1000",
        groups: str = "100 100 100 100",
    ) -> None:
        """Add a process; ticks are user, system, and both of children that were waited for."""
        before = f"S {parent} 1 1 0 -1 0 0 0 0 0"
        after = f"20 0 1 0 {start} 4096 {pages} 99 0 0"
        used = " ".join(map(str, ticks))
        self.write(f"proc/{pid}/stat", f"{pid} (py) thon (x)) {before} {used} {after}\n")
        self.write(f"proc/{pid}/cmdline", command)
        self.write(f"proc/{pid}/cgroup", f"0::{cgroup}\n")
        self.write(
            f"proc/{pid}/status",
            f"Name:\tpy: thon\nUid:\t{users}\nGid:\t{groups}\nCpus_allowed_list:\t{cpus}\n"
            f"voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t{switches}\n",
        )
        if delay_ns is not None:
            self.write(f"proc/{pid}/schedstat", f"123 {delay_ns} 9\n")
            self.write(f"proc/{pid}/task/{pid}/schedstat", f"123 {delay_ns} 9\n")
            self.write(f"proc/{pid}/task/{pid}/comm", "python\n")
        if moved is not None:
            self.write(
                f"proc/{pid}/io", f"rchar: 1\nwchar: 2\nread_bytes: {moved[0]}\nwrite_bytes: {moved[1]}\n"
            )

    def end_process(self, pid: int) -> None:
        for file in (self.proc / str(pid)).iterdir():
            if file.is_file():
                file.write_text("")  # the kernel's own cannot be read any more by those that have them open
        shutil.rmtree(self.proc / str(pid))

    def rank(self, pid: int, rank: int = 0, *, start: int = 500, namespace: int | None = None) -> RankProcess:
        """Return a rank that is one of these processes, as the store knows it."""
        here = self.namespace if namespace is None else namespace
        return RankProcess("bert-17", rank, pid, here, start, uid=1000, gid=100)


def busy_host(directory: Path) -> HostTree:
    """Return a tree in which every collector finds something: a disk, a network, and rank 100 in a group."""
    tree = HostTree(directory)
    tree.write("proc/stat", "cpu 1 0 0 1 0 0 0 0\n")
    tree.write("proc/meminfo", "MemTotal: 2 kB\nMemAvailable: 1 kB\n")
    tree.write("proc/diskstats", " 259 0 sda 1 0 1 0 1 0 1 0 0 0 0\n")
    tree.write("proc/net/dev", "Inter-|\n face |\n eth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n")
    tree.write("proc/pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n")
    tree.write("sys/block/sda/device/model", "")
    tree.write("sys/devices/system/node/node0/cpulist", "0-3\n")
    tree.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    tree.write("sys/fs/cgroup/cpu.max", "100000 100000\n")
    tree.write("sys/fs/cgroup/cpu.stat", "throttled_usec 1\n")
    tree.write("sys/fs/cgroup/memory.max", "1\n")
    tree.add_process(100)
    return tree
