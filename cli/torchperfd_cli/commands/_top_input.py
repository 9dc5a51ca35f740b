"""The input of ``top``: modes of the terminal, keys and mouse, and what on the screen can be clicked."""

import codecs
import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.screen import Screen
from rich.style import Style

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


_MOUSE_ON: Final = b"\x1b[?1000h\x1b[?1006h"
_MOUSE_OFF: Final = b"\x1b[?1006l\x1b[?1000l"
_LEAVE_SCREEN: Final = b"\x1b[?1049l\x1b[?25h"
_ENTER_SCREEN: Final = b"\x1b[?1049h\x1b[H\x1b[?25l"
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_Modes = list[int | list[bytes | int]]


class Terminal:
    """Keys without Enter, and clicks, while its block lasts; nothing without a terminal on both ends.

    A signal that ends the process leaves the block first, with exit code 128 and its number. Ctrl-Z gives the
    terminal back to the shell until the process goes on.
    """

    def __init__(self) -> None:
        self.is_on = sys.stdin.isatty() and sys.stdout.isatty()
        self._reports_mouse = False
        self._before: _Modes | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Terminal":
        if not self.is_on:
            return self
        try:
            self._before = termios.tcgetattr(sys.stdin)
            for number in _ENDING:
                self._handle(number, _end)
            self._handle(signal.SIGTSTP, self._suspend)
            tty.setcbreak(sys.stdin)
            self.report_mouse(wanted=True)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def report_mouse(self, *, wanted: bool) -> None:
        """Have clicks reported, or leave the mouse to the terminal, which selects text with it."""
        if self.is_on:
            self._reports_mouse = wanted
            _write(_MOUSE_ON if wanted else _MOUSE_OFF)

    def _leave(self) -> None:
        if self._reports_mouse:
            self.report_mouse(wanted=False)
        if self._before is not None:
            # The terminal may be gone, and with it what there is to restore.
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
        before = signal.getsignal(number)
        # One that is ignored, as by nohup, stays so.
        if before is not signal.SIG_IGN:
            self._handlers[number] = before
            signal.signal(number, handler)

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Stop as without a handler, with the terminal as it was; go on with the one that ``top`` needs."""
        reported = self._reports_mouse
        _write((_MOUSE_OFF if reported else b"") + _LEAVE_SCREEN)
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
        signal.signal(number, signal.SIG_DFL)
        # To this thread, so that it has stopped before the next line.
        signal.raise_signal(number)
        signal.signal(number, self._suspend)
        tty.setcbreak(sys.stdin)
        _write(_ENTER_SCREEN + (_MOUSE_ON if reported else b""))


def _end(number: int, _: FrameType | None) -> None:
    # A second signal would interrupt what the first one has begun to undo.
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _write(sequence: bytes) -> None:
    # Past the buffer of stdout, which a signal may have interrupted.
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), sequence)


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
