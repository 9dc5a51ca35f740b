"""``torchperfd runs``, and ``compare`` of two runs: their text, JSON, prefixes and exit codes."""

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.run_comparison.simulation import simulate
from tests.support.commands import Run
from tests.support.golden import check_golden
from tests.support.run_documents import PREDICTED, document_of, kept_run, run_file
from tests.support.values import some

from torchperfd.report.previous_runs import outcome_of
from torchperfd.report.record import record_of
from torchperfd.report.store import RunStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    """Three kept runs: two alike, and one with 10 % more of a step in backward."""
    monkeypatch.setenv("TORCHPERFD_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    monkeypatch.chdir(tmp_path)
    store = RunStore(str(tmp_path / "runs"))
    source = random.Random(8)
    for number, (run, planted) in enumerate(
        (("train-3f2a", {}), ("train-77aa", {}), ("slow-11", {"backward": 0.1}))
    ):
        run_id = store.keep(document_of(simulate(source, steps=600, planted=planted)) | {"run": run})
        os.utime(Path(store.directory, f"{run_id}.json"), (1_790_000_000 + number,) * 2)
    return store


@pytest.fixture
def run(store: RunStore, run: Run) -> Run:
    return run


def test_runs_are_listed_newest_first(run: Run) -> None:
    code, out, err = run("runs")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["RUN", "SCRIPT", "WHEN", "STEPS", "STEP", "MS", "VERDICT", "SIZE"]
    assert [line[0] for line in lines[1:]] == ["slow-11", "train-77aa", "train-3f2a"]
    assert lines[1][4] == "601"
    assert max(map(len, out.splitlines())) <= 80


def test_runs_json_has_all_that_is_shown(run: Run, store: RunStore) -> None:
    document = json.loads(run("runs", "--json")[1])
    assert (document["schema"], document["total"]) == ("torchperfd.runs/1", 3)
    newest = document["runs"][0]
    assert (newest["id"], newest["script"], newest["steps"]) == ("slow-11", "train.py", 601)
    assert newest["cause"] == "input_bound"
    assert newest["bytes"] == store.list()[0].bytes


@pytest.fixture
def answered(store: RunStore) -> RunStore:
    """A run that promises a gain, three that answer it, and one that changes nothing."""
    work = {"forward": 0.010, "backward": 0.015, "optimizer": 0.0056}
    promise = kept_run({**work, "data": 0.055}, run="promised", verdict=PREDICTED)
    cost = promise | {"verdict": PREDICTED | {"saves_seconds": None}}
    rows: tuple[tuple[str, float, dict[str, Any], dict[str, Any]], ...] = (
        ("faster", 0.0199, promise, {"code": "new", "workers": 4}),
        ("as-slow", 0.055, promise, {"code": "new"}),
        ("slower", 0.070, cost, {"code": "new"}),
        ("again", 0.055, promise, {}),
    )
    store.keep(promise)
    for run, data, earlier, change in rows:
        document = kept_run({**work, "data": data}, run=run, **change)
        outcome = some(outcome_of(record_of(document), [("promised", record_of(earlier))]))
        store.keep(document | {"promise": outcome.to_dict()})
    for number, run in enumerate(("promised", *(row[0] for row in rows))):
        os.utime(Path(store.directory, f"{run}.json"), (1_790_000_100 + number,) * 2)
    return store


def test_runs_list_what_became_of_promises(run: Run, answered: RunStore) -> None:
    # Where it is another time, the times differ.
    listed = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "YYYY-MM-DD hh:mm", run("runs")[1])
    document = json.loads(run("runs", "--json", "--limit", "5")[1])
    promises = {each["id"]: each["promise"] for each in document["runs"]}
    shown = {name: run("runs", "show", name)[1] for name in ("faster", "again")}
    assert "\n  done  your change: " in shown["faster"]
    assert "your change" not in shown["again"]
    facts = [line for text in shown.values() for line in text.splitlines() if line.startswith("change")]
    check_golden(
        "runs.txt", "\n".join([listed, json.dumps(promises, indent=1, ensure_ascii=False), *facts, ""])
    )
    assert answered.list()[0].run_id == "again"


def test_runs_limit_names_how_many_there_are(run: Run) -> None:
    code, out, err = run("runs", "--limit", "1")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err == "these are the newest 1 of 3; --limit 0 shows all\n"


def test_runs_empty_directory_names_what_fills_it(run: Run, tmp_path: Path) -> None:
    code, out, err = run("runs", "--runs-dir", str(tmp_path / "none"))
    assert (code, out) == (0, "")
    assert "`torchperfd run train.py` keeps one" in err


