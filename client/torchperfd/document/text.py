"""Text for people: safe for a terminal, within a number of columns, and in colours."""

import os
import re
import shutil
import textwrap
from typing import Final, Literal, TextIO, TypeAlias
from unicodedata import combining, east_asian_width

# A name in C++, with arguments of a template or of a function. The function's name says more than the
# scopes before it and the arguments after it.
_SIGNATURE: Final = re.compile(r"\w[<(]")
_SCOPES: Final = re.compile(r"(?:void )?(?:(?:\w+|\(anonymous namespace\)|<unnamed>)::)*")
_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[nµm]?s|min|h|%|[kKMGT]?i?B)(?:\W|$))")


def printable(text: str) -> str:
    """Return a text of several lines with ``?`` for each character that could drive a terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" or letter.isprintable() else "?" for letter in text)


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream is; None where it is none, so that any width fits."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def text_width(text: str) -> int:
    """Return how many columns a line takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def beginning(text: str, room: int) -> str:
    """Return as much of the beginning of a text as there is room for."""
    if text.isascii():
        return text[:room]
    used = 0
    for count, letter in enumerate(text):
        used += text_width(letter)
        if used > room:
            return text[:count]
    return text


def shortened(text: str, room: int) -> str:
    """Return a name with an ellipsis where it is wider than there is room.

    A name loses its middle, because beginning and end distinguish it. A signature in C++ loses its
    scopes and the end of its arguments.
    """
    if text_width(text) <= room:
        return text
    if _SIGNATURE.search(text):
        scopes = _SCOPES.match(text)
        rest = f"…{text[scopes.end() :]}" if scopes and scopes.end() else text
        return rest if text_width(rest) <= room else f"{beginning(rest, room - 1)}…"
    back = (room - 1) // 2
    return f"{beginning(text, room - 1 - back)}…{beginning(text[::-1], back)[::-1]}"


def fold_text(text: str, width: int | None, *, margin: int | None = None) -> str:
    """Return a text whose lines are folded at words, so that none is wider than a terminal.

    A word that is too long stays whole: the terminal folds it, and it can still be copied.

    Args:
        width: Columns of the terminal; None if the text is not for one.
        margin: Column at which the rest of a line begins; by default two columns after its beginning.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width, margin))


def _folded(line: str, most: int, margin: int | None) -> list[str]:
    if text_width(line) <= most:
        return [line]
    indent = len(line) - len(line.lstrip())
    # What textwrap does not take for a space keeps a number and its unit on one line.
    parts = textwrap.wrap(
        _BEFORE_UNIT.sub("\xa0", line.strip()),
        most,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2 if margin is None else margin),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace("\xa0", " ") for part in parts]


Style: TypeAlias = Literal["", "bad", "warn", "good", "bold", "dim", "bar"]

_CODES: Final[dict[Style, str]] = {
    "bad": "1;31",
    "warn": "1;33",
    "good": "1;32",
    "bold": "1",
    "dim": "2",
    "bar": "36",
}
# Sequences with parameters (CSI), texts for the terminal (OSC and others), and single ones, also if cut off.
_CODE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)


def without_codes(words: str) -> str:
    """Return a text without the sequences that change a terminal's colours, cursor or title."""
    return _CODE.sub("", words) if "\x1b" in words or "\x9b" in words else words


def paint(words: str, style: Style, *, colour: bool) -> str:
    return f"\x1b[{_CODES[style]}m{words}\x1b[0m" if colour and style and words else words


def wants_colour(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours, and the user has not set ``NO_COLOR``."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()
