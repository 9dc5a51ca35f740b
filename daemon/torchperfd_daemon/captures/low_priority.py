"""Run a ``torchperfd`` command at idle priority: ``python -P low_priority.py [OPTION…] COMMAND…``.

``--user=UID:GID`` has it become that user, once it has read its own code: the user may have no access to the
interpreter. Each ``--link=FD:PATH`` makes a link at PATH to a file that this process has inherited as a
descriptor.

The command uses CPU and disk only while no other process wants them. Its memory, CPU time and file sizes
are limited, and it is killed when the process that started it ends. The settings survive ``exec``; the
command's children inherit all of them but the last.
"""

import contextlib
import ctypes
import importlib
import os
import platform
import resource
import signal
import sys
from typing import Final

from torchperfd.model.own_commands import own_command
from torchperfd.v1.variables import known_environment

MAX_MEMORY: Final = 2 << 30
"""Bytes of address space, for each process."""

MAX_CPU_S: Final = 900
MAX_OUTPUT: Final = 64 << 20
"""Bytes of each file that is written."""

LINK: Final = "--link="
USER: Final = "--user="

_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE: Final = 3 << 13
_THIS_PROCESS: Final = 1
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_COMMANDS: Final = ("analyze", "compare")
_LATER: Final = ("concurrent.futures.thread", "encodings.idna", "gzip", "pickle", "tempfile", "zlib")
"""Modules of Python that the commands import when they need them."""


def lower_priority() -> None:
    """Lower this process's priority and limits; a setting that the system lacks is skipped."""
    os.nice(19)
    _limit(resource.RLIMIT_AS, MAX_MEMORY)
    _limit(resource.RLIMIT_CPU, MAX_CPU_S)
    _limit(resource.RLIMIT_FSIZE, MAX_OUTPUT)
    _limit(resource.RLIMIT_CORE, 0)
    _end_with_parent()
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if (number := _IOPRIO_SET.get(platform.machine())) is not None:
            libc.syscall(number, _THIS_PROCESS, 0, _IOPRIO_IDLE)


def _limit(what: int, most: int) -> None:
    # The service manager may have set less; that stays.
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(what, (most, most))


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become(uid: int, gid: int) -> None:
    """Give up all rights but a user's.

    Raises:
        OSError: This process may not.
    """
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # The change has reset both. Its children read the files that it has inherited.
    _end_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def run_as(uid: int, gid: int, arguments: list[str]) -> None:
    """Run a command in this process as a user."""
    # By name, as `python -m` finds it: this file starts commands and is no part of them.
    cli = importlib.import_module("torchperfd_cli.main")
    for name in (*(f"torchperfd_cli.commands.{each}" for each in _COMMANDS), *_LATER):
        importlib.import_module(name)
    become(uid, gid)
    sys.argv[1:] = make_links(arguments)
    cli.main()


def make_links(arguments: list[str]) -> list[str]:
    """Make the links that the first arguments ask for; return the others.

    The links lead to this very process, so that its children find the files as well.

    Raises:
        OSError: A link cannot be made.
    """
    left = list(arguments)
    while left and left[0].startswith(LINK):
        descriptor, _, path = left.pop(0).removeprefix(LINK).partition(":")
        os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", path)  # noqa: PTH211 - pathlib is not loaded yet
    return left


if __name__ == "__main__":
    lower_priority()
    if sys.argv[1].startswith(USER):
        user, _, group = sys.argv[1].removeprefix(USER).partition(":")
        run_as(int(user), int(group), sys.argv[2:])
    else:
        command = own_command("torchperfd_daemon", *make_links(sys.argv[1:]))
        os.execve(sys.executable, command, known_environment(os.environ))
