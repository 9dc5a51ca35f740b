"""Derives a thread's activity from its stack: its kind, its line of the script, and the part of the step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from torchperfd_daemon.stacks.model import DRAWS, Frame

# The outermost of these frames is the function that the script called: all_gather_object, not all_gather.
_COLLECTIVE_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
# DistributedDataParallel calls its own collectives from C++, directly below these.
_REPLICATION_FILES: Final = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
_REPLICATES: Final = ("sync", "broadcast", "verify")
# The client's hooks wrap torch's functions: the wrapper's frame is between torch's frame and the native call.
_HOOKS: Final = "/torchperfd/hooks/"
_ENGINE: Final = ("torch/autograd/graph.py", "_engine_run_backward")
_LOADER_FILES: Final = ("torch/utils/data/dataloader.py", DRAWS)
# The client's hooks are called between the script and torch, and never wait themselves.
_LIBRARY_PATHS: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", _HOOKS, DRAWS)


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
    collectives = [number for number, frame in enumerate(frames) if frame.file.endswith(_COLLECTIVE_FILES)]
    if collectives:
        outermost = collectives[-1]
        # Below it may be a backend that is written in Python, which is not the script.
        caller = place_in_script(frames[outermost + 1 :]) or place
        return Activity(Kind.COLLECTIVE, frames[outermost].function, caller)
    innermost = next((frame for frame in frames if _HOOKS not in frame.file), frames[0])
    if innermost.file.endswith(_REPLICATION_FILES) and any(
        word in innermost.function for word in _REPLICATES
    ):
        return Activity(Kind.COLLECTIVE, "DistributedDataParallel's broadcast", place)
    if innermost.file.endswith(_ENGINE[0]) and innermost.function == _ENGINE[1]:
        return Activity(Kind.BACKWARD, "", place)
    if any(frame.file.endswith(_LOADER_FILES) for frame in frames):
        return Activity(Kind.DATA, "", place)
    return Activity(Kind.CODE, "", place)


def place_in_script(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the script; None if there is none."""
    return next((frame for frame in frames if not is_library(frame.file)), None)


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, to a package or to the client's hooks, not to the script."""
    return file.startswith("<") or any(part in file for part in _LIBRARY_PATHS)


# Before Python 3.12 each has a frame.
_COMPREHENSIONS: Final = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
# What a thread calls while it waits and needs no interpreter.
_WAITING_CALLS: Final = frozenset(
    {
        *("acquire", "acquire_lock", "wait", "join", "get", "sleep", "select", "poll", "epoll_wait"),
        *("accept", "connect", "recv", "recv_into", "read", "readinto", "readline", "sigwait", "next_event"),
    }
)
_WAITING_FUNCTIONS: Final = frozenset({"wait", "_wait_for_tstate_lock", "select", "poll", "accept"})


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A line.

    Attributes:
        place: Its frame, with the function around a comprehension.
        call: The name of what it calls; empty if unknown.
    """

    place: Frame
    call: str


def script_lines(frames: Sequence[Frame]) -> list[ScriptLine]:
    """Return all lines of the script that a stack goes through, the innermost first.

    Args:
        frames: Innermost first.
    """
    return [line_at(frames, frame) for frame in frames if not is_library(frame.file)]


def running_line(frames: Sequence[Frame]) -> ScriptLine | None:
    """Return the innermost line of the script, else of a library, of a thread that runs; None if it waits.

    Args:
        frames: Innermost first.
    """
    if not frames or frames[0].call in _WAITING_CALLS or frames[0].function in _WAITING_FUNCTIONS:
        return None
    lines = script_lines(frames)
    return lines[0] if lines else line_at(frames, frames[0])


def line_at(frames: Sequence[Frame], place: Frame) -> ScriptLine:
    """Return the line of one of the frames, the innermost first."""
    number = next(number for number, frame in enumerate(frames) if frame is place)
    call = frames[number - 1].function if number else place.call
    if place.function in _COMPREHENSIONS:
        outer = next((frame for frame in frames[number:] if frame.function not in _COMPREHENSIONS), place)
        place = replace(place, function=outer.function)
    return ScriptLine(place, "" if call.startswith("<") else call)


_MODULE_FILE: Final = "torch/nn/modules/module.py"
_OPTIMIZER_FILES: Final = "torch/optim/"
_DEVICE_WAITS: Final = ("item", "cpu", "tolist", "numpy", "nonzero", "synchronize")
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
    if on_device and frames[0].call in _DEVICE_WAITS:
        return Part.WAIT
    # The outermost decides: a module may be called by an optimizer's closure, and a model has optimizers.
    for frame in reversed(frames):
        if is_library(frame.file):
            if frame.file.endswith(_MODULE_FILE):
                return Part.FORWARD
            if _OPTIMIZER_FILES in frame.file:
                return Part.OPTIMIZER
    return Part.OTHER
