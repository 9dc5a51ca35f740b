"""The training processes that collectors look at."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchperfd_daemon.collectors.procfs import parse_stat, read


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank as the kernel knows it.

    Attributes:
        pid: Process id, as the rank sees itself.
        pid_namespace: Inode of the namespace that the id belongs to; 0 when the rank could not tell.
        start_ticks: When it started, in clock ticks since boot; 0 when the rank could not tell.
    """

    run: str
    rank: int
    pid: int
    pid_namespace: int
    start_ticks: int

    @property
    def labels(self) -> tuple[str, str]:
        """The values of the labels ``run`` and ``rank``."""
        return self.run, str(self.rank)


Ranks = Callable[[], Iterable[RankProcess]]
"""Tells which ranks there are now; called on the collector's own thread."""


def is_here(proc: Path, rank: RankProcess) -> bool:
    """Tell whether this very process runs and has its id from our pid namespace.

    In a container of its own a rank's id means another process, or none, to us.
    """
    try:
        namespace = (proc / "self" / "ns" / "pid").stat().st_ino
        start = parse_stat(read(proc / str(rank.pid) / "stat")).start_ticks
    except OSError:
        return False
    return rank.pid_namespace in (0, namespace) and rank.start_ticks in (0, start)
