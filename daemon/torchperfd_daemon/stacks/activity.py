"""What a stack is doing, read off the places in torch that everybody's stack goes through."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from torchperfd_daemon.stacks.model import Frame

# Of their frames the outermost says what the script asked for: all_gather_object, not all_gather.
_COLLECTIVES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
# DistributedDataParallel's own collectives are called from C++ right below these.
_REPLICATION: Final = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
_REPLICATES: Final = ("sync", "broadcast", "verify")
# Our hooks wrap what they call: the wrapper's frame lies between torch's and the native call.
_HOOKS: Final = "/torchperfd/hooks/"
_ENGINE: Final = ("torch/autograd/graph.py", "_engine_run_backward")
_LOADER: Final = "torch/utils/data/dataloader.py"
# The client's hooks stand between the script and torch, and nobody waits in them for their own sake.
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", _HOOKS)


class Kind(Enum):
    """What a thread may be doing, as far as its frames say."""

    COLLECTIVE = "collective"
    BACKWARD = "backward"
    DATA = "data"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a thread does, and where the script has it done.

    Attributes:
        call: The collective's name; empty for other kinds.
        place: The innermost frame of the script's own; of any code where there is none.
    """

    kind: Kind
    call: str
    place: Frame


def activity(frames: Sequence[Frame]) -> Activity:
    """Return what a thread does.

    Args:
        frames: Innermost first; at least one.
    """
    place = next((frame for frame in frames if not _is_library(frame.file)), frames[0])
    asked = [frame for frame in frames if frame.file.endswith(_COLLECTIVES)]
    if asked:
        return Activity(Kind.COLLECTIVE, asked[-1].function, place)
    innermost = next((frame for frame in frames if _HOOKS not in frame.file), frames[0])
    if innermost.file.endswith(_REPLICATION) and any(word in innermost.function for word in _REPLICATES):
        return Activity(Kind.COLLECTIVE, "DistributedDataParallel's broadcast", place)
    if innermost.file.endswith(_ENGINE[0]) and innermost.function == _ENGINE[1]:
        return Activity(Kind.BACKWARD, "", place)
    if any(frame.file.endswith(_LOADER) for frame in frames):
        return Activity(Kind.DATA, "", place)
    return Activity(Kind.CODE, "", place)


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(part in file for part in _LIBRARIES)
