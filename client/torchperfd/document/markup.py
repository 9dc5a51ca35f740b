"""A document as GitHub-flavoured Markdown, its tables as comma-separated values, and as one HTML element.

The element is for notebooks and mail, on whatever background these have. It is styled in place, since these
drop ``<style>``; colours have alpha, to suit any theme.
"""

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
from torchperfd.document.text import Style, printable
from torchperfd.model.formatting import one_line

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]|~])")
_ITEM: Final = "   "


def escape_markdown(text: str) -> str:
    """Return a text, on one line, that means nothing but itself in GitHub-flavoured Markdown."""
    return _SPECIAL.sub(r"\\\1", escape(one_line(text, len(text)), quote=False))


def render_markdown(document: Document) -> str:
    return _joined(block for section in document.sections for block in section)


def _joined(blocks: Iterable[Block]) -> str:
    """Return blocks with a blank line between two; lists that follow one another are one."""
    text = ""
    before = ""
    for lines in filter(None, map(_markdown_lines, blocks)):
        is_continued = before.startswith("- ") and lines[0].startswith("- ")
        text += ("\n" if text and not is_continued else "") + "".join(f"{line}\n" for line in lines)
        before = lines[-1]
    return text


def _markdown_lines(block: Block) -> list[str]:
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
            return _markdown_table(block)
        case Bars():
            return _markdown_table(table_of_bars(block))
        case FirstThatFits():
            return _markdown_table(next(block.tables()))
        case Panel(heading, body):
            return _joined((heading, *body)).split("\n")[:-1]
        case Item(number, heading, body):
            [first] = _markdown_lines(heading)
            return [f"{number}. {first}", "", *indent(_joined(body), _ITEM).split("\n")[:-1]]


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return a block of code that nothing in it can close."""
    shown = [printable(line).rstrip() for text in lines for line in text.rstrip().split("\n")]
    longest = max((len(found) for line in shown for found in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *shown, fence]


def _markdown_table(table: Table) -> list[str]:
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


_COLOURS: Final[dict[Style, str]] = {
    "bad": "rgba(217,48,37,.9)",
    "warn": "rgba(200,130,0,.9)",
    "good": "rgba(24,128,56,.9)",
}
_TEXT: Final = "font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:80ch;margin:4px 0"
_PANEL: Final = "border-left:4px solid {};padding:2px 0 2px 10px;margin:6px 0"
_HEAD: Final = "font-weight:600"
_NAME: Final = "display:inline-block;min-width:4em;opacity:.75"
_CODE: Final = "font:12px/1.5 ui-monospace,monospace"
_TABLE: Final = (
    "border-collapse:collapse;font:13px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums;"
    "color:inherit;background:transparent;margin:4px 0"
)
_CAPTION: Final = "caption-side:top;text-align:left;padding:4px 10px 6px;font-weight:600;color:inherit"
_CELL: Final = "padding:2px 10px;border:0;white-space:nowrap"
_LINE: Final = "border-top:1px solid rgba(128,128,128,.45)"
_NOTE: Final = "font:12px/1.5 system-ui,sans-serif;opacity:.75;padding:0 10px"
_BAR: Final = "rgba(66,133,244,.28)"


def render_html(document: Document) -> str:
    """Return a document as HTML that needs nothing else, ending in a newline."""
    blocks = [block for section in document.sections for block in section]
    # Only text has a width at which it reads well.
    style = f' style="{_TEXT}"' if any(isinstance(block, (Facts, Panel)) for block in blocks) else ""
    return "".join(f"{line}\n" for line in (f"<div{style}>", *_html_lines(blocks), "</div>"))


def _html_lines(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Heading(text, rest):
            yield f'<p style="{_CAPTION}">{escape(text + rest)}</p>'
        case Sentences(lines):
            yield from (f'<p style="{_NOTE}">{escape(line)}</p>' for line in lines)
        case Code(lines):
            yield f'<pre style="{_CODE}">{escape(chr(10).join(lines))}</pre>'
        case Facts():
            yield from _facts(block)
        case Table():
            yield from _html_table(block)
        case Bars():
            yield from _html_table(table_of_bars(block))
        case FirstThatFits():
            yield from _html_table(next(block.tables()))
        case Panel(heading, body):
            frame = _PANEL.format(_COLOURS.get(heading.style, "currentColor"))
            title = escape(heading.text + heading.rest)
            yield f'<div style="{frame}"><div style="{_HEAD}">{title}</div>'
            yield from _html_lines(body)
            yield "</div>"
        case Item(number, heading, body):
            yield f'<p style="{_CAPTION}">{number}. {escape(heading.text + heading.rest)}</p>'
            yield from _html_lines(body)


def _facts(facts: Facts) -> Iterator[str]:
    for name, words in facts.rows:
        inner = f'<code style="{_CODE}">{escape(words)}</code>' if name in facts.code else escape(words)
        yield f'<div><span style="{_NAME}">{escape(name)}</span>{inner}</div>'


def _html_table(table: Table) -> Iterator[str]:
    yield f'<table style="{_TABLE}">'
    if table.caption:
        yield f'<caption style="{_CAPTION}">{escape(table.caption)}</caption>'
    style = f"{_CELL};font-weight:600;text-align:"
    heads = "".join(
        f'<th scope="col" style="{style}{_align(table, head)}">{escape(head)}</th>' for head in table.heads
    )
    yield f'<thead><tr style="background:transparent">{heads}</tr></thead>'
    yield "<tbody>"
    shares: Sequence[float | None] = table.shares or [None] * len(table.rows)
    for row, share in zip(table.rows, shares, strict=True):
        yield _row(table, row, share)
    yield "</tbody>"
    yield "</table>"


def _row(table: Table, row: Sequence[str], share: float | None) -> str:
    """Return a row; its last cell has a bar behind it where there is a share."""
    first, *cells = row
    style = f"{_CELL};{_LINE}" if table.is_grouped and first else _CELL
    parts = [f'<th scope="row" style="{style};font-weight:600;text-align:left">{escape(first)}</th>']
    for head, cell in zip(table.heads[1:], cells, strict=True):
        parts.append(f'<td style="{style};text-align:{_align(table, head)}">{escape(cell)}</td>')
    if share is not None:
        percent = f"{min(1.0, share):.1%}"
        gradient = f"linear-gradient(to right,{_BAR} {percent},transparent {percent})"
        bar = f"background:{gradient} center/100% 74% no-repeat"
        parts[-1] = f'<td style="{style};text-align:right;min-width:90px;{bar}">{escape(cells[-1])}</td>'
    return f'<tr style="background:transparent">{"".join(parts)}</tr>'


def _align(table: Table, head: str) -> str:
    return "left" if head in table.left else "right"
