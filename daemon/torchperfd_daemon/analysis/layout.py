"""Formats numbers, names and tables of all reports, for terminals, logs and Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from torchperfd.model.terminal_text import TextTable, escape_markdown, fold_text, markdown_table, shortened
from torchperfd_daemon import text as texts

PLAIN_WIDTH: Final = 110
"""Sentences off a terminal are so wide: a log or a pipe must not reflow with the caller's terminal."""
UNCUT: Final = 1_000_000
"""The width off a terminal, where nothing is cut: a log or another program gets everything."""
_GAP: Final = 3
_INDENT: Final = 2


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown: names in the first column, numbers in the others.

    Attributes:
        rows: A cell for each heading.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def print_on(self, console: Console) -> None:
        """Print it in the width of a console; only names are shortened, because a cut number misleads."""
        name = self.headings[0]
        table = TextTable(
            self.headings,
            self.rows,
            left=(name,),
            shorten=name,
            lift=(name,),
            labels_lifted=False,
            folds_heads=True,
            gap=_GAP,
        )
        drawn = table.draw(console.width)
        for line in drawn.head:
            console.print(Text(line.ljust(drawn.width), style="bold"), soft_wrap=True)
        for line in ("─" * drawn.width, *(line for row in drawn.rows for line in row)):
            console.print(Text(line), soft_wrap=True)

    def as_markdown(self) -> str:
        """Return it as GitHub-flavoured Markdown, ending in a newline."""
        rule = "| --- |" + " ---: |" * (len(self.headings) - 1)
        rows = [(escaped(name), *numbers) for name, *numbers in self.rows]
        return "".join(f"{line}\n" for line in markdown_table(self.headings, rule, rows))


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
        file=out, width=None if out.isatty() else UNCUT, markup=False, highlight=False, emoji=False
    )


def print_folded(console: Console, line: str, style: str = "") -> None:
    """Print a sentence, folded at words in the width of a console; long words stay whole."""
    console.print(Text(fold_text(line, console.width), style=style), soft_wrap=True)


def ms(nanoseconds: float) -> str:
    """Return a time in milliseconds, to the microsecond."""
    return f"{nanoseconds / 1e6:,.3f}"


def printable(text: str) -> str:
    """A name from a trace may hold anything, and must not move the reader's cursor."""
    return texts.one_line(text, len(text))


def name_in_sentence(text: str, width: int) -> str:
    """Return a name from a trace, no longer than a line of its own; names of kernels take several."""
    return shortened(printable(text), width - _INDENT)


def escaped(text: str) -> str:
    """Return text escaped for Markdown, on one line."""
    return escape_markdown(printable(text))
