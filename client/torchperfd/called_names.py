"""The name of what a frame is calling at this moment, from its bytecode alone."""

import sys
from opcode import opname
from types import CodeType
from typing import Final

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
