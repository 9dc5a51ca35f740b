"""Commands that are repeated by `--watch`."""

import io
import json
import sys
from pathlib import Path

import click
import pytest
from tests.support.values import some

from torchperfd_cli import main
from torchperfd_cli.commands._output import again
from torchperfd_daemon.errors import NoSuchTargetError, PartialResultError

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
