"""Reads values of a report that anyone may have written, and names what goes wrong with such files.

Numbers are within bounds, text is safe for a terminal.
"""

import math
from typing import Any, Final

from torchperfd.errors import TorchperfdError

_MAX_TEXT: Final = 400
MOST: Final = 1e12
"""Seconds and steps beyond any run; products of such numbers do not overflow."""
MAX_LARGE: Final = 1e21
"""The same for what a run has more of: tokens, bytes and floating-point operations."""


def number(value: Any, most: float = MOST) -> float:
    """Return a number from 0 to ``most``.

    Raises:
        ValueError: It is something else.
    """
    found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= found <= most:
        raise ValueError("a number is missing, negative or not finite")
    return found


def optional(value: Any, most: float = MOST) -> float | None:
    """Return a number, or None for null."""
    return None if value is None else number(value, most)


def count(value: Any, most: float = MOST) -> int:
    """Return a number without its fraction."""
    return int(number(value, most))


def text(value: Any) -> str:
    """Return a text that cannot drive a terminal; an empty one for null.

    Raises:
        ValueError: It is no text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError("a text is missing")
    return clean(value)


def clean(words: str) -> str:
    """Return the beginning of a text, without characters that cannot be printed."""
    words = words[:_MAX_TEXT]
    return words if words.isprintable() else "".join(each if each.isprintable() else "?" for each in words)


class RunFileError(TorchperfdError):
    """A file is no report of a run, or cannot be read."""


class NoSuchRunError(TorchperfdError):
    """No kept run has the name, or several begin with it."""

    exit_code = 3
