"""The line of a frame, also while CPython does not know it."""

from types import CodeType, FrameType


def line_of(frame: FrameType) -> int:
    """Return the line that a frame executes, counted from 1.

    ``frame.f_lineno`` is None while a frame is at an instruction without a line of its own. The line is then
    that of the nearest instruction before; without one, the first line of the function.
    """
    known: int | None = frame.f_lineno
    return line_at(frame.f_code, frame.f_lasti) if known is None else known


def line_at(code: CodeType, offset: int) -> int:
    """Return the line of an instruction, or of the nearest one before it that has a line.

    Args:
        offset: In bytes, as in ``frame.f_lasti``.
    """
    before = [line for start, _, line in code.co_lines() if line and start <= offset]
    return before[-1] if before else code.co_firstlineno
