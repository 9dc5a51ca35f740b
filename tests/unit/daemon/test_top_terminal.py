"""The terminal of `top`, and commands that are repeated by `--watch`."""

import io
import json
import os
import pty
import select
import signal
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from tests.support.values import some

from torchperfd_cli import main
from torchperfd_cli.commands import _top_input
from torchperfd_cli.commands._output import again
from torchperfd_cli.commands._top_input import Terminal
from torchperfd_daemon.errors import NoSuchTargetError, PartialResultError

MOUSE_ON = "\x1b[?1000h\x1b[?1006h"
MOUSE_OFF = "\x1b[?1006l\x1b[?1000l"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


@dataclass
class Screen:
    """The other end of the terminal that is this process's stdin and stdout."""

    fd: int
    slave: int

    def written(self) -> str:
        """Return what has been written since the last time."""
        text = ""
        while select.select([self.fd], [], [], 0)[0]:
            text += os.read(self.fd, 4096).decode()
        return text

    def modes(self) -> Any:
        return termios.tcgetattr(self.slave)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    fd, slave = pty.openpty()
    with os.fdopen(os.dup(slave), "r") as stdin, os.fdopen(os.dup(slave), "w") as stdout:
        # pytest replaces those of sys itself between the fixture and the test.
        monkeypatch.setattr(_top_input, "sys", SimpleNamespace(stdin=stdin, stdout=stdout))
        yield Screen(fd, slave)
    os.close(fd)
    os.close(slave)


def test_terminal_reports_the_mouse_within_its_block(screen: Screen) -> None:
    before, handlers = screen.modes(), [signal.getsignal(each) for each in SIGNALS]
    with Terminal() as terminal:
        assert screen.written() == MOUSE_ON
        assert screen.modes() != before
        terminal.report_mouse(wanted=False)
        terminal.report_mouse(wanted=True)
        assert screen.written() == MOUSE_OFF + MOUSE_ON
    assert screen.written() == MOUSE_OFF
    assert screen.modes() == before
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


def test_terminal_is_restored_after_an_exception(screen: Screen) -> None:
    before = screen.modes()
    with pytest.raises(ZeroDivisionError), Terminal():
        _ = 1 / 0
    assert screen.written() == MOUSE_ON + MOUSE_OFF
    assert screen.modes() == before


def test_terminal_is_restored_where_entering_it_fails(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, handlers = screen.modes(), [signal.getsignal(each) for each in SIGNALS]
    monkeypatch.setattr("tty.setcbreak", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), Terminal():
        raise AssertionError("not reached")
    assert screen.modes() == before
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_terminal_is_restored_after_a_signal_that_ends(screen: Screen, number: signal.Signals) -> None:
    before = screen.modes()

    def end_twice() -> None:
        with Terminal():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)

    with pytest.raises(SystemExit) as ended:
        end_twice()
    assert ended.value.code == 128 + number
    assert screen.written() == MOUSE_ON + MOUSE_OFF
    assert screen.modes() == before


def test_terminal_is_restored_after_ctrl_c(screen: Screen) -> None:
    with pytest.raises(KeyboardInterrupt), Terminal():
        signal.raise_signal(signal.SIGINT)
    assert screen.written() == MOUSE_ON + MOUSE_OFF


def test_terminal_is_the_shells_while_suspended(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    before, stopped = screen.modes(), []
    send = signal.raise_signal

    def stop(number: int) -> None:
        stopped.append((number, signal.getsignal(number), screen.written(), screen.modes()))

    monkeypatch.setattr("signal.raise_signal", stop)
    with Terminal():
        within = screen.modes()
        screen.written()
        send(signal.SIGTSTP)
        leave = MOUSE_OFF + "\x1b[?1049l\x1b[?25h"
        assert stopped == [(signal.SIGTSTP, signal.SIG_DFL, leave, before)]
        assert screen.written() == "\x1b[?1049h\x1b[H\x1b[?25l" + MOUSE_ON
        assert screen.modes() == within


def test_ignored_signals_stay_ignored(screen: Screen) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Terminal():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_pipe_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(_top_input, "sys", SimpleNamespace(stdin=stdin, stdout=stdout))
        with Terminal() as terminal:
            assert not terminal.is_on
            assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


WATCHED = ("ps", "ranks", "steps", "diagnose", "whatif", "goodput", "stacks", "doctor", "runs")


class Sleeper:
    """A clock that presses Ctrl-C instead of the last sleep."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, seconds: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", WATCHED)
def test_read_command_can_be_watched(name: str) -> None:
    command = some(main.cli.get_command(click.Context(main.cli), name))
    assert any("--watch" in parameter.opts for parameter in command.params)


def test_again_repeats_until_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    again(lambda: click.echo("a frame"), watch=True, as_json=False, sleep=Sleeper(3))
    assert capsys.readouterr().out == "a frame\n\n" * 3


def test_again_as_json_is_one_document_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    again(lambda: click.echo("{}"), watch=True, as_json=True, sleep=Sleeper(2))
    assert capsys.readouterr().out == "{}\n{}\n"


def test_again_goes_on_after_a_partial_result(capsys: pytest.CaptureFixture[str]) -> None:
    def partial() -> None:
        raise PartialResultError("one daemon did not answer")

    again(partial, watch=True, as_json=True, sleep=Sleeper(2))
    assert capsys.readouterr().err == "one daemon did not answer\n" * 2
    with pytest.raises(PartialResultError):
        again(partial, watch=False, as_json=True)


def test_again_ends_with_an_error_that_lasts() -> None:
    def gone() -> None:
        raise NoSuchTargetError("no run bert")

    with pytest.raises(NoSuchTargetError):
        again(gone, watch=True, as_json=False, sleep=Sleeper(9))


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_again_replaces_the_screen_once_output_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, seen = FakeTerminal(), []
    monkeypatch.setattr(sys, "stdout", terminal)

    def once() -> None:
        click.echo("a line")
        seen.append(terminal.getvalue())
        click.echo("its end")

    again(once, watch=True, as_json=False, sleep=Sleeper(2))
    frame = "\x1b[H\x1b[2Ja line\nits end\n"
    assert seen == ["", frame]
    assert terminal.getvalue() == frame * 2


@pytest.mark.parametrize("arguments", [["runs"], ["captures", "list"], ["doctor"]])
def test_watch_with_json_writes_a_document_a_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TORCHPERFD_SOCKET", "TORCHPERFD_RUNS_DIR", "TORCHPERFD_CAPTURES_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setattr("time.sleep", Sleeper(3))
    assert main.run_command([*arguments, "--watch", "--json"]) in (0, 1)
    schemas = [json.loads(line)["schema"] for line in capsys.readouterr().out.splitlines()]
    assert len(schemas) == 3
    assert len(set(schemas)) == 1


def test_stacks_are_not_signalled_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command(["stacks", "--watch", "--signal"]) == 2
    assert "--signal can crash a rank, so it is not repeated" in capsys.readouterr().err
