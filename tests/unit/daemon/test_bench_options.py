"""The options of ``torchperfd bench``: what they take and what they refuse."""

import click
import pytest

from torchperfd_cli.commands._options import Numbers, Share
from torchperfd_cli.main import run_command


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("12.5%", 0.125)])
def test_share_is_a_number_or_a_percentage(text: str, share: float) -> None:
    assert Share().convert(text, None, None) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-5%", "nan", "inf", "five"])
def test_share_refuses_what_is_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Share().convert(text, None, None)


def test_numbers_are_each_listed_once() -> None:
    assert Numbers().convert("32, 64,32", None, None) == (32, 64)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1.5", "-1", "many"])
def test_numbers_refuse_what_is_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Numbers().convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dataloader", "train"], "'train' names no loader"),
        (["compare", "a:f"], "compare needs two functions"),
        (["compare", "a:f", "b:g", "-p", "size=1", "-p", "size=2"], "a parameter is given twice"),
        (["compare", "a:f", "b:g", "-p", "=1"], "no parameter such as"),
        (["compare", "a:f", "b:g", "--rounds", "2"], "2 is not in the range"),
        (["dataloader", "a:f", "--start-methods", "thread"], "no list of fork, spawn and forkserver"),
    ],
)
def test_command_line_that_is_wrong_is_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", *arguments]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
