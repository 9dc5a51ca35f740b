"""Derives from the training thread's stack which part of a step the host works on, and at which line."""

from collections.abc import Sequence
from enum import Enum
from typing import Final

from torchperfd_daemon.stacks.activity import Kind, activity, is_library
from torchperfd_daemon.stacks.model import Frame

_MODULE: Final = "torch/nn/modules/module.py"
_OPTIMIZERS: Final = "torch/optim/"
_WAITS: Final = ("item", "cpu", "tolist", "numpy", "nonzero", "synchronize")
"""Calls in which the host waits for its device, if it trains on one."""


class Part(Enum):
    """A part of a step, by the frames of torch. In ``WAIT`` the host waits for something else.

    ``THREAD`` is work of the process's other threads beside it.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"
    WAIT = "wait"
    THREAD = "thread"


def host_part(frames: Sequence[Frame], *, on_device: bool = True) -> Part:
    """Return the part of a step that a training thread is in.

    Args:
        frames: Innermost first; at least one.
        on_device: Whether the rank trains on a device, for which the host waits in some calls.
    """
    kind = activity(frames).kind
    if kind is not Kind.CODE:
        return Part.BACKWARD if kind is Kind.BACKWARD else Part.WAIT
    if on_device and frames[0].call in _WAITS:
        return Part.WAIT
    # The outermost decides: a module may be called by an optimizer's closure, and a model has optimizers.
    for frame in reversed(frames):
        if is_library(frame.file):
            if frame.file.endswith(_MODULE):
                return Part.FORWARD
            if _OPTIMIZERS in frame.file:
                return Part.OPTIMIZER
    return Part.OTHER
