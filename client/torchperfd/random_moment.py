"""Reads the frames of all threads at random moments, also while C code holds the interpreter's lock.

Reading them needs that lock. CPython waits 5 ms before it takes the lock from another thread. C code that
holds it for less has returned by then, and the lock comes free at a later call that releases it. The frames
would show that call. So the wait is shortened for the one sample. A thread then loses the lock when its C
code returns, in the frame that called it.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

LONGEST_S: Final = 0.03
"""The moment comes within this time. A request arrives when the lock is free, which is not at random."""
_SWITCH_S: Final = 1e-5
# sys.setswitchinterval() rounds microseconds down.
_HALF_MICROSECOND: Final = 5e-7

# Its own, since the script may have seeded the module's.
_chance = random.Random()
_before: list[float] = []
"""The interval at which threads switch, while ours is in effect."""
_watches_forks = False


def frames_at_random(sleep: Callable[[float], None] = time.sleep) -> dict[int, FrameType]:
    """Return the frames of all threads at a random moment, by thread; on one thread of a process at a time.

    Clear the dictionary after use: frames keep the script's tensors alive.
    """
    global _watches_forks
    if not _watches_forks:
        _watches_forks = True
        # A child that is forked meanwhile has no thread that would restore the interval.
        os.register_at_fork(after_in_child=_restore)
    seconds = _chance.uniform(0.0, LONGEST_S)
    _before[:] = [sys.getswitchinterval()]
    sys.setswitchinterval(min(_SWITCH_S, _before[0]))
    try:
        sleep(seconds)
    finally:
        # First of all, or a thread that waits for the lock would soon interrupt the reading of the frames.
        _restore()
    return sys._current_frames()


def _restore() -> None:
    while _before:
        interval = _before.pop()
        # Unless the script has set an interval of its own.
        if sys.getswitchinterval() <= 2 * _SWITCH_S:
            sys.setswitchinterval(interval + _HALF_MICROSECOND)
