"""Fits tables and text to the terminal: folds, shortens and moves cells, and never cuts a name."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from torchperfd_daemon.commands import _table

_PIPE: Final = 80
"""Columns that tables of phases fit in a pipe: the smallest phases share a column, and nothing is cut."""
_LEAST: Final = 12
"""Characters that a narrowed cell keeps."""

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table's heads and rows."""


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is; None where it is none, so that any width fits."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
    table: list[str] = []
    for moved in ((), lift) if lift and terminal else ((),):
        own = list(names)
        summed: list[str] = []
        while True:
            table, widest = _lifted(*draw(own, summed), left, moved)
            if widest <= (terminal or _PIPE):
                return table
            if len(own) < 2:
                break
            least = min(own, key=lambda name: sizes.get(name, 0.0))
            own.remove(least)
            summed.append(least)
    return table


def fitted(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str] = (),
    shorten: str = "",
    fold: str = "",
    lift: Sequence[str] = (),
) -> list[str]:
    """Return a table's lines, its head first; on a terminal no wider than that.

    As far as the width demands, the cells of one column lose their middle, those of another are folded onto
    several lines, and columns of names move to lines above their rows, where a name is always whole.

    Args:
        left: Heads of the columns that are flush left; the others are flush right.
        shorten: Head of the column whose cells may lose their middle.
        fold: Head of the column whose cells may be folded.
        lift: Heads of the columns that may move, the first to move first.
    """
    most = terminal_width()
    table, widest = _lifted(heads, rows, left, ())
    for moved in range(len(lift) + 1):
        if most is None or widest <= most:
            break
        fitting = rows
        table, widest = _lifted(heads, fitting, left, lift[:moved])
        if shorten and widest > most:
            fitting = _narrowed(fitting, heads.index(shorten), widest - most, _shortened)
            table, widest = _lifted(heads, fitting, left, lift[:moved])
        if fold and widest > most:
            fitting = _narrowed(fitting, heads.index(fold), widest - most, _folded)
            table, widest = _lifted(heads, fitting, left, lift[:moved])
    return table


def folded_text(text: str) -> str:
    """Return a text whose lines are folded at words, so that none is wider than the terminal.

    The rest of a line is indented by two columns more. A word that is too long stays whole: the terminal
    folds it, and it can still be copied.
    """
    most = terminal_width()
    if most is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _folded(line, most))


def _lifted(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str], names: Sequence[str]
) -> tuple[list[str], int]:
    """Return a table with some columns on lines of their own where they change; and its width without."""
    names = [name for name in names if name in heads]
    columns = [heads.index(name) for name in names]
    kept = [column for column in range(len(heads)) if column not in columns]
    head, *body = _table.lines(
        [heads[column] for column in kept], [[row[column] for column in kept] for row in rows], left
    )
    found, before = [head], [""] * len(columns)
    for row, line in zip(rows, body, strict=True):
        here = [row[column] for column in columns]
        changed = next((n for n, pair in enumerate(zip(here, before, strict=True)) if len({*pair}) > 1), None)
        for name, cell in list(zip(names, here, strict=True))[changed:] if changed is not None else ():
            found.append(f"{name.lower()} {cell}")
        before = here
        found.append(line)
    return found, _widest([head, *body])


def _narrowed(
    rows: Sequence[Sequence[str]], column: int, excess: int, narrow: Callable[[str, int], list[str]]
) -> list[list[str]]:
    """Return rows in which a column loses so many characters; a cell of several lines takes as many rows."""
    room = max(_LEAST, _widest([row[column] for row in rows]) - excess)
    found = []
    for row in rows:
        first, *rest = narrow(row[column], room)
        found.append([*row[:column], first, *row[column + 1 :]])
        found += [[part if n == column else "" for n in range(len(row))] for part in rest]
    return found


def _shortened(cell: str, room: int) -> list[str]:
    if len(cell) <= room:
        return [cell]
    back = (room - 1) // 2
    return [f"{cell[: room - 1 - back]}…{cell[len(cell) - back :]}"]


def _folded(line: str, most: int) -> list[str]:
    if len(line) <= most:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.strip(),
        most,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _widest(table: Sequence[str]) -> int:
    return max(map(len, table), default=0)
