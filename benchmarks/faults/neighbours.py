"""Who else uses the machine while a job runs: processor time that is neither the job's nor idle."""

import contextlib

import psutil


class Neighbours:
    """Measures, from its making on, what others take of the machine's processors.

    Others are the hypervisor (stolen time), the kernel's own threads, and all processes but this one and
    those that it has started. The kernel's two ways of counting differ by a hundredth.
    """

    def __init__(self) -> None:
        self._taken, self._all = _accounts()

    def share(self) -> float:
        """Return which share, 0 to 1, of the processors' time they have taken so far."""
        taken, total = _accounts()
        return max(0.0, taken - self._taken) / max(1e-9, total - self._all)


def own_seconds() -> float:
    """Return the processor time of this process and of those below it, with the ones that they waited for."""
    this = psutil.Process()
    spent = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


def _accounts() -> tuple[float, float]:
    """Return the processor time that others have had, and how much there was; both since any time."""
    times = psutil.cpu_times()
    # A guest's time is in user and nice as well.
    total = sum(times) - times.guest - times.guest_nice
    return total - times.idle - times.iowait - own_seconds(), total
