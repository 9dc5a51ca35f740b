"""The phase table for a terminal: aligned columns, no colour, less than 100 wide."""

from collections.abc import Iterator
from itertools import pairwise
from unicodedata import combining, east_asian_width

from torchperfd.report.numbers import Table
from torchperfd.report.words import HEADINGS, cells, title

_ACTION_WIDTH = 24
_LEFT = 2
"""Columns of words; the others are numbers, and flush right."""


def render(table: Table) -> str:
    """Return the table without a last newline."""
    return "\n".join(line.rstrip() for line in _lines(table))


def _lines(table: Table) -> Iterator[str]:
    yield title(table)
    if table.rows:
        body = [cells(row) for row in table.rows]
        body = [(row[0], _cut(row[1]), *row[2:]) for row in body]
        widths = [max(_width(row[column]) for row in (HEADINGS, *body)) for column in range(len(HEADINGS))]
        rule = "  " + "─" * (sum(widths) + 2 * len(widths) - 2)
        yield _line(HEADINGS, widths)
        yield rule
        yield _line(body[0], widths)
        for above, row in pairwise(body):
            if row[0] != above[0]:
                yield rule
                yield _line(row, widths)
            else:
                yield _line(("", *row[1:]), widths)
    for note in table.notes:
        yield f"  note: {note}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    padded = []
    for column, (word, width) in enumerate(zip(row, widths, strict=True)):
        padding = " " * (width - _width(word))
        padded.append(word + padding if column < _LEFT else padding + word)
    return "  " + "  ".join(padded)


def _cut(word: str) -> str:
    if _width(word) <= _ACTION_WIDTH:
        return word
    while _width(word) >= _ACTION_WIDTH:
        word = word[:-1]
    return word + "…"


def _width(word: str) -> int:
    if word.isascii():
        return len(word)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in word)
