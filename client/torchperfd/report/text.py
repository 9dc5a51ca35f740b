"""The phase table for a terminal: aligned columns, no colour, less than 100 wide."""

from collections.abc import Iterator
from itertools import pairwise
from unicodedata import combining, east_asian_width

from torchperfd.report.numbers import Table
from torchperfd.report.words import cells, facts, headings, title

_WIDTH = 98
_ACTION_WIDTHS = (13, 24)
"""Least and most characters of an action; in between, what the other columns leave."""
_LEFT = 2
"""Columns of words; the others are numbers, and flush right."""


def render(table: Table) -> str:
    """Return the table without a last newline."""
    return "\n".join(line.rstrip() for line in _lines(table))


def _lines(table: Table) -> Iterator[str]:
    yield title(table)
    if table.rows:
        body, heads = cells(table), headings(table)
        widths = [max(map(_width, column)) for column in zip(heads, *body, strict=True)]
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
    for fact in facts(table):
        yield f"  {fact}"
    for note in table.notes:
        yield f"  note: {note}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    padded = []
    for column, (word, width) in enumerate(zip(row, widths, strict=True)):
        padding = " " * (width - _width(word))
        padded.append(word + padding if column < _LEFT else padding + word)
    return "  " + "  ".join(padded)


def _cut(word: str, width: int) -> str:
    if _width(word) <= width:
        return word
    while _width(word) >= width:
        word = word[:-1]
    return word + "…"


def _width(word: str) -> int:
    if word.isascii():
        return len(word)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in word)
