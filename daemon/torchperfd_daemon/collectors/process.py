"""The training processes that collectors sample: how they are found, and their files in procfs."""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.procfs import CHUNK, ProcessStat, parse_lines, parse_stat, read


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
    return (uid is None and gid is None) or _is_of(read(f"{proc}/{pid}/status"), uid, gid)


def _is_of(status: str, uid: int | None, gid: int | None) -> bool:
    if uid is not None and gid is not None and _users_as_written(uid, gid) in status:
        return True
    try:
        users, groups = parse_lines(status, "Uid", "Gid")
    except ValueError:
        return False
    return (uid is None or set(users.split()) == {str(uid)}) and (
        gid is None or set(groups.split()) == {str(gid)}
    )


@functools.lru_cache(maxsize=64)
def _users_as_written(uid: int, gid: int) -> str:
    """Return the lines in which the kernel writes four times the same user and group."""
    return "\nUid:" + 4 * f"\t{uid}" + "\nGid:" + 4 * f"\t{gid}" + "\n"


_KEPT_OPEN: Final = ("stat", "status", "schedstat", "io")
"""The first two are there of each process; the others depend on the kernel, and on who may read them."""
_IDENTIFYING: Final = 2


class RankFiles:
    """The files of ranks' processes, kept open: opening costs more than reading them.

    An open file stays that of its process, also when another one gets the id. For one thread.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._namespace = 0
        self._kept: dict[RankProcess, list[int]] = {}

    def keep(self, ranks: Collection[RankProcess]) -> None:
        """Close the files of all other ranks; raise OSError if procfs cannot be read."""
        self._namespace = own_namespace(self._proc) if ranks else 0
        for rank in self._kept.keys() - set(ranks):
            self._close(rank)

    def stat(self, rank: RankProcess) -> ProcessStat | None:
        """Return the kernel's data on a rank's process; None unless this very process runs here."""
        text = self._read(rank, 0)
        return parse_stat(text) if text else None

    def status(self, rank: RankProcess) -> str:
        """Return the text of ``status``; empty unless this very process runs here and has its users."""
        text = self._read(rank, 1)
        return text if text and _is_of(text, rank.uid, rank.gid) else ""

    def schedstat(self, rank: RankProcess) -> str:
        """Return the text of ``schedstat``; empty if the kernel has no scheduler statistics."""
        return self._read(rank, 2)

    def io(self, rank: RankProcess) -> str:
        """Return the text of ``io``; empty where it is not counted, or not for us to know."""
        return self._read(rank, 3)

    def _read(self, rank: RankProcess, which: int) -> str:
        try:
            files = self._kept.get(rank) or self._opened(rank)
            text = os.pread(files[which], CHUNK, 0) if len(files) > which and files[which] >= 0 else b""
        except OSError:
            text = b""
        if not text and which < _IDENTIFYING:
            self._close(rank)  # it has ended
        return text.decode("utf-8", "replace")

    def _opened(self, rank: RankProcess) -> list[int]:
        if rank.pid_namespace not in (0, self._namespace):
            return []
        with contextlib.ExitStack() as done, contextlib.ExitStack() as undone:
            # Through the directory, which is that of one process as well.
            directory = os.open(f"{self._proc}/{rank.pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            done.callback(os.close, directory)
            files: list[int] = []
            for name in _KEPT_OPEN:
                try:
                    files.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory))
                    undone.callback(os.close, files[-1])
                except (FileNotFoundError, PermissionError):
                    if len(files) < _IDENTIFYING:
                        raise
                    files.append(-1)
            stat = parse_stat(os.pread(files[0], CHUNK, 0).decode("utf-8", "replace"))
            if rank.start_ticks not in (0, stat.start_ticks):
                return []
            undone.pop_all()
        self._kept[rank] = files
        return files

    def _close(self, rank: RankProcess) -> None:
        for file in self._kept.pop(rank, ()):
            if file >= 0:
                os.close(file)


def is_here(proc: Path, rank: RankProcess) -> bool:
    """Tell whether this very process runs and has its id from our pid namespace."""
    try:
        return stat_here(proc, rank, own_namespace(proc)) is not None
    except OSError:
        return False
