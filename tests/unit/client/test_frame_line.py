"""The line of a frame that is between lines."""

import sys
from types import CodeType, FrameType, SimpleNamespace
from typing import cast

import pytest

from torchperfd.stacks.thread_frames import line_of
from torchperfd.stacks.worker_stacks import stack_lines


def two_lines() -> int:
    first = 1
    return first + 1


def between_lines(code: CodeType, offset: int) -> FrameType:
    """Return a frame at an instruction of which CPython does not know the line."""
    return cast("FrameType", SimpleNamespace(f_code=code, f_lasti=offset, f_lineno=None, f_back=None))


def test_line_of_a_frame_is_the_one_it_executes() -> None:
    frame = sys._getframe()
    assert line_of(frame) == frame.f_lineno


def test_line_between_lines_is_the_nearest_before() -> None:
    code = two_lines.__code__
    last = max(start for start, _, line in code.co_lines() if line)
    assert line_of(between_lines(code, last)) == code.co_firstlineno + 2


@pytest.mark.parametrize("offset", [-1, 4])
def test_line_without_any_before_is_the_first(offset: int) -> None:
    code = two_lines.__code__.replace(co_linetable=b"") if offset > 0 else two_lines.__code__
    assert line_of(between_lines(code, offset)) == code.co_firstlineno


def test_stack_of_a_frame_between_lines_has_a_line() -> None:
    [line] = stack_lines(between_lines(two_lines.__code__, -1))
    assert line.line == two_lines.__code__.co_firstlineno
