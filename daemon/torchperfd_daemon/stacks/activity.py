"""Derives a thread's activity from the frames of torch in its stack."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from torchperfd_daemon.stacks.model import DRAWS, Frame

# The outermost of these frames is the function that the script called: all_gather_object, not all_gather.
_COLLECTIVES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
# DistributedDataParallel calls its own collectives from C++, directly below these.
_REPLICATION: Final = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
_REPLICATES: Final = ("sync", "broadcast", "verify")
# The client's hooks wrap torch's functions: the wrapper's frame is between torch's frame and the native call.
_HOOKS: Final = "/torchperfd/hooks/"
_ENGINE: Final = ("torch/autograd/graph.py", "_engine_run_backward")
_LOADERS: Final = ("torch/utils/data/dataloader.py", DRAWS)
# The client's hooks are called between the script and torch, and never wait themselves.
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", _HOOKS, DRAWS)


class Kind(Enum):
    """The kind of a thread's activity."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    DATA = "data"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Activity:
    """A thread's activity, and its place in the script.

    Attributes:
        call: The collective's name; empty for other kinds.
        place: The innermost frame of the script, of a collective its caller; the innermost of all if there is
            none of the script.
    """

    kind: Kind
    call: str
    place: Frame


def activity(frames: Sequence[Frame]) -> Activity:
    """Return a thread's activity.

    Args:
        frames: Innermost first; at least one.
    """
    place = place_in_script(frames) or frames[0]
    collectives = [number for number, frame in enumerate(frames) if frame.file.endswith(_COLLECTIVES)]
    if collectives:
        outermost = collectives[-1]
        # Below it may be a backend that is written in Python, which is not the script.
        caller = place_in_script(frames[outermost + 1 :]) or place
        return Activity(Kind.COLLECTIVE, frames[outermost].function, caller)
    innermost = next((frame for frame in frames if _HOOKS not in frame.file), frames[0])
    if innermost.file.endswith(_REPLICATION) and any(word in innermost.function for word in _REPLICATES):
        return Activity(Kind.COLLECTIVE, "DistributedDataParallel's broadcast", place)
    if innermost.file.endswith(_ENGINE[0]) and innermost.function == _ENGINE[1]:
        return Activity(Kind.BACKWARD, "", place)
    if any(frame.file.endswith(_LOADERS) for frame in frames):
        return Activity(Kind.DATA, "", place)
    return Activity(Kind.CODE, "", place)


def place_in_script(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the script; None if there is none."""
    return next((frame for frame in frames if not is_library(frame.file)), None)


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, to a package or to the client's hooks, not to the script."""
    return file.startswith("<") or any(part in file for part in _LIBRARIES)
