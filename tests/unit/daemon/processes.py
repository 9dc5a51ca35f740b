"""Processes of a test, as ranks."""

from pathlib import Path

from torchperfd_daemon.collectors.process import RankProcess, own_namespace

HERE = own_namespace(Path("/proc"))
"""Our own pid namespace."""


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def process(pid: int, ticks: int | None = None, namespace: int = HERE) -> RankProcess:
    """Return a process as a rank."""
    return RankProcess("bert-17", 0, pid, namespace, start_ticks(pid) if ticks is None else ticks)
