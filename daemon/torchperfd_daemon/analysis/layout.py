"""Formats numbers, names and tables of all reports, for terminals, logs and Markdown."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import IO, Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from torchperfd_daemon import text as texts

PLAIN_WIDTH: Final = 110
"""Sentences off a terminal are so wide: a log or a pipe must not reflow with the caller's terminal."""
# Off a terminal nothing is cut: a log or another program gets everything.
_UNCUT: Final = 1_000_000
_GUTTER: Final = 3
_NAME_AT_LEAST: Final = 12
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]|~])")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown: names in the first column, numbers in the others.

    Attributes:
        rows: A cell for each heading.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_text(self, width: int) -> RichTable:
        """Lay it out in ``width`` characters; only the names are cut."""
        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        # Names are cut before numbers: a cut name can still be recognised, a cut number misleads.
        widths = [max(len(cell) for cell in column) for column in zip(self.headings, *self.rows, strict=True)]
        for_names = width - sum(widths[1:]) - _GUTTER * (len(self.headings) - 1)
        table.add_column(self.headings[0], no_wrap=True, max_width=max(_NAME_AT_LEAST, for_names))
        for heading, least in zip(self.headings[1:], widths[1:], strict=True):
            table.add_column(heading, justify="right", no_wrap=True, min_width=least)
        for name, *numbers in self.rows:
            table.add_row(Text(name), *numbers)
        return table

    def as_markdown(self) -> str:
        """Return it as GitHub-flavoured Markdown, ending in a newline."""
        lines = [self.headings, ("---", *("---:" for _ in self.headings[1:]))]
        lines += [(escaped(name), *numbers) for name, *numbers in self.rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


class _PrintableConsole(Console):
    """A console that lets no text drive the terminal; styles are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed, their text made printable."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(texts.printable(segment.text), segment.style)


def console_for(out: IO[str]) -> Console:
    """Return a console for ``out``: as wide as the terminal, or plain text that is never cut."""
    return _PrintableConsole(
        file=out, width=None if out.isatty() else _UNCUT, markup=False, highlight=False, emoji=False
    )


def ms(nanoseconds: float) -> str:
    """Return a time in milliseconds, to the microsecond."""
    return f"{nanoseconds / 1e6:,.3f}"


def printable(text: str) -> str:
    """A name from a trace may hold anything, and must not move the reader's cursor."""
    return texts.one_line(text, len(text))


def escaped(text: str) -> str:
    """Return text escaped for Markdown, on one line."""
    return _SPECIAL.sub(r"\\\1", escape(printable(text), quote=False))
