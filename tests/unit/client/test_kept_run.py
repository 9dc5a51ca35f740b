"""What a run leaves at its end: the facts of its report, the kept file, and the baseline's exit code."""

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.run_comparison.simulation import simulate
from tests.support.run_documents import document_of, run_file
from tests.unit.client.training import loader, tiny_model, train

import torchperfd
from torchperfd.launch.earlier_runs import SLOWER, UNSEEN, compare_with_baseline, read_baseline
from torchperfd.launch.options import KeepingOptions
from torchperfd.launch.run_report import ReportWriter, add_facts
from torchperfd.launch.script import Terminated
from torchperfd.report.rank import run_document
from torchperfd.report.record import NoSuchRunError, read_record
from torchperfd.report.store import RunStore


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def document(run: str = "train-1") -> dict[str, Any]:
    return run_file(run, steps=20, seconds={"forward": 0.01})


def test_facts_of_a_real_run_can_be_read_again(client: torchperfd.Client) -> None:
    import torch

    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(12))
    whole = run_document(client.run, [client.report()], None)
    add_facts(whole, client, began=time.time() - 5, ended=SystemExit(3))
    record = read_record(json.dumps(whole, allow_nan=False).encode(), "report")
    assert (record.run, record.steps, record.world_size) == (client.run, 12, 1)
    assert (record.ending.state, whole["exit"]["code"]) == ("failed", 3)
    assert record.environment["torch"] == torch.__version__
    blocks = record.ranks[0].blocks
    assert blocks is not None
    assert (blocks.steps, len(blocks.step)) == (1, 11)
    assert sum(map(sum, blocks.phases.values())) == pytest.approx(sum(blocks.step), rel=1e-3)
    assert not {"arguments", "argv"} & whole.keys()


@pytest.mark.parametrize(
    ("ended", "state", "code", "error"),
    [
        (None, "finished", 0, None),
        (SystemExit(), "finished", 0, None),
        (SystemExit(0), "finished", 0, None),
        (SystemExit(2), "failed", 2, "exit code 2"),
        (SystemExit("the reason\nand more"), "failed", 1, "the reason"),
        (KeyboardInterrupt(), "interrupted", 130, None),
        (Terminated(), "terminated", 143, None),
        (ValueError(), "failed", 1, "ValueError"),
        (ValueError("no\nsuch data"), "failed", 1, "ValueError: no"),
        (BrokenTextError(), "failed", 1, "BrokenTextError"),
    ],
)
def test_exit_state_follows_what_ended_the_script(
    client: torchperfd.Client, ended: BaseException | None, state: str, code: int, error: str | None
) -> None:
    whole = run_document(client.run, [client.report()], None)
    add_facts(whole, client, began=0.0, ended=ended)
    assert whole["exit"] == {"state": state, "code": code} | ({"error": error} if error else {})
    assert whole["ranks"][0]["blocks"] is None


def test_report_writer_names_how_to_show_the_run(tmp_path: Path) -> None:
    writer = ReportWriter(KeepingOptions(directory=str(tmp_path / "runs")), document())
    assert writer.outcome(time.monotonic() + 60) == "torchperfd runs show train-1"
    assert RunStore(str(tmp_path / "runs")).read("train-1").steps == 20


def test_report_writer_full_disk_has_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunStore, "keep", full)
    writer = ReportWriter(KeepingOptions(directory=str(tmp_path)), document())
    assert writer.outcome(time.monotonic() + 60) == "not: [Errno 28] No space left on device"


def test_report_writer_hanging_disk_delays_no_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(RunStore, "keep", lambda *_: answered.wait(600))
    writer = ReportWriter(KeepingOptions(directory=str(tmp_path)), document())
    assert writer.outcome(time.monotonic()) == "not: the disk is too slow"
    answered.set()


def test_baseline_is_a_file_or_a_kept_run(tmp_path: Path) -> None:
    file = tmp_path / "main.json"
    file.write_text(json.dumps(document("from-file")))
    RunStore(str(tmp_path / "runs")).keep(document("kept-77"))
    options = KeepingOptions(directory=str(tmp_path / "runs"), baseline=str(file))
    assert read_baseline(options).run == "from-file"
    assert read_baseline(KeepingOptions(str(tmp_path / "runs"), baseline="kept")).run == "kept-77"
    with pytest.raises(NoSuchRunError):
        read_baseline(KeepingOptions(str(tmp_path / "runs"), baseline="nosuch"))


@pytest.mark.parametrize(("fail_above", "code"), [(None, 0), (0.05, SLOWER), (0.5, 0)])
def test_baseline_exit_code_follows_the_limit(fail_above: float | None, code: int) -> None:
    source = random.Random(9)
    before = simulate(source, steps=600)
    after = document_of(simulate(source, steps=600, planted={"data": 0.15}))
    printed: list[str] = []
    assert compare_with_baseline(before, after, fail_above, printed.append) == code
    assert "data changed by +" in printed[0]
    assert ("slower than the baseline's by more than 5 %" in printed[-1]) == (code == SLOWER)


@pytest.mark.parametrize(("fail_above", "code"), [(None, 0), (0.5, UNSEEN), (0.05, SLOWER)])
def test_baseline_gate_of_half_a_job_does_not_pass(fail_above: float | None, code: int) -> None:
    source = random.Random(9)
    before = simulate(source, steps=600)
    after = document_of(simulate(source, steps=600, planted={"data": 0.15}))
    after |= {"world_size": 4, "verdict": {"cause": "unknown", "summary": "unknown", "unseen_ranks": 2}}
    printed: list[str] = []
    assert compare_with_baseline(before, after, fail_above, printed.append) == code
    assert ("2 of the 4 ranks of run B were not seen" in printed[-1]) == (code == UNSEEN)


def test_baseline_that_cannot_be_judged_passes_no_gate() -> None:
    before = read_record(json.dumps(document()).encode(), "a")
    short = run_file("train-2", steps=3, seconds={"forward": 0.01})
    printed: list[str] = []
    assert compare_with_baseline(before, short, None, printed.append) == 0
    assert compare_with_baseline(before, short, 0.05, printed.append) == 1
    assert "no comparison with the baseline" in printed[0]
