"""torch's Flight Recorder: its record of the collectives of every process group.

With NCCL, and in torch 2.13 with gloo, too, torch keeps the newest in memory, unless ``TORCH_FR_BUFFER_SIZE``
is 0.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

_C10D: Final = "torch._C._distributed_c10d"
# torch 2.13 has the first, which knows of gloo, too; before it there was the second, in builds with NCCL.
_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def dump() -> bytes | None:
    """Return the record as JSON; None where torch keeps none.

    Takes milliseconds, and the interpreter with it.

    Raises:
        RuntimeError: torch could not write it.
    """
    c10d = sys.modules.get(_C10D)
    found: Callable[[bool, bool], Any] | None = next(
        (getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)), None
    )
    return found(True, True) if found is not None else None
