"""Derives from a stack what a thread does to load data: the stage, and the line of the script."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from torchperfd_daemon.stacks.activity import is_library, line_at, place_in_script, script_lines
from torchperfd_daemon.stacks.model import DRAWS, Frame, Thread

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
    wrapped = _outermost(frames, DRAWS, "__next__")
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
