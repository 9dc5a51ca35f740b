"""Reads values of a report that anyone may have written: numbers within bounds, text safe for a terminal."""

import math
from typing import Any, Final

_MAX_TEXT: Final = 400
MAX_NUMBER: Final = 1e12
"""Seconds and steps beyond any run; products of such numbers do not overflow."""
MAX_LARGE: Final = 1e21
"""The same for what a run has more of: tokens, bytes and floating-point operations."""
MAX_INT: Final = 2**31 - 1
"""The largest whole number that any field of a message holds."""


def number(value: Any, most: float = MAX_NUMBER) -> float:
    """Return a number from 0 to ``most``.

    Raises:
        ValueError: It is something else.
    """
    found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= found <= most:
        raise ValueError("a number is missing, negative or not finite")
    return found


def optional(value: Any, most: float = MAX_NUMBER) -> float | None:
    """Return a number, or None for null."""
    return None if value is None else number(value, most)


def count(value: Any, most: float = MAX_NUMBER) -> int:
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
