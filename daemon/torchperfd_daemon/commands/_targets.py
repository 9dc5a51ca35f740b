"""What on the screen of ``top`` can be clicked: the style of each part has its meaning as metadata."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.screen import Screen
from rich.style import Style


@dataclass(frozen=True, slots=True)
class RankTarget:
    """The row of a rank."""

    run: str
    rank: int


@dataclass(frozen=True, slots=True)
class OrderTarget:
    """The head of a column by which ranks are sorted."""

    order: str


Target = RankTarget | OrderTarget
_KINDS: Final[dict[str, Callable[..., Target]]] = {"rank row": RankTarget, "order": OrderTarget}


def style_of(target: Target, style: str = "") -> Style:
    """Return a style whose text means something when it is clicked."""
    [name] = (name for name, kind in _KINDS.items() if kind is type(target))
    # The metadata of a style holds no objects.
    return Style.parse(style) + Style.from_meta({name: asdict(target)})


def target_at(screen: RenderableType, column: int, line: int, console: Console) -> Target | None:
    """Return what is at a place of a screen; None if nothing there can be clicked.

    Args:
        screen: What the console shows, in full.
        column: From the left, from 0.
        line: From the top, from 0.
    """
    lines = console.render_lines(Screen(screen), pad=False)
    if not 0 <= line < len(lines):
        return None
    for segment in lines[line]:
        column -= segment.cell_length
        if column < 0:
            meta: dict[str, Any] = segment.style.meta if segment.style is not None else {}
            return next((kind(**meta[name]) for name, kind in _KINDS.items() if name in meta), None)
    return None
