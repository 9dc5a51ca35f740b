"""Fits the tables and the text of commands to the terminal that stdout is; in a pipe, nothing is cut."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from torchperfd.model import terminal_text
from torchperfd.model.terminal_text import TextTable

_PIPE: Final = 80
"""Columns that tables of phases fit in a pipe: the smallest phases share a column, and nothing is cut."""

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table's heads and rows."""


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is; None where it is none, so that any width fits."""
    return terminal_text.terminal_width(sys.stdout)


def fitted_phases(
    names: Sequence[str],
    sizes: Mapping[str, float],
    draw: Callable[[Sequence[str], Sequence[str]], Rows],
    *,
    left: Collection[str] = (),
    lift: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table with a column for each name; the smallest share one, so that it fits.

    Args:
        names: The columns, in their order.
        sizes: How large each is.
        draw: Returns heads and rows for columns of their own, and for those that are summed up.
        left: Heads of the columns that are flush left; the others are flush right.
        lift: Heads of the columns that move above their rows on a terminal where nothing else helps.
    """
    terminal = terminal_width()
    lines: list[str] = []
    for moved in ((), lift) if lift and terminal else ((),):
        own = list(names)
        summed: list[str] = []
        while True:
            heads, rows = draw(own, summed)
            drawn = TextTable(heads, rows, left, lift=moved).draw_lifted()
            lines = drawn.lines
            if drawn.width <= (terminal or _PIPE):
                return lines
            if len(own) < 2:
                break
            least = min(own, key=lambda name: sizes.get(name, 0.0))
            own.remove(least)
            summed.append(least)
    return lines


def fitted(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str] = (),
    shorten: str = "",
    fold: str = "",
    lift: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a :class:`TextTable`, its head first; on a terminal no wider than that."""
    return TextTable(heads, rows, left, shorten, fold, lift).draw(terminal_width()).lines


def folded_text(text: str) -> str:
    """Return a text whose lines are folded at words, so that none is wider than the terminal."""
    return terminal_text.fold_text(text, terminal_width())
