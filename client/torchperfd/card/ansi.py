"""Colours of a terminal, for text that is written without a library."""

import os
import re
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
# Sequences with parameters (CSI), texts for the terminal (OSC and others), and single ones, also if cut off.
_CODE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)


def without_codes(words: str) -> str:
    """Return a text without the sequences that change a terminal's colours, cursor or title."""
    return _CODE.sub("", words) if "\x1b" in words or "\x9b" in words else words


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
