"""A command on a pseudo-terminal: what its screen shows, and keys and clicks that it reads."""

import codecs
import io
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pyte

DEADLINE_S = 60
_KEPT_CHARACTERS = 500_000


class Stdout(io.StringIO):
    """What a command prints, on a terminal or in a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def plain(text: str) -> str:
    """Return what a terminal shows of a text: its lines without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


class Terminal:
    """A process on a terminal of its own.

    Attributes:
        pid: The process, which leads a session and a process group.
        drawn: What it has written, with control sequences; the newest half million characters.
        shown: The screen.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        columns: int,
        rows: int,
        directory: Path | None = None,
        screen: pyte.Screen | None = None,
    ) -> None:
        self.drawn = ""
        self.shown = screen or pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self.shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pid, self._fd = pty.fork()
        if not self.pid:
            try:
                _resize(0, columns, rows)
                os.chdir(directory or ".")
                os.execvpe(command[0], list(command), {**env, "TERM": "xterm-256color"})
            finally:
                os._exit(127)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a window does."""
        self.shown.resize(rows, columns)
        _resize(self._fd, columns, rows)

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def click(self, text: str) -> None:
        """Click on the first place of the screen that has a text."""
        lines = self.screen()
        line = next(number for number, each in enumerate(lines) if text in each)
        place = f"{lines[line].index(text) + 1};{line + 1}"
        self.press(f"\x1b[<0;{place}M\x1b[<0;{place}m")

    def wait_for(self, text: str) -> str:
        """Wait until a text is written; return all that was written before it, and forget both."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.drawn:
            assert time.monotonic() < deadline, self.drawn[-2000:]
            self._read(0.1)
        before, _, self.drawn = self.drawn.partition(text)
        return before

    def screen(self) -> list[str]:
        """Return the lines of the screen."""
        self._read(0.1)
        return [line.rstrip() for line in self.shown.display]

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait for a screen that fulfils a condition; return it."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(lines := self.screen()):
            assert time.monotonic() < deadline, "\n".join(lines)
        return lines

    def modes(self) -> list[object]:
        """Return the modes of the terminal."""
        return termios.tcgetattr(self._fd)

    def end(self, keys: str = "q") -> tuple[int, str]:
        """Press keys that end it, and return the exit code and what was written since the last wait."""
        self.press(keys)
        return self.ended()

    def ended(self, seconds: float = DEADLINE_S) -> tuple[int, str]:
        """Wait for its end; return the exit code and what was written since the last wait."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._read(0.1)
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status), self.drawn
        raise AssertionError(f"it does not end:\n{self.drawn[-2000:]}")

    def hang_up(self, seconds: float = DEADLINE_S) -> int:
        """Close the terminal, as a window does; wait for the end of the process, and return its exit code."""
        os.close(self._fd)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("it does not end")

    def _read(self, seconds: float) -> None:
        while select.select([self._fd], [], [], seconds)[0]:
            data = b""
            # Linux reports the end of a terminal as an error.
            with suppress(OSError):
                data = os.read(self._fd, 65536)
            if not data:
                time.sleep(seconds)
                return
            text = self._decoder.decode(data)
            self._stream.feed(text)
            self.drawn = (self.drawn + text)[-_KEPT_CHARACTERS:]
            seconds = 0.0


def _resize(terminal: int, columns: int, rows: int) -> None:
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
