"""Commands on a real terminal: `top` with keys and mouse, and tables as wide as the terminal."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.node import Node, new_node
from tests.support.terminal import Terminal, plain
from tests.support.wide_files import BACKWARD, RUNS, write_wide_files

TOP = (sys.executable, "-m", "torchperfd", "top")
PROMPT = "shell> "
MOUSE = ("?1000", "?1003", "?1006")
ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def started(node: Node, columns: int, rows: int, command: Sequence[str] = TOP) -> Terminal:
    return Terminal(command, {**node.env, "PS1": PROMPT}, columns, rows)


def modes_left(written: str) -> set[str]:
    """Return the private modes of the terminal that a program has switched on and not off again."""
    left: set[str] = set()
    for mode, end in re.findall(r"\x1b\[(\?\d+)([hl])", written):
        (left.add if end == "h" else left.discard)(mode)
    # A cursor that is shown and lines that are wrapped are as it began.
    return left - {"?25", "?7"}


@pytest.fixture(scope="module")
def demo() -> Iterator[Node]:
    """A node with simulated ranks, which `top` changes nothing of.

    For half a minute nothing is wrong with them. So the first test finds a row for each on a small screen,
    and the others look at no rank, or have a large one.
    """
    with new_node() as node:
        node.start_daemon("--demo")
        yield node
        node.stop_daemon()


@pytest.fixture
def young_demo(node: Node) -> Iterator[Node]:
    """One that has just begun."""
    node.start_daemon("--demo")
    yield node
    node.stop_daemon()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_top_is_driven_by_the_mouse(demo: Node, columns: int, rows: int) -> None:
    terminal = started(demo, columns, rows)
    # Once there is a verdict, rows stay where they are.
    terminal.until(
        lambda lines: "0  training" in (drawn := "".join(lines)) and not {"✓", "✗"}.isdisjoint(drawn)
    )
    assert modes_left(terminal.drawn).issuperset(MOUSE)
    terminal.click("0  training")
    terminal.until(lambda lines: any("SHARE OF THE STEP" in line for line in lines))
    terminal.click("SHARE OF THE STEP")
    terminal.until(lambda lines: any("»" in line for line in lines))
    terminal.click("WAIT")
    terminal.until(lambda lines: "by wait" in lines[0])
    terminal.click("RANK")
    terminal.until(lambda lines: "by wait" not in lines[0])
    terminal.press("\x1b[<65;1;1M" * 3)
    terminal.until(lambda lines: any(re.search("»(▶ )?[3-7] ", line) for line in lines))
    terminal.press("m")
    terminal.until(lambda lines: "mouse off" in lines[-1])
    assert modes_left(terminal.drawn).isdisjoint(MOUSE)
    terminal.press("m")
    terminal.until(lambda lines: "mouse off" not in lines[-1])
    assert "?1000" in modes_left(terminal.drawn)
    # Ctrl-C ends it as q does.
    code, written = terminal.end("\x03")
    assert code == 0
    assert modes_left(written) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_top_is_driven_by_keys(young_demo: Node, columns: int, rows: int) -> None:
    terminal = started(young_demo, columns, rows)
    # What is drawn comes in parts.
    terminal.until(lambda lines: any("8 of 8 ranks" in line for line in lines) and "quit" in lines[rows - 1])
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
    terminal.until(lambda lines: "quit" in lines[29])
    code, written = terminal.end()
    assert code == 0
    assert modes_left(written) == set()


@pytest.mark.slow
@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_top_leaves_the_terminal_as_it_was_when_it_is_ended(demo: Node, number: signal.Signals) -> None:
    terminal = started(demo, 80, 24)
    before = terminal.modes()
    terminal.until(lambda lines: any("8 of 8 ranks" in line for line in lines))
    assert terminal.modes() != before
    os.kill(terminal.pid, number)
    terminal.until(lambda _: terminal.modes() == before)
    code, written = terminal.ended()
    assert code == (0 if number is signal.SIGINT else 128 + number)
    assert written.index(LEAVE_SCREEN) < written.rindex(SHOW_CURSOR)
    assert modes_left(written) == set()


@pytest.mark.slow
@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize(("first", "code"), [("", 128 + signal.SIGHUP), ("trap '' HUP;", 0)])
def test_top_ends_with_its_terminal(demo: Node, first: str, code: int) -> None:
    """Also under nohup, where no signal comes."""
    terminal = started(demo, 80, 24, ["/bin/sh", "-c", f"{first} exec {shlex.join(TOP)}"])
    terminal.until(lambda lines: any("8 of 8 ranks" in line for line in lines))
    assert terminal.hang_up() == code


@pytest.mark.slow
@pytest.mark.needs("bash")
def test_top_gives_the_terminal_to_the_shell_while_suspended(demo: Node) -> None:
    shell = started(demo, 80, 24, ["/bin/bash", "--norc", "--noprofile", "-i"])
    shell.wait_for(PROMPT)
    shell.press(f"{shlex.join(TOP)}\n")
    shell.until(lambda lines: "quit" in lines[-1])
    shell.press("\x1a")
    assert modes_left(shell.wait_for("Stopped")).isdisjoint({*MOUSE, "?1049"})
    shell.wait_for(PROMPT)
    shell.press("stty -a; fg\n")
    modes = shell.wait_for(ENTER_SCREEN)
    assert " icanon" in modes
    assert " echo " in modes
    shell.wait_for("8 of 8 ranks")
    shell.until(lambda lines: "quit" in lines[-1])
    assert modes_left(shell.drawn) <= {*MOUSE, "?1015", "?1004", "?2004", "?1049"}
    shell.press("q")
    assert "?1049" not in modes_left(ENTER_SCREEN + shell.wait_for(PROMPT))
    assert shell.end("exit\n")[0] == 0


@pytest.mark.slow
def test_top_restores_the_terminal_though_stopped_before(young_demo: Node) -> None:
    terminal = started(young_demo, 80, 24)
    before = terminal.modes()
    terminal.until(lambda lines: any("8 of 8 ranks" in line for line in lines))
    os.kill(terminal.pid, signal.SIGSTOP)
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.press("\x1b[B")
    terminal.until(lambda lines: any("»0" in line for line in lines))
    terminal.press("q")
    terminal.until(lambda _: terminal.modes() == before)
    assert terminal.ended()[0] == 0


@pytest.mark.slow
def test_top_draws_on_stdout_wherever_stderr_goes(demo: Node, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    terminal = started(demo, 80, 24, ["/bin/sh", "-c", f"{shlex.join(TOP)} 2> {errors}"])
    terminal.until(lambda lines: any("8 of 8 ranks" in line for line in lines))
    assert terminal.end()[0] == 0
    assert errors.read_text() == ""


@pytest.mark.slow
def test_top_without_textual_says_what_to_install(node: Node) -> None:
    script = "import sys; sys.modules['textual'] = None; from torchperfd_cli.main import main; main(['top'])"
    code, written = started(node, 80, 24, [sys.executable, "-c", script]).ended()
    assert code == 1
    assert "textual is not installed, which draws `top`; `pip install textual`" in plain(written)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["TERM=dumb", "exec < /dev/null"])
def test_top_without_keys_prints_one_frame(demo: Node, how: str) -> None:
    command = f"{how}; export TERM; {shlex.join(TOP)}"
    code, written = started(demo, 80, 24, ["/bin/sh", "-c", command]).ended()
    assert code == 0
    assert "8 of 8 ranks" in written
    assert "\x1b[?1049h" not in written


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
