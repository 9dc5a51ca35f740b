"""How a duration is written for people; reports, commands and verdicts all write it this way."""

from typing import Final

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
