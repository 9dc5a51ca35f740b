"""Bars and legends of ``top``: colours on a terminal that has them, letters elsewhere."""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from torchperfd_daemon.views.live import WAIT, RunView

_COLOURS: Final[Mapping[str, str]] = {
    "data": "yellow",
    "h2d": "bright_yellow",
    "forward": "blue",
    "loss": "cyan",
    "backward": "magenta",
    "optimizer": "green",
    "zero_grad": "bright_green",
    "checkpoint": "red",
    "other": "white",
    WAIT: "bright_black",
}
_USERS: Final = ("bright_cyan", "bright_magenta", "bright_blue")
_NAMES: Final[Mapping[str, str]] = {WAIT: "wait"}
_LEAST_WIDTH: Final = 8
LEVEL: Final = "#"
"""The letter of a bar with one part, which is shown only where there are no colours."""


class Bar:
    """Parts of a whole as a bar as wide as its cell; each part is a letter, a colour and its size."""

    def __init__(
        self, parts: Sequence[tuple[str, str, float]], whole: float, width: int | None = None
    ) -> None:
        self._parts, self._whole, self._width = parts, whole, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self._width or options.max_width, options.max_width)
        plain = _plain(console)
        drawn, upto = 0, 0.0
        for name, colour, part in self._parts:
            upto += part
            end = min(width, round(width * upto / self._whole)) if self._whole > 0 else 0
            if end > drawn:
                yield _part(name, colour, end - drawn, plain=plain)
            drawn = max(drawn, end)
        yield Segment(("·" if plain else "─") * (width - drawn), None if plain else Style.parse("grey30"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_WIDTH, self._width or options.max_width)


def _part(name: str, colour: str, width: int, *, plain: bool) -> Segment:
    if plain:
        return Segment(name * width)
    if name == LEVEL:
        # Lines, since filled cells would merge with those of the rows above and below.
        return Segment("━" * width, Style.parse(colour))
    # The letter is there with colours too, because eight colours are hard to distinguish.
    return Segment(name.ljust(width), Style.parse(f"black on {colour}"))


class Legend:
    """Which phase has which colour, or which letter."""

    def __init__(self, colours: Mapping[str, str]) -> None:
        self._colours = colours

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text()
        marks = letters(self._colours)
        for name, colour in self._colours.items():
            text.append(marks[name], style="" if _plain(console) else f"black on {colour}")
            # A line never ends between a letter and its name.
            text.append(f"\u00a0{_NAMES.get(name, name)}", style="dim").append("  ")
        yield text


def _plain(console: Console) -> bool:
    return console.no_color or console.color_system is None


def letters(names: Iterable[str]) -> dict[str, str]:
    """Return a letter for each phase, no two alike: the first one of its name that is free."""
    found: dict[str, str] = {"other": "."}
    for name in names:
        if name not in found:
            wanted = (*_NAMES.get(name, name), *string.ascii_uppercase, *string.digits)
            taken = found.values()
            found[name] = next((each for each in wanted if each.isalnum() and each not in taken), "?")
    return found


def name_of(phase: str) -> str:
    """Return what people read for a phase."""
    return _NAMES.get(phase, phase)


def colours(run: RunView) -> dict[str, str]:
    """Return the colour of each phase there is, in the order of a step, waiting last."""
    users = [name for name in run.phases if name not in _COLOURS]
    own = {name: _USERS[position % len(_USERS)] for position, name in enumerate(users)}
    waits = [WAIT] if any(rank.phase_seconds.get(WAIT) for rank in run.ranks) else []
    return {name: own.get(name) or _COLOURS[name] for name in (*run.phases, *waits)}
