"""How durations, sizes and suggestions for mistyped names are written, and how values of reports are read.

Reports, commands and verdicts all write them this way. Anyone may have written a report that is read again:
numbers are kept within bounds, and text is safe for a terminal.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

_PAIRS: Final = (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86_400, "h", 3600))


def duration(seconds: float) -> str:
    """Return a duration in the unit that reads best, never off by more than half a percent.

    Below 100 s it has three significant digits; above it is two whole units, and goes on to larger ones
    from 100 of the smaller on: ``22.3 s``, ``2 min 5 s``, ``1 h 40 min``, ``8 d 3 h``.
    """
    if seconds < 0:
        return f"-{duration(-seconds)}"
    # What three digits would round up to 1000 of one unit is 1 of the next.
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if scale * 0.99949 <= seconds < 99.95:
            return f"{seconds / scale:.3g} {unit}"
    if seconds < 1:
        return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"
    unit, size, smaller, part = next((row for row in _PAIRS if seconds < 100 * row[1]), _PAIRS[-1])
    parts = round(seconds / part)
    return f"{parts * part // size:,} {unit} {parts * part % size // part} {smaller}"


def ns_text(nanoseconds: float) -> str:
    """Return a duration of so many nanoseconds, written as :func:`duration` does."""
    return duration(nanoseconds / 1e9)


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    """Return a time in milliseconds, without the unit: ``0.04``, ``12.3``, ``1234``; ``-`` for None.

    Args:
        digits: Decimals below 10 ms; one less from there on, and two less from 100 ms on.
    """
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.{digits - (value >= 9.995) - (value >= 99.95)}f}"


def size(count: int) -> str:
    """Return bytes in the unit that reads best, three significant digits."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # From 1000 on, three digits read better in the next unit.
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


_MIN_ALIKE: Final = 0.8
_MAX_SUGGESTED: Final = 2
_MIN_BEGINNING: Final = 3
"""Characters: two are the beginning of too many names."""
_MAX_COMPARED: Final = 120
"""Characters, since the comparison takes their number squared."""


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return the names nearest to one that does not exist, as a question; empty if none is near.

    The beginning of a name counts as the name, since commands take one for the other.
    """
    from difflib import SequenceMatcher

    given = given[:_MAX_COMPARED]
    matcher = SequenceMatcher(None, b=given, autojunk=False)

    def alike(name: str) -> float:
        best = 0.0
        for beginning in {
            name[:length] for length in range(max(len(given) - 1, _MIN_BEGINNING), len(given) + 2)
        } | {name}:
            matcher.set_seq1(beginning[:_MAX_COMPARED])
            if matcher.quick_ratio() >= _MIN_ALIKE:
                best = max(best, matcher.ratio())
        return best

    ranked = sorted((-alike(name), name) for name in set(names))
    near = [name for score, name in ranked if -score >= _MIN_ALIKE]
    return f"did you mean {' or '.join(near[:_MAX_SUGGESTED])}?" if near else ""


MAX_TEXT: Final = 400
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
    return None if value is None else number(value, most)


def count(value: Any, most: float = MAX_NUMBER) -> int:
    """Return a number without its fraction."""
    return int(number(value, most))


def text(value: Any, most: int = MAX_TEXT) -> str:
    """Return at most ``most`` characters of a text, which cannot drive a terminal; an empty one for null.

    Raises:
        ValueError: It is no text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError("a text is missing")
    return one_line(value, most)


def clean(words: str) -> str:
    """Return the beginning of a text, without characters that cannot be printed."""
    return one_line(words, MAX_TEXT)


def one_line(text: str, most: int) -> str:
    """Return at most ``most`` characters of a text, with ``?`` for each that is not printable.

    Not printable are control characters (C0, C1, DEL), line and paragraph separators, bidirectional
    overrides and other format characters, surrogates, and spaces other than the ASCII one.
    """
    text = text[:most]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
