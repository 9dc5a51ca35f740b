"""The keyboard of a terminal, key by key."""

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Final

UP: Final = "up"
DOWN: Final = "down"
PAGE_UP: Final = "page up"
PAGE_DOWN: Final = "page down"
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


class Keys:
    """Reads keys while its block lasts, without waiting for Enter; off a terminal there are none."""

    def __init__(self) -> None:
        self._before: list[int | list[bytes | int]] | None = None

    def __enter__(self) -> "Keys":
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def within(self, seconds: float) -> list[str]:
        """Return the keys that are pressed within so many seconds, as soon as there are any."""
        if self._before is None:
            time.sleep(seconds)
            return []
        if not select.select([sys.stdin], [], [], max(0.0, seconds))[0]:
            return []
        try:
            pressed = os.read(sys.stdin.fileno(), 64)
        except OSError:
            return [GONE]
        return parse_keys(pressed.decode("utf-8", "ignore")) if pressed else [GONE]


def parse_keys(text: str) -> list[str]:
    """Return the keys in what a terminal has sent: names such as :data:`UP`, or single characters."""
    found = []
    while text:
        sequence = next((each for each in _SEQUENCES if text.startswith(each)), "")
        if sequence:
            found.append(_SEQUENCES[sequence])
        elif text.startswith(("\x1b[", "\x1bO")):
            # An unknown key: its sequence ends with a letter or a tilde.
            end = next((i for i, each in enumerate(text[2:], 2) if each.isalpha() or each == "~"), len(text))
            sequence = text[: end + 1]
        else:
            sequence = text[0]
            found.append(_SINGLE.get(sequence, sequence))
        text = text[len(sequence) :]
    return found
