"""The way down: ``python -m torchperfd_daemon.humbly COMMAND…`` is ``torchperfd COMMAND…``, stepped back.

It takes the processor and the disk when nobody else wants them, may not grow without bound, and
ends with the process that started it. All of that outlasts the ``exec`` by which it becomes the command, and
what the command starts inherits it, but for the last.
"""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
from typing import Final

MOST_MEMORY: Final = 2 << 30
"""Bytes of address space, for each process."""

MOST_CPU_S: Final = 900
MOST_OUTPUT: Final = 64 << 20
"""Bytes of each file that is written."""

_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE: Final = 3 << 13
_THIS_PROCESS: Final = 1
_PR_SET_PDEATHSIG: Final = 1


def step_back() -> None:
    """Give this process its low place; what the system does not have is left out."""
    os.nice(19)
    _limit(resource.RLIMIT_AS, MOST_MEMORY)
    _limit(resource.RLIMIT_CPU, MOST_CPU_S)
    _limit(resource.RLIMIT_FSIZE, MOST_OUTPUT)
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if (number := _IOPRIO_SET.get(platform.machine())) is not None:
            libc.syscall(number, _THIS_PROCESS, 0, _IOPRIO_IDLE)


def _limit(what: int, most: int) -> None:
    # The service manager may have set less; that stays.
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    step_back()
    os.execv(sys.executable, [sys.executable, "-m", "torchperfd_daemon", *sys.argv[1:]])
