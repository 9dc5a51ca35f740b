"""A document as GitHub-flavoured Markdown, and its tables as comma-separated values."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import indent
from typing import Final

from torchperfd.document.blocks import (
    Bars,
    Block,
    Code,
    Document,
    Facts,
    FirstThatFits,
    Heading,
    Item,
    Panel,
    Sentences,
)
from torchperfd.document.tables import Table
from torchperfd.document.terminal import percent
from torchperfd.document.text import printable
from torchperfd.model.formatting import one_line

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]|~])")
_ITEM: Final = "   "


def escape_markdown(text: str) -> str:
    """Return a text, on one line, that means nothing but itself in GitHub-flavoured Markdown."""
    return _SPECIAL.sub(r"\\\1", escape(one_line(text, len(text)), quote=False))


def render_markdown(document: Document) -> str:
    """Return a document as Markdown, ending in a newline."""
    return _joined(block for section in document.sections for block in section)


def _joined(blocks: Iterable[Block]) -> str:
    """Return blocks with a blank line between two; lists that follow one another are one."""
    text = ""
    before = ""
    for lines in filter(None, map(_lines, blocks)):
        is_continued = before.startswith("- ") and lines[0].startswith("- ")
        text += ("\n" if text and not is_continued else "") + "".join(f"{line}\n" for line in lines)
        before = lines[-1]
    return text


def _lines(block: Block) -> list[str]:
    match block:
        case Heading(text, rest):
            return [f"**{escape_markdown(text)}**{escape_markdown(rest)}"]
        case Sentences(lines):
            if block.is_list:
                return [f"- {escape_markdown(line)}" for line in lines]
            return "\n\n".join(map(escape_markdown, lines)).split("\n") if lines else []
        case Facts(rows):
            return [f"- {escape_markdown(f'{name}: {words}' if name else words)}" for name, words in rows]
        case Code(lines):
            return _fenced(lines)
        case Table():
            return _table(block)
        case Bars():
            return _table(table_of_bars(block))
        case FirstThatFits():
            return _table(next(block.tables()))
        case Panel(heading, body):
            return _joined((heading, *body)).split("\n")[:-1]
        case Item(number, heading, body):
            [first] = _lines(heading)
            return [f"{number}. {first}", "", *indent(_joined(body), _ITEM).split("\n")[:-1]]


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return a block of code that nothing in it can close."""
    shown = [printable(line).rstrip() for text in lines for line in text.rstrip().split("\n")]
    longest = max((len(found) for line in shown for found in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *shown, fence]


def _table(table: Table) -> list[str]:
    rule = ["---" if head in table.left else "---:" for head in table.heads]
    rows = [list(map(escape_markdown, row)) for row in (table.heads, *table.rows)]
    for row, style in zip(rows[1:], table.styles, strict=False):
        row[:] = [f"**{cell}**" if style and cell else cell for cell in row]
    above = [f"**{escape_markdown(table.caption)}**", ""] if table.caption else []
    return [*above, *(f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:]))]


def table_of_bars(bars: Bars) -> Table:
    """Return bars as a table with their shares in percents, for formats that draw none."""
    rows = []
    for row in bars.rows:
        cells = [row.label, row.number, row.note if row.share is None else percent(row.share), *row.cells]
        rows.append([*cells, *[""] * (len(bars.heads) - len(cells))])
    return Table(bars.heads, rows, left=bars.heads[:1])


def render_csv(document: Document) -> str:
    """Return the tables of a document as comma-separated values: a line of heads, and a line per row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for table in _tables(document):
        writer.writerow(table.heads)
        writer.writerows(table.rows)
    return out.getvalue()


def _tables(document: Document) -> Iterator[Table]:
    for section in document.sections:
        yield from (block for block in section if isinstance(block, Table))
