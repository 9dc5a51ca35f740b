"""The keyboard and the mouse of a terminal, event by event."""

import codecs
import os
import re
import select
import sys
import time
from dataclasses import dataclass
from typing import Final

UP: Final = "up"
DOWN: Final = "down"
PAGE_UP: Final = "page up"
PAGE_DOWN: Final = "page down"
WHEEL_UP: Final = "wheel up"
WHEEL_DOWN: Final = "wheel down"
ENTER: Final = "enter"
ESCAPE: Final = "escape"
BACKSPACE: Final = "backspace"
GONE: Final = "gone"
"""The terminal has gone."""

_SEQUENCES: Final = {
    "\x1b[A": UP,
    "\x1b[B": DOWN,
    "\x1bOA": UP,
    "\x1bOB": DOWN,
    "\x1b[5~": PAGE_UP,
    "\x1b[6~": PAGE_DOWN,
}
_SINGLE: Final = {"\r": ENTER, "\n": ENTER, "\x1b": ESCAPE, "\x7f": BACKSPACE, "\x08": BACKSPACE}
_MOUSE: Final = re.compile(r"\x1b\[<(?P<button>\d+);(?P<column>\d+);(?P<line>\d+)(?P<end>[Mm])")
_BEGUN: Final = re.compile(r"\x1b\[<[\d;]*\Z")
"""The beginning of an event of the mouse, the rest of which is still on its way."""
_LEFT_BUTTON: Final = "0"
_WHEEL: Final = {"64": WHEEL_UP, "65": WHEEL_DOWN}
_MAX_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Click:
    """The left button of the mouse, pressed.

    Attributes:
        column: From the left, from 0.
        line: From the top, from 0.
    """

    column: int
    line: int


Event = str | Click
"""The name of a key, or a click."""


class Events:
    """Reads what a terminal sends.

    Args:
        is_on: Whether stdin is a terminal that sends keys; else there are none.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._begun = ""

    def within(self, seconds: float) -> list[Event]:
        """Return the events within so many seconds, as soon as there are any."""
        if not self._is_on:
            time.sleep(seconds)
            return []
        if not select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
            return []
        try:
            sent = os.read(sys.stdin.fileno(), _MAX_BYTES)
        except OSError:
            return [GONE]
        if not sent:
            return [GONE]
        text = self._begun + self._decoder.decode(sent)
        begun = _BEGUN.search(text)
        self._begun = begun[0] if begun is not None else ""
        return parse_events(text.removesuffix(self._begun))


def parse_events(text: str) -> list[Event]:
    """Return the events in what a terminal has sent: names such as :data:`UP`, single characters, clicks."""
    found: list[Event] = []
    while text:
        sequence = next((each for each in _SEQUENCES if text.startswith(each)), "")
        mouse = _MOUSE.match(text)
        if sequence:
            found.append(_SEQUENCES[sequence])
        elif mouse is not None:
            sequence = mouse[0]
            found += _of_mouse(mouse)
        elif text.startswith(("\x1b[", "\x1bO")):
            # An unknown key: its sequence ends with a letter or a tilde.
            end = next((i for i, each in enumerate(text[2:], 2) if each.isalpha() or each == "~"), len(text))
            sequence = text[: end + 1]
        else:
            sequence = text[0]
            found.append(_SINGLE.get(sequence, sequence))
        text = text[len(sequence) :]
    return found


def _of_mouse(event: re.Match[str]) -> list[Event]:
    """Return the event that a report of the mouse is; none for a release, and for other buttons."""
    button = event["button"]
    if event["end"] == "m":
        return []
    if button == _LEFT_BUTTON:
        return [Click(int(event["column"]) - 1, int(event["line"]) - 1)]
    return [_WHEEL[button]] if button in _WHEEL else []
