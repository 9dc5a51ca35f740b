"""The line of a frame, also while CPython does not know it."""

from types import FrameType


def line_of(frame: FrameType) -> int:
    """Return the line that a frame executes, counted from 1.

    ``frame.f_lineno`` is None while a frame is at an instruction without a line of its own. The line is then
    that of the nearest instruction before; without one, the first line of the function.
    """
    known: int | None = frame.f_lineno
    if known is not None:
        return known
    before = [line for start, _, line in frame.f_code.co_lines() if line and start <= frame.f_lasti]
    return before[-1] if before else frame.f_code.co_firstlineno
