"""Reads Python frames: their line, the name that they call, and the framework whose loop they are in.

Stacks can be read at random moments, also while C code holds the interpreter's lock. Reading them needs that
lock. CPython waits 5 ms before it takes the lock from another thread. C code that holds it for less has
returned by then, and the lock comes free at a later call that releases it. The stack would show that call.
So the wait is shortened for the one sample. A thread then loses the lock when its C code returns, in the
frame that called it.

A stack is read by one call of C code. Between two steps of Python the reading thread may lose the lock
again, and the thread that is read goes on: the outer frames would then be of a later moment than the inner.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat, takewhile, tee
from opcode import opname
from operator import call, itemgetter, methodcaller
from types import CodeType, FrameType
from typing import Any, Final


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


_CALLS: Final = frozenset({"CALL", "PRECALL", "CALL_KW", "CALL_FUNCTION_EX"})
_TRUTH_TESTS: Final = frozenset(
    {
        "TO_BOOL",
        "POP_JUMP_IF_TRUE",
        "POP_JUMP_IF_FALSE",
        "POP_JUMP_FORWARD_IF_TRUE",
        "POP_JUMP_FORWARD_IF_FALSE",
        "POP_JUMP_BACKWARD_IF_TRUE",
        "POP_JUMP_BACKWARD_IF_FALSE",
        "JUMP_IF_TRUE_OR_POP",
        "JUMP_IF_FALSE_OR_POP",
        "UNARY_NOT",
    }
)
# By how many bits a name's number is shifted in the argument: the lowest may be a flag.
_NAME_SHIFTS: Final = {
    "LOAD_NAME": 0,
    "LOAD_GLOBAL": 1,
    "LOAD_METHOD": 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
}
_ATTRIBUTES: Final = frozenset({"LOAD_METHOD", "LOAD_ATTR"})
_EXTENDED: Final = "EXTENDED_ARG"


def called_name(code: CodeType, offset: int) -> str:
    """Return what is called at an instruction: ``.item`` for an attribute, ``float`` for another name.

    ``bool`` for a test such as ``if loss:``. Empty where nothing with a name is called, and for code without
    positions (``-X no_debug_ranges``).

    Args:
        offset: In bytes, as in ``frame.f_lasti``.
    """
    instructions = code.co_code
    if not 0 <= offset < len(instructions):
        return ""
    # While it calls Python code, a frame of 3.11 is at the last cache entry of its call.
    while offset and opname[instructions[offset]] == "CACHE":
        offset -= 2
    operation = opname[instructions[offset]]
    if operation in _TRUTH_TESTS:
        return "bool"
    if operation not in _CALLS:
        return ""
    positions = list(code.co_positions())
    line, end_line, column, end_column = positions[offset // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return ""
    # `a.b(c).item()` ends behind `a.b(c).item`, and of all that begins where it begins that is the longest.
    best, name = (0, 0), ""
    for index, (other_line, other_end_line, other_column, other_end) in enumerate(positions[: offset // 2]):
        if (other_line, other_column) != (line, column) or other_end_line is None or other_end is None:
            continue
        if best <= (other_end_line, other_end) < (end_line, end_column):
            loaded = _loaded_name(code, index)
            if loaded or (other_end_line, other_end) > best:
                best, name = (other_end_line, other_end), loaded
    return name


def _loaded_name(code: CodeType, index: int) -> str:
    """Return the name that an instruction loads, with a dot before an attribute; empty for another one."""
    instructions = code.co_code
    operation = opname[instructions[2 * index]]
    if operation not in _NAME_SHIFTS:
        return ""
    argument, scale, at = instructions[2 * index + 1], 8, index - 1
    while at >= 0 and opname[instructions[2 * at]] == _EXTENDED:
        argument |= instructions[2 * at + 1] << scale
        scale, at = scale + 8, at - 1
    name = code.co_names[argument >> _NAME_SHIFTS[operation]]
    return f".{name}" if operation in _ATTRIBUTES else name


# Packages whose loops call the script, by what people call them. Those that a script's own loop calls
# into, such as accelerate, are none.
_FRAMEWORKS: Final = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
    "fastai": "fastai",
    "ignite": "ignite",
    "composer": "composer",
}


def framework_around(thread: int) -> str:
    """Return the framework whose loop a thread is in, by its frames now; empty for a plain loop.

    Of frameworks within one another the outermost counts. An imported package is no evidence:
    many a plain loop takes its model or its metrics from one.

    Args:
        thread: As ``threading.get_ident()`` numbers it.
    """
    found = ""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if isinstance(module, str):
            found = _FRAMEWORKS.get(module.partition(".")[0], found)
        frame = frame.f_back
    return found


Place = tuple[CodeType, int, int | None]
"""Where a frame is: its code, the offset of its instruction in bytes, and its line if CPython knows it."""
Stack = Sequence[Place]
"""The places of a thread's frames, innermost first, at most :data:`MAX_FRAMES`; no frame is kept."""
MAX_FRAMES: Final = 128
_PARTS: Final = ("f_code", "f_lasti", "f_lineno")

