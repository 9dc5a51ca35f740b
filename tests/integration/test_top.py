"""Commands on a real terminal: `top` with keys and mouse, and tables as wide as the terminal."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.node import Node
from tests.support.terminal import Terminal, plain
from tests.support.wide_files import BACKWARD, RUNS, write_wide_files

TOP = (sys.executable, "-m", "torchperfd", "top")
PROMPT = "shell> "
MOUSE_ON, MOUSE_OFF = "\x1b[?1000h\x1b[?1006h", "\x1b[?1006l\x1b[?1000l"
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[H\x1b[?25l", "\x1b[?1049l\x1b[?25h"


def started(node: Node, columns: int, rows: int, command: Sequence[str] = TOP) -> Terminal:
    return Terminal(command, {**node.env, "PS1": PROMPT}, columns, rows)


@pytest.fixture
def demo(node: Node) -> Iterator[Node]:
    node.start_daemon("--demo")
    yield node
    node.stop_daemon()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_top_is_driven_by_keys(demo: Node, columns: int, rows: int) -> None:
    terminal = started(demo, columns, rows)
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
    terminal = started(demo, columns, rows)
    assert MOUSE_ON in terminal.wait_for("8 of 8 ranks")
    # Once there is a verdict, rows stay where they are.
    terminal.until(lambda lines: any("0  training" in line for line in lines) and "✓" in "".join(lines))
    terminal.click("0  training")
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
@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_leaves_the_terminal_as_it_was_when_it_is_ended(demo: Node, number: signal.Signals) -> None:
    terminal = started(demo, 80, 24)
    terminal.wait_for("8 of 8 ranks")
    os.kill(terminal.pid, number)
    code, written = terminal.ended()
    assert code == 128 + number
    assert "\x1b[?1049l" in written
    assert written.endswith(MOUSE_OFF)


@pytest.mark.slow
@pytest.mark.needs("bash")
def test_top_gives_the_terminal_to_the_shell_while_suspended(demo: Node) -> None:
    shell = started(demo, 80, 24, ["/bin/bash", "--norc", "--noprofile", "-i"])
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
    terminal = started(demo, 80, 24, ["/usr/bin/env", "TERM=dumb", *TOP])
    code, written = terminal.ended()
    assert code == 0
    assert "8 of 8 ranks" in written
    assert "\x1b" not in written


COMMANDS = {
    "analyze before.json": "6,000.000",
    "compare before.json after.json": "+29,000.000",
    "compare a.json b.json": RUNS[0],
}


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
@pytest.mark.parametrize("command", COMMANDS)
def test_table_is_no_wider_than_the_terminal(
    node: Node, tmp_path: Path, command: str, columns: int, rows: int
) -> None:
    write_wide_files(tmp_path)
    words = [sys.executable, "-m", "torchperfd", *command.split()]
    code, drawn = Terminal(words, node.env, columns, rows, tmp_path).ended()
    assert code == 0, drawn
    lines = plain(drawn).splitlines()
    assert [line for line in lines if len(line) > columns] == []
    assert any(COMMANDS[command] in line for line in lines), drawn
    if columns > 120 and "before" in command:
        # Only what does not fit is shortened.
        assert BACKWARD in drawn
