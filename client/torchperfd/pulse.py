"""The pulse: how many steps there were and when the newest ended, where the daemon can look by itself.

A report takes the interpreter from training, and beside steps of a millisecond every report is one step late
and more. A page of memory that the tape counts steps in costs nothing to be looked at: the daemon finds
the file among this process's descriptors, sees that the rank goes on, and asks for a report where
it does not go on as before.
"""

import ctypes
import mmap
import os
from typing import Any

from torchperfd import memory_file
from torchperfd.faults import Faults
from torchperfd.tape import Tape
from torchperfd.v1 import contract


class Pulse:
    """A page that one tape counts steps in.

    Args:
        tape: Whose steps.
        faults: Where failures of ours are counted.
    """

    def __init__(self, tape: Tape, faults: Faults) -> None:
        self._tape = tape
        self._faults = faults
        self._file = -1
        self.seen = False
        """Whether the daemon looks at it."""

    def begin(self) -> None:
        """Count from now on; does nothing where there are no such files, or none is to be had."""
        if not hasattr(os, "memfd_create"):
            return
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - without it the daemon is told more often
            self._faults.note("pulse", error)

    @property
    def beats(self) -> int | None:
        """How many optimizer steps have ended; None where they are not counted."""
        try:
            return self._beats[0] if self._file >= 0 else None
        except ValueError:
            return None  # it has ended meanwhile

    def end(self) -> None:
        """Count no more; also for a forked child, whose steps are not the rank's."""
        if self._file < 0:
            return
        file, self._file = self._file, -1
        self.seen = False
        self._tape.pulse = None
        self._beats.release()
        _libc().munmap(ctypes.addressof(self._page), mmap.PAGESIZE)
        if memory_file.is_open(file, contract.PULSE_FILE):
            os.close(file)

    def _begin(self) -> None:
        file = _open_file()
        try:
            self._page = _map(file)
        except BaseException:
            os.close(file)
            raise
        self._beats = memoryview(self._page).cast("B").cast("q")
        self._file = file
        self._tape.pulse = self._page


def _open_file() -> int:
    import fcntl

    file = os.memfd_create(contract.PULSE_FILE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        # Were it to shrink, training would end at the next step.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def _map(file: int) -> "ctypes.Array[ctypes.c_char]":
    # Python's own keeps a descriptor besides, and closes its number whoever has that by then.
    address = _libc().mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return (ctypes.c_char * mmap.PAGESIZE).from_address(address)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
