"""CUPTI, through which Kineto records the device, is taken out of the process again when a capture ends.

By default it stays, and every launch goes on passing through it: on an H200 with torch 2.11 and CUDA 13.0
a launch took 22 % longer after a capture, and the steps of a loop that the host bounds 36 %, for the rest
of the run (docs/gpu-results.md). Kineto takes it out where a variable of the environment says so.
"""

import os
import re
from typing import Final

VARIABLE: Final = "TEARDOWN_CUPTI"
"""Read by Kineto whenever a profiler starts and stops, and on a thread of its own in between."""

_SAFE_FROM: Final = 13
"""Release of CUDA since which it was seen to work: five captures in a row, also with CUDA graphs, which older
releases crash with."""


def have_cupti_removed(cuda: str | None) -> None:
    """Have CUPTI removed when a profiler ends, from now on, where that is known to be safe.

    The variable stays, because Kineto reads it also after the capture. A script's own choice is kept.

    Args:
        cuda: The release of CUDA that torch was built for, ``13.0``; None for other devices.
    """
    release = re.match(r"\d+", cuda or "")
    if release is not None and int(release[0]) >= _SAFE_FROM:
        os.environ.setdefault(VARIABLE, "1")
