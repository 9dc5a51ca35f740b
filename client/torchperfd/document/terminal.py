"""A document for a terminal or a pipe: no line wider than there is room, colours only where wanted."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TextIO

from torchperfd.document.blocks import (
    Bars,
    Block,
    Code,
    Document,
    Facts,
    FirstThatFits,
    Fold,
    Heading,
    Item,
    Panel,
    Sentences,
)
from torchperfd.document.tables import Table
from torchperfd.document.text import (
    Style,
    fold_text,
    paint,
    printable,
    terminal_width,
    text_width,
    wants_colour,
)

_READING_WIDTHS: Final = (60, 100)
_OFF_TERMINAL: Final = 80
_ITEM_INDENT: Final = 3
_GAP: Final = 2
_BLOCKS: Final = " ▏▎▍▌▋▊▉"
_BAR_WIDTHS: Final = (10, 40)
_NUMBER: Final = 9
_PERCENT: Final = 5


@dataclass(frozen=True, slots=True)
class Page:
    """What a document is laid out for.

    Attributes:
        columns: Of the terminal; None if the text is not for one, so that any width fits.
        reading: Columns of text that is folded in any case.
        colour: Whether styles are shown.
    """

    columns: int | None = None
    reading: int = _OFF_TERMINAL
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> "Page":
        """Return the page of a stream; for reading, it has 60 to 100 columns, and 80 off a terminal."""
        columns = terminal_width(stream)
        least, most = _READING_WIDTHS
        reading = _OFF_TERMINAL if columns is None else max(least, min(most, columns))
        return cls(columns, reading, wants_colour(stream))

    def width(self, fold: Fold) -> int | None:
        """Return the columns of lines that are folded so; None for any number."""
        return {"never": None, "terminal": self.columns, "always": self.reading}[fold]

    def fold(self, line: str, fold: Fold, margin: int | None = None) -> list[str]:
        return fold_text(line, self.width(fold), margin=margin).split("\n")

    def paint(self, text: str, style: Style) -> str:
        return paint(text, style, colour=self.colour)


def render(document: Document, page: Page | None = None) -> str:
    """Return a document as text, without a newline at the end; by default for a pipe."""
    page = page or Page()
    sections = (list(_lines(blocks, page)) for blocks in document.sections)
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _lines(blocks: Iterable[Block], page: Page) -> Iterator[str]:
    for block in blocks:
        yield from _block(block, page)


def _block(block: Block, page: Page) -> Iterator[str]:
    match block:
        case Heading():
            yield from _heading(block, page)
        case Sentences():
            for text in block.lines:
                for line in page.fold(_safe(text, block.indent), block.fold, block.margin):
                    yield page.paint(line, block.style)
        case Code():
            for text in block.lines:
                for line in page.fold(_safe(text, block.indent), block.fold, block.indent):
                    yield page.paint(line, block.style)
        case Facts():
            yield from _facts(block, page)
        case Table():
            yield from _table(block, page.columns, page)
        case Bars():
            yield from _bars(block, page)
        case FirstThatFits():
            yield from _first_that_fits(block, page)
        case Panel():
            text = block.heading.text
            yield from _heading(replace(block.heading, text=text.upper()), page)
            yield from _lines(block.body, page)
        case Item():
            first = f"{block.number}. {block.heading.text}{block.heading.rest}"
            yield from page.fold(_safe(first), block.heading.fold, _ITEM_INDENT)
            yield from _lines(block.body, page)


def _safe(text: str, indent: int = 0) -> str:
    """Return a text in which nothing drives the terminal, with spaces before it."""
    return " " * indent + printable(text)


def _heading(heading: Heading, page: Page) -> Iterator[str]:
    text, rest = _safe(heading.text, heading.indent), printable(heading.rest)
    if heading.is_rule:
        title = f"── {text} "
        yield title + "─" * (page.reading - text_width(title))
        return
    first, *further = page.fold(f"{text}{rest}", heading.fold, heading.margin)
    if rest:
        # The text is in the first line, unless it is itself too wide.
        yield page.paint(first[: len(text)], heading.style) + first[len(text) :]
        yield from further
    else:
        yield from (page.paint(line, heading.style) for line in (first, *further))


def _facts(facts: Facts, page: Page) -> Iterator[str]:
    names = [_safe(name, facts.indent) for name, _ in facts.rows]
    column = facts.column or max(map(text_width, names), default=0) + _GAP
    for name, (_, words) in zip(names, facts.rows, strict=True):
        free = column - text_width(name)
        lead = name + " " * (free if free > 0 else _GAP)
        margin = column if facts.margin is None else facts.margin
        first, *further = page.fold(f"{lead}{printable(words)}".rstrip(), facts.fold, margin)
        yield page.paint(first[: len(lead)], facts.name_style) + first[len(lead) :]
        yield from further


def _table(table: Table, width: int | None, page: Page) -> Iterator[str]:
    if table.caption:
        yield from page.fold(printable(table.caption), "terminal")
    if table.is_grouped:
        yield from _grouped(table, width)
        return
    # A mark behind a row, before two spaces, stays there.
    parts = [printable(note).partition("  ") for note in table.notes]
    marked = max((text_width(mark) for mark, _, _ in parts), default=0)
    room = None if width is None else width - table.indent - marked
    drawn = table.draw(room if room is not None else table.plain_width)
    indent = " " * table.indent
    for line in drawn.head:
        yield page.paint(f"{indent}{line}", table.head_style)
    if table.has_rule:
        yield f"{indent}{'─' * drawn.width}"
    if not table.styles and not parts:
        yield from (f"{indent}{line}" for lines in drawn.rows for line in lines)
        return
    styles = table.styles or [""] * len(drawn.rows)
    notes = parts or [("", "", "")] * len(drawn.rows)
    for lines, style, (mark, distance, note) in zip(drawn.rows, styles, notes, strict=True):
        *above, last = (f"{indent}{line}" for line in lines)
        noted = f"{last}{mark}{distance}{note}"
        has_room = not note or width is None or text_width(noted) <= width
        yield from (page.paint(line, style) for line in (*above, noted if has_room else f"{last}{mark}"))
        if not has_room:
            yield from fold_text(f"    {note}", width, margin=4).split("\n")


def _grouped(table: Table, width: int | None) -> Iterator[str]:
    """Yield a table whose first column names groups: a rule before each, which has the name if need be."""
    indent = " " * table.indent
    plain = table.draw(table.plain_width)
    is_titled = width is not None and plain.width + table.indent > width
    inner = replace(
        table,
        heads=table.heads[1:],
        rows=[row[1:] for row in table.rows],
        labels_lifted=False,
        folds_heads=True,
    )
    drawn = inner.draw(width and width - table.indent) if is_titled else plain
    yield from (f"{indent}{line}" for line in drawn.head)
    for row, lines in zip(table.rows, drawn.rows, strict=True):
        if row[0]:
            title = f"── {printable(row[0])} " if is_titled else ""
            yield f"{indent}{title}{'─' * (drawn.width - text_width(title))}"
        yield from (f"{indent}{line}" for line in lines)


def _first_that_fits(block: FirstThatFits, page: Page) -> Iterator[str]:
    width = page.width(block.fold)
    yield from _table(_fitting(block, width), width, page)


def _fitting(block: FirstThatFits, width: int | None) -> Table:
    """Return the first table that fits as it is; on a terminal else the first that can be made to fit."""
    most = block.plain_width if width is None else width
    for table in block.tables():
        if most is None or table.natural_width + table.indent <= most:
            return table
    for table in block.tables():
        if width is not None and table.draw(width - table.indent).width + table.indent <= width:
            return table
    return table


def _bars(bars: Bars, page: Page) -> Iterator[str]:
    label_head, number_head, bar_head, *heads = map(printable, bars.heads)
    indent = " " * bars.indent
    label = max(map(text_width, (label_head, *(printable(row.label) for row in bars.rows))))
    least, most = _BAR_WIDTHS
    used = bars.indent + label + _NUMBER * (1 + len(heads)) + _GAP + _PERCENT + 1
    width = max(least, min(most, page.reading - used))

    def line(name: str, number: str, bar: str, cells: Sequence[str]) -> str:
        name = printable(name) + " " * (label - text_width(printable(name)))
        numbers = [f"{printable(each):>{_NUMBER}}" for each in (number, *cells)]
        return f"{indent}{name}{numbers[0]}  {bar}{''.join(numbers[1:])}"

    head = line(label_head, number_head, f"{bar_head:<{width + _PERCENT + 1}}", heads).rstrip()
    yield page.paint(head, "dim")
    for row in bars.rows:
        if row.share is None:
            yield page.paint(line(row.label, row.number, printable(row.note), ()), "dim")
        else:
            drawn = page.paint(_bar(row.share, width), "bar")
            yield line(row.label, row.number, f"{drawn}{percent(row.share):>{_PERCENT}} ", row.cells).rstrip()


def _bar(share: float, width: int) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[part] if part else "")).ljust(width)


def percent(share: float) -> str:
    """Return a share in whole percents; ``<1%`` for what would be none."""
    return f"{share:.0%}" if share >= 0.005 else "<1%"
