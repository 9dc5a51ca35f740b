"""Other load on the machine while a job runs: processor time that is neither the job's nor idle."""

import contextlib
from typing import Final, NamedTuple

import psutil

COUNTING_ERROR: Final = 0.02
"""The kernel times processes to the nanosecond, and processors by ticks: so much the two may differ by."""


class Neighbours:
    """Measures, from its making on, what others take of the machine's processors.

    Others are the hypervisor, which steals time, the kernel's own threads, and all processes but this one and
    those that it has started.
    """

    def __init__(self) -> None:
        self._began = _accounts()

    def share(self) -> float:
        """Return which share, 0 to 1, of the processors' time they have taken so far.

        What has been stolen counts whole, what processes have taken beyond :data:`COUNTING_ERROR`.
        """
        total, stolen, processes = (
            after - before for after, before in zip(_accounts(), self._began, strict=True)
        )
        return (stolen + max(0.0, processes - COUNTING_ERROR * total)) / total if total > 0 else 0.0


def own_seconds() -> float:
    """Return the processor time of this process and of those below it, with the ones that they waited for."""
    this = psutil.Process()
    spent = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


class _Accounts(NamedTuple):
    """Seconds of all processors since an arbitrary time: in total, and used by other processes."""

    total: float
    stolen: float
    processes: float


def _accounts() -> _Accounts:
    times = psutil.cpu_times()
    # A guest's time is in user and nice as well.
    total = sum(times) - times.guest - times.guest_nice
    busy = total - times.idle - times.iowait - times.steal
    return _Accounts(total, times.steal, busy - own_seconds())