def test_runs_damaged_file_hides_no_other(run: Run, store: RunStore) -> None:
    Path(store.directory, "train-77aa.json").write_text("{")
    code, out, _ = run("runs")
    assert code == 0
    assert "damaged" in out
    assert "train-3f2a" in out
    damaged = [each for each in json.loads(run("runs", "--json")[1])["runs"] if each["problem"]]
    assert [each["id"] for each in damaged] == ["train-77aa"]
    assert run("runs", "show", "train-77aa")[0] == 1


def test_runs_show_takes_a_prefix(run: Run) -> None:
    code, out, _ = run("runs", "show", "sl")
    assert code == 0
    assert "script    train.py" in out
    assert "backward" in out
    assert json.loads(run("runs", "show", "sl", "--json")[1])["run"] == "slow-11"


def test_runs_ambiguous_prefix_lists_the_candidates(run: Run) -> None:
    code, out, err = run("runs", "show", "train")
    assert (code, out) == (3, "")
    assert err == "torchperfd: 2 runs begin with train: train-3f2a, train-77aa; write more of one\n"


def test_runs_rm_deletes_what_is_named_or_nothing(run: Run, store: RunStore) -> None:
    assert run("runs", "rm", "slow", "nosuch")[0] == 3
    assert len(store.list()) == 3
    assert run("runs", "rm", "slow", "train-3") == (0, "", "deleted slow-11\ndeleted train-3f2a\n")
    assert [each.run_id for each in store.list()] == ["train-77aa"]


def test_compare_two_kept_runs_by_prefix(run: Run) -> None:
    code, out, err = run("compare", "train-3", "slow", "--fail-above", "5%")
    assert code == 7
    assert "backward changed by +" in out
    assert err == "torchperfd: a step of B is slower by more than the limit of 5.0%\n"


def test_compare_equal_runs_pass_the_limit(run: Run) -> None:
    code, out, _ = run("compare", "train-3", "train-7", "--fail-above", "0%")
    assert code == 0
    assert "no change beyond noise" in out


def test_compare_takes_files_of_reports(run: Run, store: RunStore, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps(json.loads(store.content("slow-11")), indent=2))
    document = json.loads(run("compare", "train-3", str(report), "--json")[1])
    assert document["schema"] == "torchperfd.run_comparison/1"
    assert [each["phase"] for each in document["phases"] if each["changed"]] == ["backward"]
    markdown = run("compare", "train-3", "report.json", "--markdown")[1]
    assert markdown.startswith("**step time ")
    assert "| **backward** |" in markdown


def test_compare_run_with_a_trace_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    for arguments in (("train-3", "trace.json"), ("trace.json", "train-3")):
        code, out, err = run("compare", *arguments)
        assert (code, out) == (3, "")
        assert "train-3 is a run, and trace.json is neither a kept run nor a report of one" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("train-3", "slow", "--limit", "3"), "--limit does not apply to two runs"),
        (("train-3", "slow", "--comm-pattern", "x"), "--comm-pattern does not apply to two runs"),
        (("a.json", "b.json", "--fail-above", "5%"), "--fail-above does not apply to two captures"),
        (("train-3", "slow", "--json", "--markdown"), "--json and --markdown exclude each other"),
        (("train-3",), "compare needs two sides"),
    ],
)
def test_compare_contradictory_options_exit_with_2(
    run: Run, arguments: tuple[str, ...], complaint: str
) -> None:
    code, out, err = run("compare", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err


def test_compare_ambiguous_prefix_lists_the_candidates(run: Run) -> None:
    code, _, err = run("compare", "train", "slow")
    assert code == 3
    assert "train-3f2a, train-77aa" in err


def test_compare_takes_runs_that_are_named_by_numbers(run: Run, store: RunStore, tmp_path: Path) -> None:
    """As Slurm's job ids are; the beginning of a capture's id is a number as well."""
    content = json.loads(store.content("train-3f2a"))
    for name in ("20261", "202617"):
        store.keep(content | {"run": name})
    assert run("compare", "20261", "202617")[0] == 0
    (tmp_path / "captures/20261799-165610-645ff7").mkdir(parents=True)
    assert run("compare", "20261", "202617")[0] == 0
    store.remove("20261")
    code, out, err = run("compare", "train-3", "20261", "--captures-dir", str(tmp_path / "captures"))
    assert (code, out) == (3, "")
    assert "run 202617 and capture 20261799-165610-645ff7 begin with 20261; write more of one" in err


def test_compare_short_run_names_the_remedy(run: Run, store: RunStore) -> None:
    short: dict[str, Any] = run_file("short-1", steps=4, seconds={"forward": 0.01})
    store.keep(short)
    code, out, err = run("compare", "train-3", "short")
    assert (code, out) == (1, "")
    assert err.endswith("noise is known from 8 on; run more steps\n")
