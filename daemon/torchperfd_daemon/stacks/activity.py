"""Derives a thread's activity from its stack: its kind, its line of the script, and the part of the step.

A thread that loads data has a stage of loading as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from torchperfd.model.source_lines import HOOKS_FOLDER, WRAPPED_DRAWS_FILE
from torchperfd_daemon.stacks.model import Frame, Thread

# The outermost of these frames is the function that the script called: all_gather_object, not all_gather.
_COLLECTIVE_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
# DistributedDataParallel calls its own collectives from C++, directly below these.
_REPLICATION_FILES: Final = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
_REPLICATES: Final = ("sync", "broadcast", "verify")
_ENGINE: Final = ("torch/autograd/graph.py", "_engine_run_backward")
_LOADER_FILES: Final = ("torch/utils/data/dataloader.py", WRAPPED_DRAWS_FILE)
# The client's hooks are called between the script and torch, and never wait themselves.
_LIBRARY_PATHS: Final = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    HOOKS_FOLDER,
    WRAPPED_DRAWS_FILE,
)


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
    innermost = next((frame for frame in frames if HOOKS_FOLDER not in frame.file), frames[0])
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


_DATA: Final = "torch/utils/data/"
_FETCHER: Final = ("torch/utils/data/_utils/fetch.py", "fetch")
_COLLATE: Final = "torch/utils/data/_utils/collate.py"
_PIN: Final = "torch/utils/data/_utils/pin_memory.py"
_WORKER: Final = ("torch/utils/data/_utils/worker.py", "_worker_loop")
_ITERATOR: Final = "torch/utils/data/dataloader.py"
_SAMPLE: Final = "_next_index"
_RECEIVES: Final = ("_get_data", "_try_get_data", "_next_data")


class Stage(Enum):
    """A stage of loading a batch.

    ``FETCH`` is the dataset's work, ``SAMPLER`` the choice of indices, ``SEND`` the hand-over of a batch by a
    worker. ``WAIT`` loads nothing: a worker waits for indices, or the training thread for a worker.
    """

    WAIT = "wait"
    SAMPLER = "sampler"
    FETCH = "fetch"
    COLLATE = "collate"
    PIN = "pin"
    SEND = "send"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Loading:
    """What a thread does to load data.

    Attributes:
        place: The innermost frame of the script within the stage. If the script has none there, the frame at
            which the stage enters a library. None if neither is known.
        call: What that frame calls; empty if unknown.
        caller: The outermost frame of the script within the stage, if it is another function's.
    """

    stage: Stage
    place: Frame | None = None
    call: str = ""
    caller: Frame | None = None


def loading(thread: Thread) -> Loading | None:
    """Return what a thread does to load data; None if it does something else."""
    frames = worker_frames(thread.frames) if thread.worker_pid else thread.frames
    fetcher = _outermost(frames, *_FETCHER)
    if fetcher is not None:
        inner = frames[:fetcher]
        collates = frames[fetcher].call == "collate_fn" or any(_is_in(frame, _COLLATE) for frame in inner)
        return _at(Stage.COLLATE if collates else Stage.FETCH, inner)
    if any(_is_in(frame, _PIN) for frame in frames):
        return Loading(Stage.PIN)
    if thread.worker_pid:
        call = frames[-1].call if frames else ""
        if call in ("get", "put"):
            return Loading(Stage.WAIT if call == "get" else Stage.SEND)
        # A worker begins with the script's `worker_init_fn`, and makes the dataset's iterator.
        return _at(Stage.OTHER, frames[:-1])
    sampler = _outermost(frames, _ITERATOR, _SAMPLE)
    if sampler is not None:
        return _at(Stage.SAMPLER, frames[:sampler])
    if any(_is_in(frame, _ITERATOR) and frame.function in _RECEIVES for frame in frames):
        return Loading(Stage.WAIT)
    if any(_is_in(frame, _ITERATOR) for frame in frames):
        return Loading(Stage.OTHER)  # it starts workers, for example
    wrapped = _outermost(frames, WRAPPED_DRAWS_FILE, "__next__")
    return _at(Stage.FETCH, frames[:wrapped]) if wrapped is not None else None


def worker_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return a worker's frames down to its loop; the rest shows how it was started."""
    loop = _outermost(frames, *_WORKER)
    return tuple(frames if loop is None else frames[: loop + 1])


def _at(stage: Stage, inner: Sequence[Frame]) -> Loading:
    """Return a stage with its place, given its frames, the innermost first."""
    place = place_in_script(inner)
    if place is None:
        entered = [frame for frame in inner if not _is_in(frame, _FETCHER[0])]
        place = next((frame for frame in reversed(entered) if _DATA not in frame.file), None)
        place = place or (entered[-1] if entered else None)
    if place is None:
        return Loading(stage)
    line = line_at(inner, place)
    lines = script_lines(inner)
    # A comprehension is a part of its function.
    is_same = not lines or _function(lines[-1].place) == _function(line.place)
    return Loading(stage, line.place, line.call, None if is_same else lines[-1].place)


def _function(frame: Frame) -> tuple[str, str]:
    return frame.file, frame.function


def _outermost(frames: Sequence[Frame], file: str, function: str) -> int | None:
    """Return the number of the outermost frame of a function: a dataset may have a loader of its own."""
    found = (
        number
        for number in reversed(range(len(frames)))
        if frames[number].function == function and _is_in(frames[number], file)
    )
    return next(found, None)


def _is_in(frame: Frame, file: str) -> bool:
    return frame.file.endswith(file) and is_library(frame.file)
