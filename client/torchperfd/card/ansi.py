"""Colours of a terminal, for text that is written without a library."""

import os
from typing import Final, TextIO

from torchperfd.text_tables import terminal_width

_CODES: Final = {
    "bad": "1;31",
    "warn": "1;33",
    "good": "1;32",
    "bold": "1",
    "dim": "2",
    "bar": "36",
}
_WIDTHS: Final = (60, 100)


def paint(words: str, style: str, *, colour: bool) -> str:
    """Return words in a style: ``bad``, ``warn``, ``good``, ``bold``, ``dim`` or ``bar``."""
    return f"\x1b[{_CODES[style]}m{words}\x1b[0m" if colour and words else words


def wants_colour(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours, and the user has not set ``NO_COLOR``."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def width_of(stream: TextIO) -> int:
    """Return the width for text on a stream, 60 to 100 columns; 80 unless it is a terminal."""
    columns = terminal_width(stream)
    if columns is None:
        return 80
    least, most = _WIDTHS
    return max(least, min(most, columns))
