"""Bars and legends of ``top``: colours on a terminal that has them, letters elsewhere."""

from collections.abc import Mapping, Sequence
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


class Bar:
    """Parts of a whole as a bar as wide as its cell; by letters where there are no colours."""

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
            yield Segment(
                (_letter(name) if plain else "█") * (end - drawn), None if plain else Style.parse(colour)
            )
            drawn = max(drawn, end)
        yield Segment(("·" if plain else "─") * (width - drawn), None if plain else Style.parse("grey30"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_WIDTH, self._width or options.max_width)


class Legend:
    """Which phase has which colour, or which letter."""

    def __init__(self, colours: Mapping[str, str]) -> None:
        self._colours = colours

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(no_wrap=True, overflow="ellipsis")
        for name, colour in self._colours.items():
            text.append(f"{_letter(name)} " if _plain(console) else "■ ", style=colour)
            text.append(f"{_NAMES.get(name, name)}  ", style="dim")
        yield text


def _plain(console: Console) -> bool:
    return console.no_color or console.color_system is None


def _letter(name: str) -> str:
    return "." if name == "other" else _NAMES.get(name, name)[:1]


def name_of(phase: str) -> str:
    """Return what people read for a phase."""
    return _NAMES.get(phase, phase)


def colours(run: RunView) -> dict[str, str]:
    """Return the colour of each phase there is, in the order of a step, waiting last."""
    users = [name for name in run.phases if name not in _COLOURS]
    own = {name: _USERS[position % len(_USERS)] for position, name in enumerate(users)}
    waits = [WAIT] if any(rank.phase_seconds.get(WAIT) for rank in run.ranks) else []
    return {name: own.get(name) or _COLOURS[name] for name in (*run.phases, *waits)}
