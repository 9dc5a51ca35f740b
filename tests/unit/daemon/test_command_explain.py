"""`torchperfd explain`: the page on a cause, in a terminal."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from torchperfd.card import CauseCard
from torchperfd_daemon.cli import run_command
from torchperfd_daemon.commands import explain
from torchperfd_daemon.diagnosis import Cause


@pytest.mark.parametrize("cause", Cause)
def test_explain_prints_the_page_without_addresses(cause: Cause) -> None:
    printed = CliRunner().invoke(explain.command, [cause.slug]).output
    assert printed.splitlines()[0] == f"# {cause.value}"
    assert "](" not in printed
    assert "## Fix" in printed


def test_explain_alone_lists_each_cause_with_a_sentence() -> None:
    lines = CliRunner().invoke(explain.command, []).output.splitlines()
    assert [line.split()[0] for line in lines] == [cause.slug for cause in Cause]
    assert all(len(line.split()) >= 5 for line in lines)


def test_explain_unknown_cause_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", "input-bond"]) == 2
    assert "input-bound" in capsys.readouterr().err


def test_explain_without_pages_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "shipped_folders", lambda *_: (tmp_path,))
    assert run_command(["explain", "hang"]) == 1
    assert "install torchperfd from its wheel" in capsys.readouterr().err


@pytest.mark.parametrize("cause", Cause)
def test_command_on_a_card_explains_its_cause(cause: Cause) -> None:
    card = CauseCard(cause.value, "", "", "", 0.0, 0.0, 0.0, 0.0, None)
    assert run_command(card.explanation.split()[1:]) == 0
