"""Run a ``torchperfd`` command at idle priority: ``python -P low_priority.py COMMAND…``.

The command uses CPU and disk only while no other process wants them. Its memory, CPU time and file sizes
are limited, and it is killed when the process that started it ends. The settings survive ``exec``; the
command's children inherit all of them but the last.
"""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
from typing import Final

from torchperfd.own_commands import own_command
from torchperfd.v1.variables import known_environment

MOST_MEMORY: Final = 2 << 30
"""Bytes of address space, for each process."""

MOST_CPU_S: Final = 900
MOST_OUTPUT: Final = 64 << 20
"""Bytes of each file that is written."""

_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE: Final = 3 << 13
_THIS_PROCESS: Final = 1
_PR_SET_PDEATHSIG: Final = 1


def lower_priority() -> None:
    """Lower this process's priority and limits; a setting that the system lacks is skipped."""
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
    lower_priority()
    command = own_command("torchperfd_daemon", *sys.argv[1:])
    os.execve(sys.executable, command, known_environment(os.environ))
