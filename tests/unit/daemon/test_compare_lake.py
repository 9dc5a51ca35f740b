"""``compare --lake``: the same answer as of the reports that the runs' own node keeps."""

import importlib.util
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.accounts import uneven_account
from tests.support.commands import Run
from tests.support.run_documents import differing

from torchperfd.link import wire
from torchperfd.model.totals import PhaseTotals
from torchperfd.report.rank import RankReport, run_document
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.step_series import BlockSums
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.lake.rows import Source, run_row
from torchperfd_daemon.lake.tables import JSON_LINES, RUNS, day_of, json_lines, object_key
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.store.model import RankIdentity, State
from torchperfd_daemon.store.store import Rank

pytestmark = pytest.mark.skipif(importlib.util.find_spec("duckdb") is None, reason="duckdb is an extra")

RANKS_OF_NODE = 2
STEPS = 80
MS = 1_000_000
NOW = float(int(time.time()) - 60)
RunRow = dict[str, Any]


class Job:
    """A run of four ranks on two nodes, as its rank 0 keeps it and as the lake has it."""

    def __init__(self, run: str, data_ms: float, slow: int | None = None) -> None:
        chance = random.Random(run)
        self.run = run
        self.verdict = Verdict(
            Cause.INPUT_BOUND,
            run,
            evidence="9 ms of each 40 ms step",
            account=uneven_account(),
            step_seconds=0.04,
        )
        self.reports: list[RankReport] = []
        self.ranks: list[Rank] = []
        for number in range(2 * RANKS_OF_NODE):
            usual = {"data": data_ms, "forward": 12.0, "collective_wait": 3.0, "augment": 5.0}
            usual["forward"] += 8.0 * (number == slow)
            # One rank has seen fewer steps than the others.
            steps = STEPS - 3 * (number == 3)
            self._add(number, [_step(chance, usual) for _ in range(steps)])

    def _add(self, number: int, steps: list[dict[str, int]]) -> None:
        names = PhaseNames()
        totals = Totals(train=_totals(names, steps), warmup=_totals(names, steps[:1]), cpus=2.0, threads=1)
        columns = {names.slot(name): tuple(step[name] for step in steps[1:]) for name in steps[0]}
        blocks = BlockSums(1, tuple(sum(step.values()) for step in steps[1:]), columns)
        self.reports.append(RankReport(number, totals, names, blocks=blocks))
        message = wire.totals_to_message(totals, names, len(steps), {}, blocks).account
        node = f"n{number // RANKS_OF_NODE}"
        identity = RankIdentity(
            self.run, number, 4, number, node=node, torch_version="2.8", python_version="3.12"
        )
        rank = Rank(identity, 0.0)
        rank.client_version = "1.0"
        rank.state = State.FINISHED
        rank.totals = translate_diagnosis.totals_from_message(message)
        self.ranks.append(rank)

    def report(self, path: Path) -> Path:
        """Write the report that rank 0 keeps."""
        assert self.verdict.account is not None
        verdict = {
            "cause": self.verdict.cause.value,
            "summary": self.verdict.summary,
            "unseen_ranks": 0,
            "account": self.verdict.account.to_document(),
        }
        document = run_document(self.run, self.reports, verdict) | {
            "host": "n0",
            "world_size": 4,
            "started_seconds": NOW,
            "exit": {"state": "finished"},
            "versions": {"torchperfd": "1.0", "python": "3.12", "torch": "2.8"},
            "environment": {"cpus": 2, "threads": 1, "device": "H200"},
        }
        path.write_text(json.dumps(document))
        return path

    def rows(self) -> list[RunRow]:
        """Return the rows of both nodes."""
        found = []
        for first in (0, RANKS_OF_NODE):
            ranks = self.ranks[first : first + RANKS_OF_NODE]
            source = Source(ranks[0].identity.node, self.run, "bert", "ada")
            _, row = run_row(source, list(reversed(ranks)), self.verdict, NOW, "H200")
            found.append(dict(row))
        return found


def _step(chance: random.Random, usual: Mapping[str, float]) -> dict[str, int]:
    return {name: int(MS * ms * chance.gauss(1, 0.02)) for name, ms in usual.items()}


def _totals(names: PhaseNames, steps: list[dict[str, int]]) -> KindTotals:
    found = KindTotals(steps=len(steps), ns=sum(sum(step.values()) for step in steps))
    for name in steps[0]:
        found.phases[names.slot(name)] = PhaseTotals(len(steps), sum(step[name] for step in steps))
    return found


