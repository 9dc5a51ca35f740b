"""``torchperfd top`` on a terminal of its own, with a real daemon."""

import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl

import pytest
from tests.support.node import Node

DEADLINE_S = 60
TOP = [sys.executable, "-m", "torchperfd", "top"]
PROMPT = "shell> "
MOUSE_ON, MOUSE_OFF = "\x1b[?1000h\x1b[?1006h", "\x1b[?1006l\x1b[?1000l"
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[H\x1b[?25l", "\x1b[?1049l\x1b[?25h"


class Terminal:
    """A process on a pseudo-terminal, and what it has drawn last."""

    def __init__(self, node: Node, columns: int, rows: int, command: list[str] = TOP) -> None:
        self._drawn = ""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.execve(command[0], command, {**node.env, "TERM": "xterm-256color", "PS1": PROMPT})
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a window does."""
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

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
        while text not in self._drawn:
            assert time.monotonic() < deadline, self._drawn[-2000:]
            self._read(0.1)
        before, _, self._drawn = self._drawn.partition(text)
        return before

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

    def end(self, keys: str = "q") -> tuple[int, str]:
        """Press keys that end it, and return the exit code and what was written meanwhile."""
        self.press(keys)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what was written since the last frame."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._read(0.1)
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status), self._drawn.rpartition("\x1b[H")[2]
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
    code, written = terminal.end()
    assert code == 0
    assert written.endswith(MOUSE_OFF)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_top_is_driven_by_the_mouse(demo: Node, columns: int, rows: int) -> None:
    terminal = Terminal(demo, columns, rows)
    assert MOUSE_ON in terminal.wait_for("8 of 8 ranks")
    terminal.until(lambda lines: any("training" in line for line in lines))
    terminal.click("training")
    terminal.until(lambda lines: any("SHARE OF THE STEP" in line for line in lines))
    terminal.click("SHARE OF THE STEP")
    terminal.until(lambda lines: any("»" in line for line in lines))
    terminal.click("WAIT")
    terminal.until(lambda lines: "by wait" in lines[0])
    terminal.click("RANK")
    terminal.until(lambda lines: "by wait" not in lines[0])
    terminal.press("\x1b[<65;1;1M" * 3)
    lines = terminal.until(lambda lines: any(re.search("»(▶ )?[3-7] ", line) for line in lines))
    assert max(map(len, lines)) <= columns
    terminal.press("m")
    terminal.wait_for(MOUSE_OFF)
    terminal.press("m")
    terminal.wait_for(MOUSE_ON)
    # Ctrl-C ends it as q does.
    code, written = terminal.end("\x03")
    assert code == 0
    assert written.endswith(MOUSE_OFF)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_leaves_the_terminal_as_it_was_when_it_is_ended(demo: Node, number: signal.Signals) -> None:
    terminal = Terminal(demo, 80, 24)
    terminal.wait_for("8 of 8 ranks")
    os.kill(terminal.pid, number)
    code, written = terminal.ended()
    assert code == 128 + number
    assert "\x1b[?1049l" in written
    assert written.endswith(MOUSE_OFF)


@pytest.mark.slow
@pytest.mark.needs("bash")
def test_top_gives_the_terminal_to_the_shell_while_suspended(demo: Node) -> None:
    shell = Terminal(demo, 80, 24, ["/bin/bash", "--norc", "--noprofile", "-i"])
    shell.wait_for(PROMPT)
    shell.press(f"{shlex.join(TOP)}\n")
    shell.wait_for("8 of 8 ranks")
    shell.press("\x1a")
    assert f"{MOUSE_OFF}{LEAVE_SCREEN}" in shell.wait_for("Stopped")
    shell.wait_for(PROMPT)
    shell.press("stty -a; fg\n")
    modes = shell.wait_for("8 of 8 ranks")
    assert " icanon" in modes
    assert " echo " in modes
    assert f"{ENTER_SCREEN}{MOUSE_ON}" in modes
    shell.press("q")
    assert MOUSE_OFF in shell.wait_for(PROMPT)
    assert shell.end("exit\n")[0] == 0


@pytest.mark.slow
def test_top_on_a_dumb_terminal_prints_one_frame(demo: Node) -> None:
    terminal = Terminal(demo, 80, 24, ["/usr/bin/env", "TERM=dumb", *TOP])
    code, written = terminal.ended()
    assert code == 0
    assert "8 of 8 ranks" in written
    assert "\x1b" not in written
