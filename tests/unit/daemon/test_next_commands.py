"""Next commands on cards, and `torchperfd explain`."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from tests.support.values import some

from torchperfd.launch.run_report import closing_card
from torchperfd.model.card import CauseCard, VerdictCard, card_of
from torchperfd.model.totals import CudaMemory, PhaseTotals
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import FORWARD, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd.v1 import control_pb2
from torchperfd.v1.contract import PHASES
from torchperfd_cli.commands import diagnose
from torchperfd_cli.main import cli, run_command
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, next_command
from torchperfd_daemon.fleet.verdict import NodePart, judge
from torchperfd_daemon.service.translate_diagnosis import run_verdict_to_message
from torchperfd_daemon.store.model import RankIdentity, State
from torchperfd_daemon.store.model import Totals as StoredTotals
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.past_runs import PastRuns

RUN: Final = "bert 17"
MS: Final = 10**6
NEED_THE_RUN: Final = frozenset(
    {"capture", "stacks", "top", "ps", "ranks", "steps", "diagnose", "whatif", "goodput"}
)


def verdict(cause: Cause) -> Verdict:
    command = (
        f"torchperfd stacks --run {shlex.quote(RUN)}" if cause is Cause.HANG else next_command(cause, RUN)
    )
    cost = 0.0 if cause in (Cause.HANG, Cause.NONE) else 0.03
    return Verdict(cause, RUN, "node-a", 0, "", "30 ms of each 100 ms step", cost, command, step_seconds=0.1)


def ranks(state: State = State.TRAINING, *, cuda: bool = True, connected: bool = True) -> list[Rank]:
    store = Store()
    rank = store.join(RankIdentity(RUN, 0, node="node-a"))
    rank.state = state
    rank.totals = StoredTotals(cuda=CudaMemory(1, 2, 3) if cuda else None)
    if not connected:
        store.leave(rank)
    return [rank]


def closing(message: control_pb2.Verdict, capture_id: str = "") -> VerdictCard:
    train = KindTotals(steps=10, ns=1000 * MS)
    train.phases[FORWARD] = PhaseTotals(10, 1000 * MS)
    report = RankReport(0, Totals(train, KindTotals(), KindTotals()), PhaseNames())
    answer = control_pb2.GetRunResponse(run=RUN, verdict=message)
    return closing_card(RUN, [report], answer, capture_id=capture_id)


def past_row(found: Verdict) -> str:
    """Return what the page shows of a run that has left."""
    store = Store()
    past = PastRuns(store, {RUN: found}.get, lambda: 1000.0)
    rank = store.join(RankIdentity(RUN, 0))
    past.sample()
    store.leave(rank)
    past.sample()
    return document_text(some(past.row(RUN, Access.OWNER))["verdict"])


def document_text(document: Mapping[str, object]) -> str:
    """Return the lines of a card in a document, as the page shows them."""
    card = document["card"]
    assert isinstance(card, dict)
    parts = [part["words"] for cause in card["causes"] for part in cause["parts"]]
    return "\n".join([*parts, f"next  {card['next_command']}"])


LIVE: Final[Mapping[str, Callable[[Verdict], str]]] = {
    "diagnose": lambda found: card_of(run_verdict_to_message(found, ranks())).to_text(width=1000),
    "notebook": lambda found: card_of(run_verdict_to_message(found, ranks())).to_html(),
    "page": lambda found: document_text(verdict_to_document(run_verdict_to_message(found, ranks()))),
    "without CUDA": lambda found: str(card_of(run_verdict_to_message(found, ranks(cuda=False)))),
    "fleet": lambda found: str(
        card_of(run_verdict_to_message(judge(RUN, [NodePart("node-a", found, ())]), ranks()))
    ),
}
ENDED: Final[Mapping[str, Callable[[Verdict], str]]] = {
    "closing": lambda found: closing(run_verdict_to_message(found, ranks())).to_text(width=1000),
    "closing with a capture": lambda found: str(
        closing(run_verdict_to_message(found, ranks()), "20261128-1")
    ),
    "diagnose, finished": lambda found: str(card_of(run_verdict_to_message(found, ranks(State.FINISHED)))),
    "diagnose, gone": lambda found: str(card_of(run_verdict_to_message(found, ranks(connected=False)))),
    "past run on the page": past_row,
    "logger": lambda found: card_of(run_verdict_to_message(found, ranks())).after_run().to_text(width=1000),
}


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the commands of ours that a text names, as words."""
    text = text.replace("&#x27;", "'").replace("\n        ", " ")
    for line in re.findall(r"(?<![\w/])torchperfd (?:[^<`;\n]|<(?!/))*", text):
        yield shlex.split(line.rstrip(" .,)"))[1:]


def check_usage(words: list[str]) -> None:
    """Have the command line accept a command, without running it."""
    name, *arguments = words
    # As in a run: click keeps each command's option for help, with the names that the context has.
    parent = cli.make_context("torchperfd", [name])
    command = cli.get_command(parent, name)
    assert command is not None, words
    command.make_context(name, arguments, parent=parent)


@pytest.mark.parametrize("medium", LIVE)
@pytest.mark.parametrize("cause", Cause)
def test_card_of_a_live_run_names_valid_commands(cause: Cause, medium: str) -> None:
    named = [*commands_in(LIVE[medium](verdict(cause)))]
    assert named, "there is always something to do next"
    for words in named:
        check_usage(words)
        assert medium != "without CUDA" or "memory" not in words


@pytest.mark.parametrize("medium", ENDED)
@pytest.mark.parametrize("cause", Cause)
def test_card_of_an_ended_run_needs_no_run(cause: Cause, medium: str) -> None:
    for words in commands_in(ENDED[medium](verdict(cause))):
        check_usage(words)
        assert words[0] not in NEED_THE_RUN, words


def test_verdict_of_an_ended_run_has_its_first_failure() -> None:
    store = Store()
    failed = [store.join(RankIdentity(RUN, rank, world_size=4)) for rank in (2, 1, 0)]
    failed[0].failure, failed[1].failure = "RuntimeError: peer closed", "ValueError: bad"
    found = Verdict(Cause.NONE, RUN, "", None, "", "", 0.0, "")
    assert run_verdict_to_message(found, failed).failure == "", "a rank may come back"
    for rank in failed:
        rank.state = State.FINISHED
    assert run_verdict_to_message(found, failed).failure == "rank 1: ValueError: bad"
    assert run_verdict_to_message(found, (), ended=failed).failure == "rank 1: ValueError: bad"
    assert run_verdict_to_message(found, (), ended=failed[2:]).failure == ""


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
    monkeypatch.setattr(diagnose, "shipped_folder", lambda _: tmp_path)
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