class Lake:
    """A lake in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = folder.as_uri()
        folder.mkdir()

    def put(self, *rows: RunRow, cluster: str = "east") -> None:
        for row in rows:
            name = f"{row['node']}-{row['run']}-{row['until_unix_seconds']}.{JSON_LINES}"
            path = self.folder / object_key(RUNS, day_of(NOW), cluster, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(json_lines([json.dumps(row).encode()]))


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lake = Lake(tmp_path / "lake")
    lake.put(*Job("first", 9.0).rows(), *Job("second", 15.0, slow=2).rows())
    return lake


def test_compare_of_lake_equals_that_of_reports(lake: Lake, run: Run, tmp_path: Path) -> None:
    files = [
        job.report(tmp_path / f"{job.run}.json") for job in (Job("first", 9.0), Job("second", 15.0, slow=2))
    ]
    kept = run("compare", *files, "--json")
    found = run("compare", "--lake", lake.url, "fir", "second", "--json")
    assert (kept[0], found[0], found[2]) == (0, 0, "")
    assert differing(json.loads(found[1]), json.loads(kept[1])) == set()
    assert json.loads(found[1])["after"]["slow_rank"] == 2
    assert run("compare", "--lake", lake.url, "first", "second") == run("compare", *files)


def test_compare_of_lake_needs_all_ranks_for_a_limit(lake: Lake, run: Run) -> None:
    lake.put(Job("third", 9.0).rows()[0])
    code, _, err = run("compare", "--lake", lake.url, "first", "third", "--fail-above", "5%")
    assert (code, "2 of the 4 ranks of run B were not seen" in err) == (5, True)
    assert run("compare", "--lake", lake.url, "first", "second", "--fail-above", "5%")[0] == 7


def test_compare_of_lake_takes_newest_start_of_a_run(lake: Lake, run: Run) -> None:
    for row in Job("first", 30.0).rows():
        lake.put(row | {"until_unix_seconds": NOW - 100})
    code, out, _ = run("compare", "--lake", lake.url, "first", "second", "--json")
    before = json.loads(out)["step"]["before_seconds"]
    assert (code, before) == (0, pytest.approx(0.029, rel=0.05))


@pytest.mark.parametrize(
    ("named", "change", "code", "words"),
    [
        ("old", {"run": "old", "report": None}, 1, "run old was recorded by a version without comparisons"),
        ("bad", {"run": "bad", "report": '{"ranks": []}'}, 1, "the report in run bad is damaged"),
        ("bad", {"run": "bad", "report": "no JSON"}, 1, "the report in run bad is damaged"),
        ("sec0nd", {}, 3, "no run sec0nd has ended"),
        ("second", {"owner": "bob"}, 3, "several runs are called second: of ada in east, bob in east"),
    ],
)
def test_compare_of_lake_says_why_it_cannot(
    lake: Lake, run: Run, named: str, change: RunRow, code: int, words: str
) -> None:
    lake.put(Job("second", 15.0).rows()[0] | {"node": "n9"} | change)
    found, out, err = run("compare", "--lake", lake.url, "first", named)
    assert (found, out) == (code, "")
    assert words in err


def test_compare_of_killed_run_lacks_its_steps(lake: Lake, run: Run) -> None:
    job = Job("killed", 9.0)
    for rank in job.ranks:
        rank.totals.step_blocks = b"damaged"
    lake.put(*job.rows())
    code, _, err = run("compare", "--lake", lake.url, "first", "killed")
    assert (code, "its processes ended without a report of their steps" in err) == (1, True)


def test_compare_of_lake_has_options_of_its_own(lake: Lake, run: Run) -> None:
    for options, words in (
        (("--runs-dir", "/tmp", "--lake", lake.url), "--runs-dir does not apply to a lake"),
        (("--since", "3d"), "--since needs --lake"),
        (("--limit", "3", "--lake", lake.url), "--limit does not apply to two runs"),
    ):
        code, _, err = run("compare", "first", "second", *options)
        assert (code, words in err) == (2, True)


def test_report_of_run_names_neither_script_nor_lines() -> None:
    job = Job("first", 9.0)
    job.verdict = Verdict(Cause.HANG, "first", evidence="rank 2 at wait() in secret.py:3")
    [row, _] = job.rows()
    assert "secret" not in json.dumps(row)
    # Compressed it takes a few kilobytes; it does not grow with the ranks of the node.
    assert len(row["report"]) < 8 << 10
