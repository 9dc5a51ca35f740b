"""Tables, and how they are drawn within the columns of a terminal: no number and no id is ever cut."""

import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final

from torchperfd.document.text import Style, fold_text, shortened, text_width
from torchperfd.model.formatting import one_line

_GAP: Final = 2
_MIN_CELL: Final = 12
"""Characters that a narrowed cell keeps."""
_HEAD_LINES: Final = 2


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
        if text.isascii():
            return text.ljust(self.width) if self.is_left else text.rjust(self.width)
        padding = " " * (self.width - text_width(text))
        return text + padding if self.is_left else padding + text

    def align_all(self, texts: Sequence[str]) -> Iterable[str]:
        """Yield the cells of all rows; each is one line."""
        if not "".join(texts).isascii():
            return map(self.align, texts)
        return map(str.ljust if self.is_left else str.rjust, texts, repeat(self.width))


@dataclass(frozen=True, slots=True)
class Table:
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
        indent: Columns before each line.
        plain_width: Columns off a terminal; None for any number.
        is_grouped: Whether cells of the first column that are not empty begin groups.
        has_rule: Whether a line is below the heads.
        head_style: The style of the heads.
        styles: Of the rows; in Markdown, those with one are bold.
        notes: Behind each row: a mark, two spaces, and words, which are below it where there is no room.
        caption: The line above it.
        shares: Lengths, 0 to 1, of the bars that HTML shows behind the last cells.
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
    indent: int = 0
    plain_width: int | None = None
    is_grouped: bool = False
    has_rule: bool = False
    head_style: Style = ""
    styles: Sequence[Style] = ()
    notes: Sequence[str] = ()
    caption: str = ""
    shares: Sequence[float] = ()

    @property
    def natural_width(self) -> int:
        """Columns that it takes unchanged, without its indent; found much sooner than by drawing it."""
        widths = [
            _widest([one_line(head, len(head)), *cells])
            for head, *cells in zip(self.heads, *self.rows, strict=True)
        ]
        while widths and not widths[-1]:
            widths.pop()
        return sum(widths) + self.gap * max(0, len(widths) - 1)

    def draw(self, width: int | None = None) -> DrawnTable:
        """Return the table no wider than a terminal, changed only as far as that demands.

        Args:
            width: Columns that it may take; None if any width fits.
        """
        rows = [
            row if "".join(row).isprintable() else [one_line(cell, len(cell)) for cell in row]
            for row in self.rows
        ]
        drawn = self._drawn(rows, _Arrangement(gap=self.gap), width)
        if width is None or drawn.width <= width:
            return drawn
        for count in range(len(self.lift) + 1):
            arrangement = _Arrangement(self.lift[:count], self.folds_heads)
            drawn = self._drawn(rows, arrangement, width)
            narrowed: Sequence[Sequence[str]] = rows
            for head, narrow in ((self.shorten, shortened), (self.fold, fold_text)):
                if drawn.width <= width:
                    return drawn
                if head and head not in arrangement.moved:
                    narrowed = _narrowed(narrowed, self.heads.index(head), drawn.width - width, narrow)
                    drawn = self._drawn(narrowed, arrangement, width)
            if drawn.width <= width:
                return drawn
        return drawn

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
        blocks = _blocks(columns, [[row[number] for row in rows] for number in kept], gap)
        widest = _widest([*head, *chain(*blocks)])
        if moved:
            for block, above in zip(blocks, self._lines_above(rows, moved, width), strict=True):
                block[:0] = above
        return DrawnTable(head, blocks, widest)

    def _column(self, number: int, rows: Sequence[Sequence[str]], *, folds_head: bool) -> _Column:
        head = self.heads[number]
        width = _widest_cell(rows, number)
        name = one_line(head, len(head))
        drawn = _stacked(name, width) if folds_head else name
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
    room = max(_MIN_CELL, _widest_cell(rows, column) - excess)
    return [[*row[:column], narrow(row[column], room), *row[column + 1 :]] for row in rows]


def _stacked(head: str, width: int) -> str:
    """Return a head that is wider than its cells on two lines, as narrow as these allow; words stay whole."""
    for room in range(max([width, *map(len, head.split())]), len(head)):
        lines = textwrap.wrap(head, room, break_on_hyphens=False)
        if len(lines) <= _HEAD_LINES:
            return "\n".join(lines)
    return head


def _blocks(columns: Sequence[_Column], cells: Sequence[Sequence[str]], gap: str) -> list[list[str]]:
    """Return the lines of each row, of the cells of each column."""
    if any("\n" in "".join(each) for each in cells):
        return [_lines(columns, row, gap) for row in zip(*cells, strict=True)]
    # Column by column, which takes a third of the time of row by row.
    aligned = map(_Column.align_all, columns, cells)
    return [[gap.join(row).rstrip()] for row in zip(*aligned, strict=True)]


def _lines(
    columns: Sequence[_Column], cells: Sequence[str], gap: str, *, at_bottom: bool = False
) -> list[str]:
    """Return the lines of a row; cells of fewer lines are at the top or at the bottom."""
    if cells and "\n" not in "".join(cells):
        return [gap.join(map(_Column.align, columns, cells)).rstrip()]
    parts = [cell.split("\n") for cell in cells]
    height = max(map(len, parts), default=0)
    drawn = []
    for column, part in zip(columns, parts, strict=True):
        blank = [""] * (height - len(part))
        drawn.append(map(column.align, blank + part if at_bottom else part + blank))
    return [gap.join(line).rstrip() for line in zip(*drawn, strict=True)]


def _widest(texts: Sequence[str]) -> int:
    joined = "".join(texts)
    plain = joined.isascii() and "\n" not in joined
    return max(map(len if plain else _cell_width, texts), default=0)


def _widest_cell(rows: Sequence[Sequence[str]], column: int) -> int:
    return _widest([row[column] for row in rows])


def _cell_width(cell: str) -> int:
    return max(map(text_width, cell.split("\n")))
