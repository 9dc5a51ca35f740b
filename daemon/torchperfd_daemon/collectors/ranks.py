"""The training processes that collectors sample."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torchperfd_daemon.collectors.procfs import ProcessStat, parse_lines, parse_stat, read


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank as the kernel knows it.

    Attributes:
        pid: Process id, as the rank sees itself.
        pid_namespace: Inode of the namespace that the id belongs to; 0 when the rank does not know it.
        start_ticks: When it started, in clock ticks since boot; 0 when the rank does not know it.
        device_uuid: Of its GPU, without ``GPU-`` or ``MIG-``, as it says itself; empty if unknown.
        uid: The user of its session, from the kernel; None if unknown.
        gid: The group of its session, likewise.
    """

    run: str
    rank: int
    pid: int
    pid_namespace: int
    start_ticks: int
    device_uuid: str = field(default="", compare=False)
    uid: int | None = field(default=None, compare=False)
    gid: int | None = field(default=None, compare=False)

    @property
    def labels(self) -> tuple[str, str]:
        """The values of the labels ``run`` and ``rank``."""
        return self.run, str(self.rank)


Ranks = Callable[[], Iterable[RankProcess]]
"""Tells which ranks there are now; called on the collector's own thread."""


def own_namespace(proc: Path) -> int:
    """Return the inode of our own pid namespace.

    Raises:
        OSError: procfs cannot be read.
    """
    return os.stat(f"{proc}/self/ns/pid").st_ino  # noqa: PTH116 - asked every second, and pathlib is slow


def stat_here(proc: Path, rank: RankProcess, namespace: int) -> ProcessStat | None:
    """Return the kernel's data on a rank's process; None unless this very process runs in our pid namespace.

    In a container of its own a rank's id means another process, or none, to us. A process that has changed
    users is not the one of the session any more.

    Args:
        namespace: Our own, from :func:`own_namespace`.
    """
    if rank.pid_namespace not in (0, namespace):
        return None
    try:
        stat = parse_stat(read(f"{proc}/{rank.pid}/stat"))
        is_same = rank.start_ticks in (0, stat.start_ticks) and has_users(proc, rank.pid, rank.uid, rank.gid)
    except OSError:
        return None
    return stat if is_same else None


def has_users(proc: Path, pid: int, uid: int | None, gid: int | None) -> bool:
    """Return whether a process has this user and group only: real, effective, saved and for files.

    A program with the set-user-ID bit has others, and the session's user may not see what the daemon can read
    of it. So this is asked before and after each look at a process.

    Args:
        pid: In our namespace.
        uid: None where it is not known; then it is not compared. Likewise ``gid``.

    Raises:
        OSError: The process is gone.
    """
    if uid is None and gid is None:
        return True
    try:
        users, groups = parse_lines(read(f"{proc}/{pid}/status"), "Uid", "Gid")
    except ValueError:
        return False
    return (uid is None or set(users.split()) == {str(uid)}) and (
        gid is None or set(groups.split()) == {str(gid)}
    )


def is_here(proc: Path, rank: RankProcess) -> bool:
    """Tell whether this very process runs and has its id from our pid namespace."""
    try:
        return stat_here(proc, rank, own_namespace(proc)) is not None
    except OSError:
        return False
