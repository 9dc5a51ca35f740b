"""When a process of this node ended, to the millisecond; it need not be a child of this one."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from torchperfd_daemon.collectors.ranks import RankProcess, is_here
from torchperfd_daemon.store import Rank


def process_of(rank: Rank) -> RankProcess:
    """Return the process that a rank is; of one whose process is not known, none that there is."""
    identity = rank.identity
    return RankProcess(
        identity.run,
        identity.rank,
        identity.pid if rank.is_process_known else 0,
        identity.pid_namespace,
        identity.process_start_ticks,
        rank.totals.cuda.device_uuid if rank.totals.cuda is not None else "",
        rank.process.uid,
        rank.gid,
    )


class Exit:
    """Waits for one process to end, on the running loop.

    Args:
        fd: A pidfd of the process; :meth:`close` closes it.

    Attributes:
        at_ns: When the process ended, by that clock; None while it runs.
    """

    def __init__(self, fd: int, clock: Callable[[], int]) -> None:
        self.at_ns: int | None = None
        self._fd = fd
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._ended)

    def close(self) -> None:
        """Stop waiting and close the descriptor."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.at_ns = self._clock()
        self.close()


def exit_of(process: RankProcess, clock: Callable[[], int], proc: Path = Path("/proc")) -> Exit | None:
    """Start waiting for a rank's process to end; None if it has ended or cannot be observed from here."""
    if process.pid <= 0:
        return None
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    # Checked after opening: from then on the descriptor refers to one process, even if its id is reused.
    if not is_here(proc, process):
        os.close(fd)
        return None
    return Exit(fd, clock)
