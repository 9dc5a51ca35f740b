"""Commands that repeat with ``--watch``, and tables that fit 80 columns."""

from collections.abc import Sequence

import click
import pytest

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon import cli
from torchperfd_daemon.commands import _table, ps
from torchperfd_daemon.commands._watch import again
from torchperfd_daemon.errors import NoSuchTargetError, PartialResultError

WATCHED = ("ps", "ranks", "steps", "diagnose", "whatif", "goodput")


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
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None
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


def run_of(name: str) -> control_pb2.Run:
    identity = session_pb2.RankIdentity(run=name, rank=0, pid=123456, node="node-a")
    status = control_pb2.RankStatus(
        identity=identity, connected=True, state=session_pb2.RUN_STATE_TRAINING, steps=1000, step_seconds=0.1
    )
    return control_pb2.Run(run=name, ranks=[status])


def test_ps_gives_a_long_name_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    long = "train_remote_digits-" + "1bf50" * 12
    ps.print_table([run_of("bert"), run_of(long)], with_node=False)
    lines = capsys.readouterr().out.splitlines()
    assert "run bert" in lines
    assert f"run {long}" in lines
    assert max(len(line) for line in lines if not line.startswith("run ")) <= 80
    ps.print_table([run_of("bert")], with_node=False)
    assert capsys.readouterr().out.startswith("RUN ")


def test_fitted_sums_up_the_smallest_columns() -> None:
    names = [f"phase_number_{number}" for number in range(9)]

    def draw(own: Sequence[str], summed: Sequence[str]) -> list[str]:
        heads = [*own, *(["REST"] if summed else [])]
        return _table.lines(heads, [["1"] * len(heads)])

    table = _table.fitted(names, {name: float(number) for number, name in enumerate(names)}, draw)
    assert table[0].split() == [*names[5:], "REST"]
    assert len(table[0]) <= 80
    assert _table.fitted(names[:2], {}, draw)[0].split() == names[:2]
