"""The blocks of a document: headings, facts, sentences, tables, bars, and code, in sections.

They say what is shown and how it may change where it is too wide; nothing here knows a format.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchperfd.document.tables import Table
from torchperfd.document.text import Style

Fold: TypeAlias = Literal["never", "terminal", "always"]
"""When lines are folded at words: to a terminal's columns, or in any case to the width for reading."""


@dataclass(frozen=True, slots=True)
class Heading:
    """A line that stands out.

    Attributes:
        text: What stands out; a terminal shows that of a panel in capitals.
        rest: What follows it in the same line, and does not.
        is_rule: Whether it is drawn as a line across the page.
        indent: Columns before the first line.
        margin: Column at which further lines begin.
    """

    text: str
    rest: str = ""
    style: Style = ""
    is_rule: bool = False
    fold: Fold = "terminal"
    indent: int = 0
    margin: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Names, and what is to be said of each; a fact without a name continues the one before.

    Attributes:
        column: Where what is said begins; 0 for two columns after the widest name.
        margin: Column at which further lines begin; by default ``column``.
        name_style: The style of the names.
        code: Names of the facts that are code.
    """

    rows: Sequence[tuple[str, str]]
    column: int = 0
    indent: int = 0
    margin: int | None = None
    fold: Fold = "terminal"
    name_style: Style = ""
    code: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Sentences:
    """Lines of text.

    Attributes:
        margin: Column at which further lines of a folded one begin; by default two after its beginning.
        is_list: Whether Markdown shows them as a list, rather than as paragraphs.
    """

    lines: Sequence[str]
    style: Style = ""
    indent: int = 0
    margin: int | None = None
    fold: Fold = "terminal"
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be copied; by default they stay whole in any width."""

    lines: Sequence[str]
    style: Style = ""
    indent: int = 0
    fold: Fold = "never"


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of :class:`Bars`.

    Attributes:
        share: Length of the bar, 0 to 1; None for a note in its place.
        note: What stands in place of the bar.
        cells: Further numbers behind it.
    """

    label: str
    number: str
    share: float | None
    note: str = ""
    cells: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """A table with a bar in each row.

    Attributes:
        heads: Of the labels, of the numbers, of the bars, and of further numbers.
    """

    heads: Sequence[str]
    rows: Sequence[Bar]
    indent: int = 0


@dataclass(frozen=True, slots=True)
class FirstThatFits:
    """The first of several tables that fits as it is, else the first that can be made to fit, else the last.

    Attributes:
        tables: Yields them, at least one, those with most in them first.
        plain_width: Columns off a terminal, where lines are folded only there; None for any.
    """

    tables: Callable[[], Iterator[Table]]
    fold: Fold = "terminal"
    plain_width: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """A heading and what belongs to it, with a border in the heading's colour where there are borders."""

    heading: Heading
    body: "Sequence[Block]"


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a numbered list: its first line, and below it, indented, the rest."""

    number: int
    heading: Heading
    body: "Sequence[Block]"


Block: TypeAlias = Heading | Facts | Sentences | Code | Table | Bars | FirstThatFits | Panel | Item


@dataclass(frozen=True, slots=True)
class Document:
    """Sections of blocks; a blank line is between two sections, and none within one."""

    sections: Sequence[Sequence[Block]]

    def __add__(self, other: "Document") -> "Document":
        return Document((*self.sections, *other.sections))


EMPTY = Document(())
