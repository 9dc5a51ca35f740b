"""Lines of the screen of ``top``: words and bars in columns, frames around them, and what a click means.

Pure. A table of rich takes a hundred times as long to lay out, and its screen is drawn twice a second.
"""

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

Line: TypeAlias = Sequence[Segment]
Words: TypeAlias = tuple[str, str]
"""A text and the name of its style."""

LEVEL: Final = "#"
"""The letter of a bar with one part, which is shown only where there are no colours."""
_PLAIN: Final = Style.null()
_REST: Final = Style.parse("grey30")
_BOLD: Final = Style.parse("bold")
# Only words are wrapped by it, nothing is written.
_WRAPPER: Final = Console(file=io.StringIO(), width=80)


@dataclass(frozen=True, slots=True)
class Canvas:
    """What lines are drawn on.

    Attributes:
        width: In cells.
        plain: Whether it has no colours, so that bars are letters.
    """

    width: int
    plain: bool


def is_plain(console: Console) -> bool:
    return console.no_color or console.color_system is None


def line(*words: Words) -> Line:
    return [Segment(text, Style.parse(style)) for text, style in words if text]


@functools.lru_cache(maxsize=512)
def wrapped(width: int, *words: Words) -> tuple[Line, ...]:
    """Return words in as many lines as they need; most of them are the same at the next refresh."""
    text = Text.assemble(*words)
    return tuple(tuple(each.render(_WRAPPER)) for each in text.wrap(_WRAPPER, max(1, width)))


def length(cells: Line) -> int:
    return sum(cell_len(each.text) for each in cells)


def cut(cells: Line, width: int) -> Line:
    """Return a line that is no wider than that; one that was cut ends with an ellipsis."""
    if length(cells) <= width:
        return cells
    if width <= 0:
        return []
    kept = Segment.adjust_line_length(list(cells), width - 1, pad=False)
    return [*kept, Segment("…", kept[-1].style if kept else None)]


def fit(cells: Line, width: int, *, right: bool = False) -> Line:
    """Return a line that is exactly so wide: cut, or with spaces beside it."""
    missing = width - length(cells)
    if missing <= 0:
        return cut(cells, width)
    space = Segment(" " * missing)
    return [space, *cells] if right else [*cells, space]


def framed(title: str, body: Sequence[Line], width: int) -> list[Line]:
    inner = max(0, width - 4)
    head = cut([Segment(f" {title} ", _BOLD)], inner)
    rest = "─" * (inner - length(head))
    return [
        [Segment("╭─"), *head, Segment(f"{rest}─╮")],
        *([Segment("│ "), *fit(each, inner), Segment(" │")] for each in body),
        [Segment(f"╰{'─' * (inner + 2)}╯")],
    ]


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole as a bar: colours on a terminal that has them, letters elsewhere.

    Attributes:
        parts: The letter, the colour and the size of each.
        width: Its usual width; 0 for that of its column.
    """

    parts: Sequence[tuple[str, str, float]]
    whole: float
    width: int = 0

    def cells(self, width: int, *, plain: bool) -> Line:
        width = min(self.width or width, width)
        found: list[Segment] = []
        drawn, upto = 0, 0.0
        for name, colour, part in self.parts:
            upto += part
            end = min(width, round(width * upto / self.whole)) if self.whole > 0 else 0
            if end > drawn:
                found.append(_part(name, colour, end - drawn, plain=plain))
            drawn = max(drawn, end)
        if drawn < width:
            rest = "·" if plain else "─"
            found.append(Segment(rest * (width - drawn), _PLAIN if plain else _REST))
        return found


def _part(name: str, colour: str, width: int, *, plain: bool) -> Segment:
    if plain:
        return Segment(name * width)
    if name == LEVEL:
        # Lines, since filled cells would merge with those of the rows above and below.
        return Segment("━" * width, Style.parse(colour))
    # The letter is there with colours too, because eight colours are hard to distinguish.
    return Segment(name.ljust(width), Style.parse(f"black on {colour}"))


Cell: TypeAlias = Line | Bar


@dataclass(frozen=True, slots=True)
class Column:
    """How the cells of a column are laid out.

    Attributes:
        is_right: Whether its cells end at its right edge.
        least: The cells that it keeps where room lacks; None for all that it needs.
        grows: Whether it takes the room that the others leave.
        dropped: Where room lacks all the same, columns are left out, the highest number first; 0 for never.
    """

    is_right: bool = False
    least: int | None = None
    grows: bool = False
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row, and the style below theirs."""

    cells: Sequence[Cell]
    style: Style = _PLAIN


def columns(rows: Sequence[Row], layout: Sequence[Column], canvas: Canvas, gap: int = 1) -> list[Line]:
    """Return rows whose cells are below each other."""
    widths = _widths(rows, layout, canvas.width, gap)
    space = Segment(" " * gap)
    lines: list[Line] = []
    for row in rows:
        cells: list[Segment] = []
        for number, width in widths.items():
            if cells:
                cells.append(space)
            cell = row.cells[number]
            drawn = cell.cells(width, plain=canvas.plain) if isinstance(cell, Bar) else cell
            cells += fit(drawn, width, right=layout[number].is_right)
        shown = list(Segment.apply_style(cells, row.style)) if row.style else cells
        lines.append(cut(shown, canvas.width))
    return lines


def _widths(rows: Sequence[Row], layout: Sequence[Column], width: int, gap: int) -> dict[int, int]:
    """Return the width of each column that is shown."""
    widths = {
        number: (column.least or 0)
        if column.grows
        else max((_usual(row.cells[number]) for row in rows), default=0)
        for number, column in enumerate(layout)
    }

    def excess() -> int:
        return sum(widths.values()) + gap * (len(widths) - 1) - width

    while excess() > 0:
        shrinking = [
            number
            for number, each in widths.items()
            if (least := layout[number].least) is not None and each > least
        ]
        if shrinking:
            # The widest; of equal ones the last, which matters least.
            widths[max(shrinking, key=lambda number: (widths[number], number))] -= 1
            continue
        dropped = max(widths, key=lambda number: layout[number].dropped)
        if not layout[dropped].dropped:
            break
        del widths[dropped]
    for number in widths:
        if layout[number].grows:
            widths[number] += max(0, -excess())
    return widths


def _usual(cell: Cell) -> int:
    return cell.width if isinstance(cell, Bar) else length(cell)


@dataclass(frozen=True, slots=True)
class RankTarget:
    """The row of a rank."""

    run: str
    rank: int


@dataclass(frozen=True, slots=True)
class OrderTarget:
    """The head of a column by which ranks are sorted."""

    order: str


Target: TypeAlias = RankTarget | OrderTarget
_KINDS: Final[dict[str, Callable[..., Target]]] = {"rank row": RankTarget, "order": OrderTarget}


@functools.lru_cache(maxsize=1024)
def style_of(target: Target, style: str = "") -> Style:
    """Return a style whose text means something when it is clicked."""
    [name] = (name for name, kind in _KINDS.items() if kind is type(target))
    # The metadata of a style holds no objects.
    return Style.parse(style) + Style.from_meta({name: asdict(target)})


def target_of(style: Style | None) -> Target | None:
    """Return what a text of a style means when it is clicked; None for nothing in particular."""
    meta: dict[str, Any] = style.meta if style is not None else {}
    return next((kind(**meta[name]) for name, kind in _KINDS.items() if name in meta), None)
