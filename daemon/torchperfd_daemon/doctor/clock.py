"""What the kernel knows about its own clock."""

import ctypes
from typing import Final, NamedTuple

_UNSYNCHRONISED: Final = 0x40


class ClockState(NamedTuple):
    """Whether something keeps the clock right, and the most by which it may be wrong, in seconds."""

    synchronised: bool
    error_seconds: float


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux as far as its status, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_int),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> ClockState | None:
    """Ask the kernel, which needs no privilege; None if the kernel does not report it."""
    state = _Timex()  # no modes: nothing is changed
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    if answer < 0:
        return None
    return ClockState(not state.status & _UNSYNCHRONISED, state.maxerror / 1e6)
