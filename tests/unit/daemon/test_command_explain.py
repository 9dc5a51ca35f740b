"""`torchperfd explain`: the page on a cause, in a terminal."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchperfd.model.card import CauseCard
from torchperfd.v1.contract import PHASES
from torchperfd_cli.commands import explain
from torchperfd_cli.main import cli, run_command
from torchperfd_daemon.diagnosis import Cause


@pytest.mark.parametrize("cause", Cause)
def test_explain_prints_the_page_without_addresses(cause: Cause) -> None:
    printed = CliRunner().invoke(cli, ["explain", cause.slug]).output
    assert printed.splitlines()[0] == f"# {cause.value}"
    assert "](" not in printed
    assert "## Fix\n" in printed


def test_explain_alone_lists_each_cause_with_a_sentence() -> None:
    lines = CliRunner().invoke(cli, ["explain"]).output.splitlines()
    assert [line.split()[0] for line in lines] == [cause.slug for cause in Cause]
    assert all(len(line.split()) >= 5 for line in lines)


def test_explain_unknown_cause_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", "input-bond"]) == 2
    assert capsys.readouterr().err == "torchperfd: no cause input-bond; did you mean input-bound?\n"
    assert run_command(["explain", "weather"]) == 2
    assert capsys.readouterr().err == "torchperfd: no cause weather; `torchperfd explain` lists all\n"


@pytest.mark.parametrize("name", ["healthy", "HEALTHY", "none"])
def test_explain_healthy_is_the_page_on_no_cause(name: str) -> None:
    assert CliRunner().invoke(cli, ["explain", name]).output.startswith("# none\n")


def test_explain_takes_a_cause_as_screens_write_it() -> None:
    assert CliRunner().invoke(cli, ["explain", "CPU contention"]).output.startswith("# CPU contention\n")


@pytest.mark.parametrize("phase", [each for each in PHASES if each != "checkpoint"])
def test_explain_of_a_phase_leads_to_pages_that_exist(phase: str) -> None:
    first, *commands = CliRunner().invoke(cli, ["explain", phase]).output.splitlines()
    assert first.startswith(f"{phase} is a phase of the step")
    assert commands
    assert all(run_command(each.split()[1:]) == 0 for each in commands)


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


def test_explain_json_has_the_page_of_a_cause() -> None:
    document = json.loads(CliRunner().invoke(cli, ["explain", "input-bound", "--json"]).output)
    assert (document["schema"], document["cause"]) == ("torchperfd.explain/1", "input-bound")
    assert document["page"].startswith("# input-bound")
    assert document["meaning"] in " ".join(document["page"].split())


def test_explain_json_lists_causes_of_all_and_of_a_phase() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["explain", "--json"]).output)
    assert [each["cause"] for each in listed["causes"]] == [cause.slug for cause in Cause]
    of_data = json.loads(CliRunner().invoke(cli, ["explain", "data", "--json"]).output)
    assert of_data["phase"] == "data"
    assert of_data["causes"][0]["cause"] == "input-bound"


def test_explain_two_letters_suggest_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explain", "foo"]) == 2
    assert capsys.readouterr().err == "torchperfd: no cause foo; `torchperfd explain` lists all\n"
