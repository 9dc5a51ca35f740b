"""Text that fits a terminal: tables and sentences within a number of columns, and colours.

No number and no id is ever cut.
"""

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TextIO
from unicodedata import combining, east_asian_width

_GAP: Final = 2
_LEAST: Final = 12
"""Characters that a narrowed cell keeps."""
_HEAD_LINES: Final = 2

# A name in C++, with arguments of a template or of a function. The function's name says more than the
# scopes before it and the arguments after it.
_SIGNATURE: Final = re.compile(r"\w[<(]")
_SCOPES: Final = re.compile(r"(?:void )?(?:(?:\w+|\(anonymous namespace\)|<unnamed>)::)*")
_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[nµm]?s|min|h|%|[kKMGT]?i?B)(?:\W|$))")


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


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """The lines of a table.

    Attributes:
        head: Lines with the heads.
        rows: For each row its lines, and before them those of cells that have moved above it.
        width: Columns of its widest line, without what has moved.
    """

    head: list[str]
    rows: list[list[str]]
    width: int

    @property
    def lines(self) -> list[str]:
        """All of them, in their order."""
        return [*self.head, *(line for row in self.rows for line in row)]


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """How a table is drawn.

    Attributes:
        moved: Heads of the columns that are on lines above their rows.
        folds_heads: Whether heads of several words may take two lines.
        gap: Columns between two cells.
    """

    moved: Sequence[str] = ()
    folds_heads: bool = False
    gap: int = _GAP


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table, and how it may change where it is too wide; cells that may not change stay whole.

    Attributes:
        rows: Cells, as many in each row as there are heads.
        left: Heads of the columns that are flush left; the others are flush right.
        shorten: Head of the column whose cells may be shortened.
        fold: Head of the column whose cells may be folded onto several lines.
        lift: Heads of the columns that may move to lines above their rows, the first to move first.
        labels_lifted: Whether such a line begins with the head; else the head is above the other heads.
        folds_heads: Whether heads of several words may take two lines, which comes before all else.
        gap: Columns between two cells, where there is room.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    shorten: str = ""
    fold: str = ""
    lift: Sequence[str] = ()
    labels_lifted: bool = True
    folds_heads: bool = False
    gap: int = _GAP

    def draw(self, width: int | None = None) -> DrawnTable:
        """Return the table no wider than a terminal, changed only as far as that demands.

        Args:
            width: Columns of the terminal; None if any width fits.
        """
        drawn = self._drawn(self.rows, _Arrangement(gap=self.gap), width)
        if width is None or drawn.width <= width:
            return drawn
        for count in range(len(self.lift) + 1):
            arrangement = _Arrangement(self.lift[:count], self.folds_heads)
            rows = self.rows
            drawn = self._drawn(rows, arrangement, width)
            for head, narrow in ((self.shorten, shortened), (self.fold, _folded_cell)):
                if drawn.width <= width:
                    return drawn
                if head and head not in arrangement.moved:
                    rows = _narrowed(rows, self.heads.index(head), drawn.width - width, narrow)
                    drawn = self._drawn(rows, arrangement, width)
            if drawn.width <= width:
                return drawn
        return drawn

    def draw_lifted(self) -> DrawnTable:
        """Return the table with all columns moved that may move."""
        return self._drawn(self.rows, _Arrangement(self.lift), None)

    def _drawn(
        self, rows: Sequence[Sequence[str]], arrangement: _Arrangement, width: int | None
    ) -> DrawnTable:
        moved = {name: self.heads.index(name) for name in arrangement.moved if name in self.heads}
        kept = [column for column in range(len(self.heads)) if column not in moved.values()]
        heads = [self.heads[column] for column in kept]
        is_left = [head in self.left for head in heads]
        widths = [max((_cell_width(row[column]) for row in rows), default=0) for column in kept]
        if arrangement.folds_heads:
            heads = [_stacked(head, wide) for head, wide in zip(heads, widths, strict=True)]
        widths = [max(wide, _cell_width(head)) for head, wide in zip(heads, widths, strict=True)]

        def lines(cells: Sequence[str], *, at_bottom: bool = False) -> list[str]:
            return [
                (" " * arrangement.gap)
                .join(
                    _aligned(cell, wide, is_left=left)
                    for cell, wide, left in zip(line, widths, is_left, strict=True)
                )
                .rstrip()
                for line in _split(cells, at_bottom=at_bottom)
            ]

        head = [*(() if self.labels_lifted else moved), *lines(heads, at_bottom=True)]
        body = [lines([row[column] for column in kept]) for row in rows]
        widest = max((text_width(line) for block in (head, *body) for line in block), default=0)
        before = [""] * len(moved)
        for row, block in zip(rows, body, strict=True):
            here = [row[column] for column in moved.values()]
            changed = next(
                (n for n, pair in enumerate(zip(here, before, strict=True)) if len({*pair}) > 1), None
            )
            if changed is not None:
                above = list(zip(moved, here, strict=True))[changed:]
                block[:0] = [self._lifted(name, cell, width) for name, cell in above]
            before = here
        return DrawnTable(head, body, widest)

    def _lifted(self, head: str, cell: str, width: int | None) -> str:
        if width is not None and head == self.shorten:
            cell = shortened(cell, width)
        return f"{head.lower()} {cell}" if self.labels_lifted else cell


def _narrowed(
    rows: Sequence[Sequence[str]], column: int, excess: int, narrow: Callable[[str, int], str]
) -> list[list[str]]:
    """Return rows in which a column is narrower by so many columns."""
    room = max(_LEAST, max((_cell_width(row[column]) for row in rows), default=0) - excess)
    return [[*row[:column], narrow(row[column], room), *row[column + 1 :]] for row in rows]


def _stacked(head: str, width: int) -> str:
    """Return a head that is wider than its cells on two lines, as narrow as these allow; words stay whole."""
    for room in range(max([width, *map(len, head.split())]), len(head)):
        lines = textwrap.wrap(head, room, break_on_hyphens=False)
        if len(lines) <= _HEAD_LINES:
            return "\n".join(lines)
    return head


def _split(cells: Sequence[str], *, at_bottom: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row line by line; cells of fewer lines are at the top or at the bottom."""
    parts = [cell.split("\n") for cell in cells]
    height = max(map(len, parts), default=0)
    blank = [[""] * (height - len(part)) for part in parts]
    return zip(
        *(
            [*space, *part] if at_bottom else [*part, *space]
            for part, space in zip(parts, blank, strict=True)
        ),
        strict=True,
    )


def _aligned(cell: str, width: int, *, is_left: bool) -> str:
    padding = " " * (width - text_width(cell))
    return cell + padding if is_left else padding + cell


def _cell_width(cell: str) -> int:
    return max(map(text_width, cell.split("\n")))


def _folded_cell(cell: str, room: int) -> str:
    return "\n".join(_folded(cell, room, None))


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
