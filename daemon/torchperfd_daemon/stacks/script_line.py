"""The lines of the script that a stack goes through, and what each calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperfd_daemon.stacks.activity import is_library
from torchperfd_daemon.stacks.model import Frame

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
