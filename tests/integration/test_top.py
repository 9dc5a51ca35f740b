"""``torchperfd top`` on a terminal of its own, with a real daemon."""

import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl

import pytest
from tests.support.node import Node

DEADLINE_S = 60


class Terminal:
    """A process on a pseudo-terminal, and what it has drawn last."""

    def __init__(self, node: Node, columns: int, rows: int) -> None:
        self._drawn = ""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            self_command = [sys.executable, "-m", "torchperfd", "top"]
            os.execve(sys.executable, self_command, {**node.env, "TERM": "xterm-256color"})
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a window does."""
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def screen(self) -> list[str]:
        """Return the lines of the newest frame that is complete."""
        self._read(0.1)
        frames = self._drawn.split("\x1b[H")
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-2] if len(frames) > 2 else "")
        return [line.rstrip() for line in text.replace("\r", "").split("\n")]

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait for a screen that fulfils a condition; return it."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(lines := self.screen()):
            assert time.monotonic() < deadline, "\n".join(lines)
        return lines

    def end(self) -> int:
        """Press q, and return the exit code."""
        self.press("q")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it does not end")

    def _read(self, seconds: float) -> None:
        while select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:
                return
            self._drawn = (self._drawn + data.decode("utf-8", "ignore"))[-200_000:]
            seconds = 0.0


@pytest.fixture
def demo(node: Node) -> Iterator[Node]:
    node.start_daemon("--demo")
    yield node
    node.stop_daemon()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_top_is_driven_by_keys(demo: Node, columns: int, rows: int) -> None:
    terminal = Terminal(demo, columns, rows)
    lines = terminal.until(lambda lines: any("8 of 8 ranks" in line for line in lines))
    assert "quit" in lines[-1]
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    terminal.press("\x1b[B")
    terminal.until(lambda lines: any("»0" in line for line in lines))
    terminal.press("\r")
    terminal.until(lambda lines: any("SHARE OF THE STEP" in line for line in lines))
    terminal.press("\x1b")
    terminal.until(lambda lines: any("VS PEERS" in line for line in lines))
    terminal.press("?")
    terminal.until(lambda lines: any("this help" in line for line in lines))
    terminal.press("?p")
    terminal.until(lambda lines: "paused" in lines[0])
    terminal.resize(100, 30)
    terminal.until(lambda lines: len(lines) == 30)
    assert terminal.end() == 0
