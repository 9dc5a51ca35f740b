"""What all reports of the analyser have in common: numbers, names, and the look of tables."""

from collections.abc import Sequence
from typing import Any, Final

from torchperfd.document.tables import Table
from torchperfd.document.text import shortened
from torchperfd.model.formatting import one_line

_GAP: Final = 3
_INDENT: Final = 2


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of names in the first column and numbers in the others.

    Only names are shortened, because a cut number misleads.
    """
    name = headings[0]
    return Table(
        headings,
        rows,
        left=(name,),
        shorten=name,
        lift=(name,),
        labels_lifted=False,
        folds_heads=True,
        gap=_GAP,
        has_rule=True,
        head_style="bold",
    )


def ms(nanoseconds: float) -> str:
    """Return a time in milliseconds, to the microsecond."""
    return f"{nanoseconds / 1e6:,.3f}"


def in_us(of: object, names: str) -> dict[str, Any]:
    """Return the named attributes for JSON, times in µs: ``wait_ns`` as ``wait_us``."""
    values = {name: getattr(of, name) for name in names.split()}
    return {
        name.replace("_ns", "_us"): value / 1000 if "_ns" in name and value is not None else value
        for name, value in values.items()
    }


def printable(text: str) -> str:
    """A name from a trace may hold anything, and must not move the reader's cursor."""
    return one_line(text, len(text))


def name_in_sentence(text: str, width: int | None) -> str:
    """Return a name from a trace, no longer than a line of its own; names of kernels take several.

    Args:
        width: Columns of the terminal; None for any.
    """
    name = printable(text)
    return name if width is None else shortened(name, width - _INDENT)
