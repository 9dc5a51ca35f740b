"""Tables of plain text, each column as wide as what is in it, and how numbers are written there."""

from collections.abc import Collection, Sequence


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> list[str]:
    """Return a table's lines, its head first.

    Args:
        rows: Cells, as many in each row as there are heads.
        left: Heads of the columns that are flush left; the others are flush right.
    """
    table = [heads, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if head in left else cell.rjust(width)
            for cell, width, head in zip(row, widths, heads, strict=True)
        ).rstrip()
        for row in table
    ]


def count(number: int, noun: str) -> str:
    """Return how many there are of something: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def milliseconds(seconds: float) -> str:
    """Return a time with three digits that count: ``0.04``, ``12.3``, ``1234``."""
    value = seconds * 1e3
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
