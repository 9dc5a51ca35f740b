"""Words for places in the code."""

import re
from typing import Final

from torchperfd_daemon.memory.model import Frame, Stack
from torchperfd_daemon.text import one_line

_LIBRARY: Final = re.compile(
    r"(?:^|.*/)(?:(?:site|dist)-packages/|lib/python3[.\d]*t?/|(?=(?:torch|torchperfd)/))"
)
# C++ frames have no such name, nor has what Python freezes or torch generates (`<eval_with_key>.3`).
_PYTHON: Final = re.compile(r".*\.py|<ipython-input.*|<stdin>|<string>", re.DOTALL)
_MOST_LETTERS: Final = 80


def user_frame(stack: Stack) -> Frame | None:
    """Return the innermost Python frame outside of torch, Python and installed packages; None without one."""
    return next(
        (
            frame
            for frame in stack
            if _PYTHON.fullmatch(frame.filename) and not _LIBRARY.match(frame.filename)
        ),
        None,
    )


def place_text(stack: Stack) -> str:
    """Return the user's line that allocated, and the line within a library that it called."""
    if not stack:
        return "no stack recorded"
    user = user_frame(stack)
    # C++ frames are those of the allocator in the first place.
    inner = next((frame for frame in stack if frame.filename.endswith(".py")), stack[0])
    if user is None or user == inner or inner not in stack[: stack.index(user)]:
        return _frame_text(user or inner)
    return f"{_frame_text(user)}, within {_frame_text(inner)}"


def _frame_text(frame: Frame) -> str:
    short = _LIBRARY.sub("", frame.filename)
    name = short if short != frame.filename else short.rsplit("/", 1)[-1]
    return one_line(f"{name or '?'}:{frame.line or '?'} in {frame.name or '?'}", _MOST_LETTERS)
