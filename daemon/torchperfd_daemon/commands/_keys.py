"""The keyboard of a terminal, key by key."""

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType


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

    def quit_within(self, seconds: float) -> bool:
        """Wait so long, and return whether q was pressed or the terminal has gone; then at once."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._before is None:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                try:
                    pressed = os.read(sys.stdin.fileno(), 64)
                except OSError:
                    return True
                if not pressed or b"q" in pressed.lower():
                    return True
        return False
