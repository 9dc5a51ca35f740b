"""The phase table for a terminal: aligned columns, no colour, less than 100 wide."""

from collections.abc import Iterator
from itertools import pairwise

from torchperfd.report.numbers import Table
from torchperfd.report.words import cells, facts, headings, title
from torchperfd.text_tables import TextTable, beginning, fold_text, text_width

_WIDTH = 98
_ACTION_WIDTHS = (13, 24)
"""Least and most characters of an action; in between, what the other columns leave."""
_LEFT = 2
"""Columns of words; the others are numbers, and flush right."""


def render(table: Table, width: int | None = None) -> str:
    """Return the table without a last newline.

    Args:
        width: Columns that it may take; None for as many as it needs.
    """
    return "\n".join(line.rstrip() for line in _lines(table, width))


def _lines(table: Table, width: int | None) -> Iterator[str]:
    yield fold_text(title(table), width)
    if table.rows:
        lines = list(_wide_table(table))
        if width is not None and max(map(text_width, lines)) > width:
            lines = list(_narrow_table(table, width))
        yield from lines
    for fact in facts(table):
        yield fold_text(f"  {fact}", width)
    for note in table.notes:
        yield fold_text(f"  note: {note}", width)


def _wide_table(table: Table) -> Iterator[str]:
    body, heads = cells(table), headings(table)
    widths = [max(map(text_width, column)) for column in zip(heads, *body, strict=True)]
    least, most = _ACTION_WIDTHS
    widths[1] = min(widths[1], most, max(least, _WIDTH + widths[1] - sum(widths) - 2 * len(widths)))
    body = [(row[0], _cut(row[1], widths[1]), *row[2:]) for row in body]
    rule = "  " + "─" * (sum(widths) + 2 * len(widths) - 2)
    yield _line(heads, widths)
    yield rule
    yield _line(body[0], widths)
    for above, row in pairwise(body):
        if row[0] != above[0]:
            yield rule
            yield _line(row, widths)
        else:
            yield _line(("", *row[1:]), widths)


def _narrow_table(table: Table, width: int) -> Iterator[str]:
    """Yield the table with the phases on lines of their own, and heads on several."""
    body, (_, action, *heads) = cells(table), headings(table)
    drawn = TextTable(
        (action, *heads),
        [row[1:] for row in body],
        left=(action,),
        shorten=action,
        lift=(action,),
        labels_lifted=False,
        folds_heads=True,
    ).draw(width - 2)
    yield from (f"  {line}" for line in drawn.head)
    phase = ""
    for row, lines in zip(body, drawn.rows, strict=True):
        if row[0] != phase:
            phase = row[0]
            yield f"  ── {phase} ".ljust(drawn.width + 2, "─")
        yield from (f"  {line}" for line in lines)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    padded = []
    for column, (word, width) in enumerate(zip(row, widths, strict=True)):
        padding = " " * (width - text_width(word))
        padded.append(word + padding if column < _LEFT else padding + word)
    return "  " + "  ".join(padded)


def _cut(word: str, width: int) -> str:
    return word if text_width(word) <= width else f"{beginning(word, width - 1)}…"
