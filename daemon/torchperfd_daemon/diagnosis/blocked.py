"""How long a training thread stands still in phases in which it should compute. Pure.

A thread of the script that holds Python's interpreter lock makes the training thread wait for it, between any
two calls. That wait is in no phase of its own: the kernel sees a thread that sleeps, while another one of the
same process runs.
"""

from collections.abc import Mapping
from typing import Final

_COMPUTES: Final = ("forward", "backward", "optimizer", "zero_grad")


def blocked_seconds(
    phases: Mapping[str, float],
    *,
    ran: float,
    queued: float,
    others_ran: float,
    threads: int | None,
    on_device: bool,
) -> float:
    """Return for how long another thread of the process may have kept the training thread from running.

    At least for so long: what the thread ran in other phases counts as if it had been in these. At most for
    as long as other threads ran beyond those that compute with it: a model that sleeps, or waits for another
    process, is not blocked by a thread.

    Args:
        phases: Exclusive host time per step, in seconds.
        ran: CPU time of the training thread per step, in seconds; 0 if unknown.
        queued: Its wait for a CPU.
        others_ran: CPU time of all other threads of the process.
        threads: How many threads an operation may use; None if unknown.
        on_device: Whether its phases are timed on a device, for which the host waits in any phase.
    """
    if on_device or ran <= 0 or threads is None:
        return 0.0
    computing = sum(phases.get(name, 0.0) for name in _COMPUTES)
    strangers_ran = strangers_seconds(ran=ran, others_ran=others_ran, threads=threads)
    return max(0.0, min(computing - ran - queued, strangers_ran))


def strangers_seconds(*, ran: float, others_ran: float, threads: int | None) -> float:
    """Return the CPU time of a process's threads beyond those that compute with the training thread.

    Args:
        ran: CPU time of the training thread per step, in seconds; 0 if unknown.
        others_ran: CPU time of all other threads of the process.
        threads: How many threads an operation may use; None if unknown.
    """
    return max(0.0, others_ran - (threads - 1) * ran) if ran > 0 and threads is not None else 0.0
