"""The modes of a terminal that ``top`` needs; undone at every exit, and while ``top`` is suspended."""

import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

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
