"""CUPTI, through which Kineto records the device, is taken out of the process again when a capture ends.

By default it stays, and every launch goes on passing through it: on an H200 with torch 2.11 and CUDA 13.0
a launch took 22 % longer after a capture, and the steps of a loop that the host bounds 36 %, for the rest
of the run (docs/gpu-results.md). Kineto takes it out where a variable of the environment says so.
"""

import os
import re
import time
from typing import Final

VARIABLE: Final = "TEARDOWN_CUPTI"
"""Read by Kineto whenever a profiler starts and stops, and on a thread of its own in between."""

_SAFE_FROM: Final = 13
"""Release of CUDA since which it was seen to work: five captures in a row, also with CUDA graphs, which older
releases crash with."""

_REST_S: Final = 1.0
"""Kineto removes CUPTI on a thread of its own, which races with a profiler that starts meanwhile."""

_ended_at = -_REST_S


def note_end() -> None:
    """A profiler of this process that has recorded a CUDA device has ended."""
    global _ended_at
    _ended_at = time.monotonic()


def rest() -> None:
    """Sleep until CUPTI may be used again; at most a second after the capture before."""
    time.sleep(max(0.0, _ended_at + _REST_S - time.monotonic()))


def have_cupti_removed(cuda: str | None) -> None:
    """Have CUPTI removed when a profiler ends, from now on, where that is known to be safe.

    The variable stays, because Kineto reads it also after the capture. A script's own choice is kept.

    Args:
        cuda: The release of CUDA that torch was built for, ``13.0``; None for other devices.
    """
    release = re.match(r"\d+", cuda or "")
    if release is not None and int(release[0]) >= _SAFE_FROM:
        os.environ.setdefault(VARIABLE, "1")
