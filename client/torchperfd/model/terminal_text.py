"""Text for people: names, sentences and tables within the columns of a terminal, colours, and Markdown."""

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Final, TextIO
from unicodedata import combining, east_asian_width

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


_GAP: Final = 2
_LEAST: Final = 12
"""Characters that a narrowed cell keeps."""
_HEAD_LINES: Final = 2
_SPECIAL_IN_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]|~])")


def escape_markdown(text: str) -> str:
    """Return a text that means nothing but itself in GitHub-flavoured Markdown."""
    return _SPECIAL_IN_MARKDOWN.sub(r"\\\1", escape(text, quote=False))


def markdown_table(heads: Sequence[str], rule: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table as GitHub-flavoured Markdown.

    Args:
        rule: The line below the heads, which says how columns are aligned.
        rows: Cells that are escaped.
    """
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return [head, rule, *lines]


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
class _Column:
    """A column as it is drawn; its head may take several lines."""

    head: str
    width: int
    is_left: bool

    def align(self, text: str) -> str:
        padding = " " * (self.width - text_width(text))
        return text + padding if self.is_left else padding + text


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
            for head, narrow in ((self.shorten, shortened), (self.fold, fold_text)):
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
        moved = [self.heads.index(head) for head in arrangement.moved if head in self.heads]
        kept = [number for number in range(len(self.heads)) if number not in moved]
        columns = [self._column(number, rows, folds_head=arrangement.folds_heads) for number in kept]
        gap = " " * arrangement.gap
        head = _lines(columns, [column.head for column in columns], gap, at_bottom=True)
        if not self.labels_lifted:
            head[:0] = [self.heads[number] for number in moved]
        blocks = [_lines(columns, [row[number] for number in kept], gap) for row in rows]
        widest = max(map(text_width, chain(head, *blocks)), default=0)
        for block, above in zip(blocks, self._lines_above(rows, moved, width), strict=True):
            block[:0] = above
        return DrawnTable(head, blocks, widest)

    def _column(self, number: int, rows: Sequence[Sequence[str]], *, folds_head: bool) -> _Column:
        head = self.heads[number]
        width = _widest_cell(rows, number)
        drawn = _stacked(head, width) if folds_head else head
        return _Column(drawn, max(width, _cell_width(drawn)), head in self.left)

    def _lines_above(
        self, rows: Sequence[Sequence[str]], moved: Sequence[int], width: int | None
    ) -> Iterator[list[str]]:
        """Yield for each row its moved cells, from the first that differs from the row before."""
        before = [""] * len(moved)
        for row in rows:
            cells = [row[number] for number in moved]
            same = next((place for place, cell in enumerate(cells) if cell != before[place]), len(moved))
            yield [self._lifted(self.heads[number], row[number], width) for number in moved[same:]]
            before = cells

    def _lifted(self, head: str, cell: str, width: int | None) -> str:
        if width is not None and head == self.shorten:
            cell = shortened(cell, width)
        return f"{head.lower()} {cell}" if self.labels_lifted else cell


def _narrowed(
    rows: Sequence[Sequence[str]], column: int, excess: int, narrow: Callable[[str, int], str]
) -> list[list[str]]:
    """Return rows in which a column is narrower by so many columns."""
    room = max(_LEAST, _widest_cell(rows, column) - excess)
    return [[*row[:column], narrow(row[column], room), *row[column + 1 :]] for row in rows]


def _stacked(head: str, width: int) -> str:
    """Return a head that is wider than its cells on two lines, as narrow as these allow; words stay whole."""
    for room in range(max([width, *map(len, head.split())]), len(head)):
        lines = textwrap.wrap(head, room, break_on_hyphens=False)
        if len(lines) <= _HEAD_LINES:
            return "\n".join(lines)
    return head


def _lines(
    columns: Sequence[_Column], cells: Sequence[str], gap: str, *, at_bottom: bool = False
) -> list[str]:
    """Return the lines of a row; cells of fewer lines are at the top or at the bottom."""
    parts = [cell.split("\n") for cell in cells]
    height = max(map(len, parts), default=0)
    drawn = []
    for column, part in zip(columns, parts, strict=True):
        blank = [""] * (height - len(part))
        drawn.append(map(column.align, blank + part if at_bottom else part + blank))
    return [gap.join(line).rstrip() for line in zip(*drawn, strict=True)]


def _widest_cell(rows: Sequence[Sequence[str]], column: int) -> int:
    return max((_cell_width(row[column]) for row in rows), default=0)


def _cell_width(cell: str) -> int:
    return max(map(text_width, cell.split("\n")))
