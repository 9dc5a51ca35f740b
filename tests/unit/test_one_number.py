"""One number for a run: the verdict, the trace line, ``analyze``, its page, the kept run and ``tune``."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.daemon import traces

from torchperfd.document.terminal import render
from torchperfd.launch.additions import first_advice
from torchperfd.launch.run_report import loader_advice_document
from torchperfd.model.formatting import duration
from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderFacts
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd.report.previous_runs import script_digest
from torchperfd.report.store import RunStore
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands.tune import people_document, tune_document
from torchperfd_cli.main import cli
from torchperfd_cli.tune.candidates import Requested
from torchperfd_cli.tune.edits import Edits
from torchperfd_cli.tune.search import TuningSearch, newest_advised
from torchperfd_cli.tune.trial import ScriptFacts, ScriptLoader, Trial
from torchperfd_cli.tune.trial_process import TrialFailedError
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import rank_causes
from torchperfd_daemon.loader_workers import advise_loader
from torchperfd_daemon.observer.loader_adviser import LoaderAdviser

FACTS = LoaderFacts(cpus=2.0, draw_cpu=0.05, rest_cpus=1.0, batch_tensors=2, batch_bytes=8448, batch_size=16)
STEP, DATA = 0.085, 0.064
ADVICE = advise_loader(FACTS, STEP, DATA, UNMEASURED_COST)
SETTLED = SettledAdvice(0, 0, STEP, DATA, 0.001, ADVICE)
# What a rule would find in five steps of the same loop, which by chance were shorter.
CAPTURED_STEP, CAPTURED_DATA = 0.074, 0.064
CAPTURE = "20261128-114904-d925ea"


def numbers(text: str) -> set[str]:
    return set(re.findall(r"num_workers=(\d+)", text))


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """A directory with one capture, whose manifest has the advice."""
    step_ns, data_ns = round(CAPTURED_STEP * 1e9), round(CAPTURED_DATA * 1e9)
    draw = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events = []
    for number in range(5):
        at = number * step_ns
        events += [
            traces.event(f"ProfilerStep#{number}", at, at + step_ns, cat="user_annotation"),
            traces.event(draw, at, at + data_ns, cat="user_annotation"),
        ]
    own: dict[str, Any] = {
        "unrecorded_step_ns": step_ns,
        "unrecorded_phase_ns": {"data": data_ns},
        "loader": {"cpus": 2.0, "draw_cpu": 0.05, "rest_cpus": 1.0},
    }
    folder = tmp_path / "captures" / CAPTURE
    folder.mkdir(parents=True, mode=0o700)
    (folder / "rank0.json").write_text(traces.document(events, torchperfd=own))
    return folder.parent


def write_manifest(captures: Path, settled: SettledAdvice | None) -> None:
    record = CaptureRecord(CAPTURE, "r", "automatic", 1.0, CaptureState.COMPLETE, loader_advice=settled)
    record.ranks = [RankTrace(0, CaptureState.COMPLETE, file="rank0.json")]
    (captures / CAPTURE / "manifest.json").write_bytes(record.encode())


def analysed(captures: Path, *options: str) -> str:
    found = CliRunner().invoke(
        cli, ["analyze", CAPTURE, "--captures-dir", str(captures), *options], catch_exceptions=False
    )
    assert found.exit_code == 0, found.output
    return found.output


class Trials:
    """A script whose steps are like those of the run; nothing else can be run."""

    def __init__(self, workers: int = 0) -> None:
        loader = ScriptLoader(None, "DataLoader", workers, 0, False, False, False)
        facts = ScriptFacts((loader,), cpus=2.0, threads=1)
        self._trial = Trial(0.074, 100, {"data": 0.064}, facts=facts, loader=replace(FACTS, workers=workers))
        self.tried: list[dict[str, Any]] = []

    def run(self, changes: Any) -> Trial:
        if changes:
            self.tried.append(dict(changes[-1].values))
            raise TrialFailedError("this is a test")
        return self._trial

    def pairs(self, without: Any, with_it: Any) -> Any:
        raise AssertionError("nothing is kept")

    fresh_pairs = pairs


def kept(directory: Path, script: Path, settled: SettledAdvice | None, **more: Any) -> RunStore:
    store = RunStore(str(directory))
    answer = control_pb2.GetRunResponse(loader_advice=None if settled is None else settled.to_message())
    store.keep(
        {
            "schema": "torchperfd.run/1",
            "run": "train-1",
            "source": {"path": script_digest(str(script.resolve())), "code": None, "arguments": "0"},
            "script": script.name,
            "host": socket.gethostname(),
            "loader_advice": loader_advice_document(answer),
            "ranks": [],
            **more,
        }
    )
    return store


def test_verdict_trace_analysis_page_and_tune_have_one_number(captures: Path, tmp_path: Path) -> None:
    advice = SETTLED.advice
    assert advice is not None
    number, saved = {str(advice.workers)}, duration(advice.saves_seconds)
    by_the_trace = advise_loader(FACTS, CAPTURED_STEP, CAPTURED_DATA, UNMEASURED_COST)
    assert by_the_trace is not None
    assert by_the_trace.workers != advice.workers, "the figures of the capture lead to another number"

    adviser = LoaderAdviser(lambda: UNMEASURED_COST)
    adviser.published = SETTLED
    newest = RankEvidence(0, "n", 0.074, {"data": 0.064, "forward": 0.01}, loader=FACTS)
    verdict = next(each for each in rank_causes("r", [newest], adviser) if each.cause is Cause.INPUT_BOUND)
    assert numbers(verdict.fix) == number
    assert duration(verdict.saves_seconds) == saved

    write_manifest(captures, SETTLED)
    document = analysed(captures, "--json")
    trace_line = first_advice(document.encode())
    text = analysed(captures)
    page = tmp_path / "page.html"
    analysed(captures, "--html", str(page))
    assert numbers(trace_line) == numbers(text) == numbers(page.read_text()) == number
    assert f"saves about {saved} a step" in trace_line
    assert json.loads(document)["advice"][0]["saves_us_per_step"] == pytest.approx(advice.saves_seconds * 1e6)

    script = tmp_path / "train.py"
    script.touch()
    run = newest_advised(kept(tmp_path / "runs", script, SETTLED), str(script))
    assert run is not None
    assert run.settled == SETTLED
    trials = Trials()
    found = TuningSearch(trials, Requested(), lambda: 0.0, 60.0, lambda _: None, advised=run).tune()
    assert trials.tried[0]["num_workers"] == advice.workers
    printed = render(people_document(found, Edits("", ()), 1.0))
    assert f"advised   {advice.setting}" in printed
    assert "by the card of the run train-1" in printed
    assert tune_document(found, Edits("", ()), 1.0)["advised_by"] == "train-1"


def test_capture_without_advice_is_advised_by_its_own_figures(captures: Path) -> None:
    expected = advise_loader(FACTS, CAPTURED_STEP, CAPTURED_DATA, UNMEASURED_COST)
    assert expected is not None
    write_manifest(captures, None)
    assert numbers(analysed(captures))


def test_capture_of_a_run_without_advice_on_its_loader_has_none(captures: Path) -> None:
    write_manifest(captures, replace(SETTLED, advice=None))
    assert not numbers(analysed(captures))


def test_rank_that_waits_for_nothing_gets_no_advice(captures: Path) -> None:
    write_manifest(captures, replace(SETTLED, data_seconds=0.2, step_seconds=0.3))
    assert not numbers(analysed(captures))


@pytest.mark.parametrize(
    "damage", [{"saves_seconds": -1.0}, {"setting": "\x1b[2J"}, {"rule": "other"}, {"workers": 10_000}]
)
def test_impossible_advice_in_a_capture_is_not_repeated(captures: Path, damage: dict[str, Any]) -> None:
    assert SETTLED.advice is not None
    write_manifest(captures, replace(SETTLED, advice=replace(SETTLED.advice, **damage)))
    assert numbers(analysed(captures)) <= {"4", "5", "6", "7", "8"}


def test_settled_advice_survives_document_and_message() -> None:
    for settled in (SETTLED, replace(SETTLED, advice=None)):
        assert SettledAdvice.from_message(settled.to_message()) == settled
        assert SettledAdvice.from_dict(json.loads(json.dumps(settled.to_dict()))) == settled
    assert SettledAdvice.from_dict(None) is None
    assert SettledAdvice.from_dict({"advice": None}) is None


def test_tune_of_an_edited_script_follows_the_rule(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    run = newest_advised(kept(tmp_path / "runs", script, SETTLED), str(script))
    trials = Trials(workers=2)
    found = TuningSearch(trials, Requested(), lambda: 0.0, 60.0, lambda _: None, advised=run).tune()
    assert found.advised_by == ""


def test_advice_of_another_script_or_machine_is_not_taken(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    assert newest_advised(RunStore(str(tmp_path / "none")), str(script)) is None
    assert newest_advised(kept(tmp_path / "a", script, SETTLED), str(other)) is None
    assert newest_advised(kept(tmp_path / "b", script, SETTLED, host="elsewhere"), str(script)) is None
    assert newest_advised(kept(tmp_path / "c", script, None), str(script)) is None