MAX_WAIT_S: Final = 0.03
"""The moment comes within this time. A request arrives when the lock is free, which is not at random."""
_SWITCH_S: Final = 1e-5
# sys.setswitchinterval() rounds microseconds down.
_HALF_MICROSECOND: Final = 5e-7

# Its own, since the script may have seeded the module's.
_chance = random.Random()
_interval_before: list[float] = []
"""The interval at which threads switch, while ours is in effect."""
_watches_forks = False


def stacks_at_random(sleep: Callable[[float], None] = time.sleep) -> dict[int, Stack]:
    """Return the stacks of all threads at a random moment; on one thread of a process at a time."""
    global _watches_forks
    if not _watches_forks:
        _watches_forks = True
        # A child that is forked meanwhile has no thread that would restore the interval.
        os.register_at_fork(after_in_child=_restore_interval)
    wait = partial(sleep, _chance.uniform(0.0, MAX_WAIT_S))
    try:
        # The interval is restored first of all, or a thread that waits for the lock would soon take it.
        return _stacks_after(_shorten_interval, wait, _restore_interval)
    finally:
        _restore_interval()


def stacks_now() -> dict[int, Stack]:
    """Return the stacks of all threads, by thread."""
    return _stacks_after()


def _stacks_after(*before: Callable[[], None]) -> dict[int, Stack]:
    """Call these functions, then read all threads."""
    # The list runs the iterators, all of them in C. No name holds them: they keep frames, and these tensors.
    rows = list(_rows_after(before))
    return {thread: _stack(parts) for thread, *parts in rows}


def _rows_after(before: Iterable[Callable[[], None]]) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over a row per thread: its id, then for each frame the parts of its place.

    Its first row calls the functions. Frames that a thread does not have are None.
    """
    frames = filter(None, map(call, (*before, sys._current_frames)))
    threads, stacks = tee(chain.from_iterable(map(methodcaller("items"), frames)))
    columns: list[Iterator[Any]] = [map(itemgetter(0), threads)]
    level: Iterator[Any] = map(itemgetter(1), stacks)
    for _ in range(MAX_FRAMES):
        *copies, inner = tee(level, 1 + len(_PARTS))
        columns += [
            map(getattr, *each, repeat(None)) for each in zip(copies, map(repeat, _PARTS), strict=True)
        ]
        level = map(getattr, inner, repeat("f_back"), repeat(None))
    return zip(*columns, strict=False)


def _stack(parts: Sequence[Any]) -> Stack:
    places = zip(*(parts[part :: len(_PARTS)] for part in range(len(_PARTS))), strict=True)
    return list(takewhile(itemgetter(0), places))


def _shorten_interval() -> None:
    _interval_before[:] = [sys.getswitchinterval()]
    sys.setswitchinterval(min(_SWITCH_S, _interval_before[0]))


def _restore_interval() -> None:
    while _interval_before:
        interval = _interval_before.pop()
        # Unless the script has set an interval of its own.
        if sys.getswitchinterval() <= 2 * _SWITCH_S:
            sys.setswitchinterval(interval + _HALF_MICROSECOND)
