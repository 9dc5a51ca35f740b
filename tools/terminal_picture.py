"""Turns what a command wrote to a terminal into a page that looks like the terminal."""

import html
from collections.abc import Iterator, Sequence
from typing import Final

import pyte
from pyte.screens import Char

CELL: Final = (9, 17)
"""Width and height of a character in pixels."""
_INK, _GROUND = "#d7dde5", "#11151a"
_COLOURS: Final = {
    "black": "#2b333d",
    "red": "#ff7b72",
    "green": "#5fd38d",
    "brown": "#e3b341",
    "blue": "#79a8ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#d7dde5",
    "brightblack": "#8b96a4",
    "brightred": "#ffa198",
    "brightgreen": "#8ff0a4",
    "brightbrown": "#f2cc60",
    "brightblue": "#a5c8ff",
    "brightmagenta": "#e2c5ff",
    "brightcyan": "#84e5ec",
    "brightwhite": "#ffffff",
}
"""By pyte's names; it has hexadecimal digits for all other colours."""
# In this font 14.95 px make a character 9 px wide.
_STYLE: Final = f"""
body {{ margin: 0; width: max-content; background: {_GROUND}; color: {_INK};
  font: 14.95px/{CELL[1]}px "DejaVu Sans Mono", monospace; }}
header {{ padding: 6px 16px; background: #232b34; color: #a9b4c1; text-align: center; }}
main {{ padding: 10px 16px 12px; }}
div {{ display: flex; height: {CELL[1]}px; }}
i {{ flex: none; width: {CELL[0]}px; font-style: normal; white-space: pre; }}
"""


class DimScreen(pyte.Screen):
    """A screen that knows dim text."""

    def select_graphic_rendition(self, *attrs: int) -> None:
        """Keep dim text, which pyte does not know, in the place of blinking text, which no command writes."""
        super().select_graphic_rendition(*_dim_as_blinking(attrs))


def _dim_as_blinking(codes: Sequence[int]) -> Iterator[int]:
    skipped = 0
    for at, code in enumerate(codes):
        if skipped:
            skipped -= 1
        elif code in (38, 48):
            # A colour: three numbers follow a 2, one follows a 5.
            skipped = 4 if codes[at + 1 : at + 2] == (2,) else 2
        elif code == 2:
            yield 5
            continue
        yield code


def screen_after(output: str, columns: int, rows: int) -> pyte.Screen:
    """Return the screen after all that a program wrote, with control sequences."""
    screen = DimScreen(columns, rows)
    pyte.Stream(screen).feed(output)
    return screen


def page_of(screen: pyte.Screen, title: str) -> str:
    """Return a page of HTML with a screen; empty lines at its end are left out.

    Args:
        title: The command, for the head of the window.
    """
    used = max((at for at, line in enumerate(screen.display, 1) if line.strip()), default=0)
    lines = (
        "".join(_cell(screen.buffer[row][column]) for column in range(screen.columns)) for row in range(used)
    )
    body = "".join(f"<div>{line}</div>" for line in lines)
    return (
        f'<!doctype html><meta charset="utf-8"><style>{_STYLE}</style>'
        f"<header>{html.escape(title)}</header><main>{body}</main>"
    )


def _cell(char: Char) -> str:
    ink, ground = _colour(char.fg, _INK), _colour(char.bg, "")
    if char.reverse:
        ink, ground = ground or _GROUND, ink
    # Glyphs of full blocks would leave seams between cells.
    if char.data == "█":
        ground = ink
    styles = {
        "color": ink if ink != _INK else "",
        "background": ground,
        "font-weight": "bold" if char.bold else "",
        "opacity": ".7" if char.blink else "",
    }
    style = "; ".join(f"{name}: {value}" for name, value in styles.items() if value)
    return f'<i style="{style}">{html.escape(char.data)}</i>' if style else f"<i>{html.escape(char.data)}</i>"


def _colour(name: str, default: str) -> str:
    return default if name == "default" else _COLOURS.get(name) or f"#{name}"
