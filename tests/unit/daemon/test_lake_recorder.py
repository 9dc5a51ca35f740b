"""Rows of the lake: what a daemon records of its runs, and how its worker sends them."""

import asyncio
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.daemon import live_runs

from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.goodput.totals import Bucket, RankGoodput, RunGoodput
from torchperfd_daemon.lake.journal import Journal
from torchperfd_daemon.lake.recorder import Recorder, Sources
from torchperfd_daemon.lake.tables import JSON_LINES, TABLES
from torchperfd_daemon.lake.uploader import LakeWorker, sender_command
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store

Rows = dict[str, list[dict[str, Any]]]


class Node:
    """A node with a run, whose daemon can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = live_runs.NOW + 20
        self.verdicts: list[Verdict] = []
        self.lost: dict[Cause, float] = {}
        self.goodput: list[RunGoodput] = []
        self.store = Store(grace_seconds=60, clock=lambda: self.now)
        live_runs.train(self.store, "one straggler")
        self.start()

    def start(self) -> None:
        async def goodput() -> list[RunGoodput]:
            return self.goodput

        def lost() -> dict[str, Mapping[Cause, float]]:
            return {"bert-17": dict(self.lost)}

        def final(_: str) -> Verdict | None:
            return self.verdicts[0] if self.verdicts else None

        def verdicts(_: str) -> Sequence[Verdict]:
            return self.verdicts

        sources = Sources(
            self.store, verdicts, final, lost, goodput, lambda uids: None, lambda uid: f"user {uid}"
        )
        self.journal = Journal(self.folder, "node-a")
        self.recorder = Recorder("node-a", sources)

    @property
    def ranks(self) -> list[Rank]:
        return self.store.runs()["bert-17"]

    def record(self, seconds: float = 30, *, final: bool = False) -> Rows:
        """Record after a time, and return what is new."""
        self.now += seconds
        self.journal.append(self.now, asyncio.run(self.recorder.collect(self.now, final=final)))
        self.journal.seal(self.now, JSON_LINES)
        found: Rows = defaultdict(list)
        for batch in list(self.journal.batches()):
            lines = gzip.decompress(batch.content).splitlines()
            found[batch.table] += [json.loads(line) for line in lines]
            self.journal.sent([batch.sequence])
        return found

    def spend(self, seconds: float) -> None:
        """Have rank 0 be productive since a start for so long."""
        spent = dict.fromkeys(Bucket, 0.0) | {Bucket.PRODUCTIVE: seconds}
        rank = RankGoodput(0, 1000.0, 1000.0 + seconds, 1, 1, True, spent)
        self.goodput = [RunGoodput("bert-17", [rank])]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "journal")


SLOW = Verdict(
    Cause.SLOW_RANK, "bert-17", "node-b", 2, "forward", "late", 0.02, step_seconds=0.06, saves_seconds=0.01
)


def test_recorder_steps_have_one_row_of_each_span(node: Node) -> None:
    rows = node.record()["steps"]
    assert node.record()["steps"] == []
    assert {row["rank"] for row in rows} == set(range(live_runs.RANKS))
    assert sum(row["steps"] for row in rows) == live_runs.RANKS * live_runs.STEPS
    first = rows[0]
    assert first["time_unix_seconds"] % 10 == 0
    phases = sum(value for name, value in first.items() if name.endswith("_seconds")) - (
        first["time_unix_seconds"] + first["longest_seconds"]
    )
    assert phases == pytest.approx(first["seconds"], rel=1e-3)
    assert (first["node"], first["job"], first["owner"]) == ("node-a", "bert", "user None")


def test_recorder_rows_have_columns_of_their_tables(node: Node) -> None:
    node.verdicts = [SLOW]
    node.spend(5)
    node.recorder.capture_ended(
        CaptureRecord("c1", "bert-17", "command", 1.0, CaptureState.COMPLETE, ranks=[RankTrace(0, bytes=7)])
    )
    node.record()
    rows = node.record(final=True)
    node.start()
    node.recorder.capture_ended(CaptureRecord("c2", "bert-17", "command", 1.0, CaptureState.COMPLETE))
    rows |= {"captures": node.record()["captures"]}
    for rank in node.ranks:
        node.store.leave(rank)
    node.start()
    node.record()
    rows |= node.record(60)
    for name, found in rows.items():
        known = {column.name for column in TABLES[name].columns}
        assert found
        assert all(row.keys() <= known for row in found)


def test_recorder_verdict_has_row_once_it_changes(node: Node) -> None:
    node.verdicts, node.lost = [SLOW], {Cause.SLOW_RANK: 5.0}
    assert node.record()["verdicts"] == []
    node.lost = {Cause.SLOW_RANK: 9.0}
    node.verdicts = [replace(SLOW, evidence="later")]
    assert node.record()["verdicts"] == []
    node.verdicts = []
    [row] = node.record()["verdicts"]
    assert (row["cause"], row["culprit_rank"], row["evidence"]) == ("slow rank", 2, "later")
    assert row["until_unix_seconds"] - row["since_unix_seconds"] == 60
    assert row["lost_seconds"] == 4.0
    assert node.record()["verdicts"] == []


def test_recorder_verdict_that_stands_is_repeated(node: Node) -> None:
    node.verdicts = [SLOW]
    rows = [node.record()["verdicts"] for _ in range(250)]
    spans = [row["until_unix_seconds"] - row["since_unix_seconds"] for found in rows for row in found]
    assert spans == [3600, 3600]


def test_recorder_goodput_rows_add_up_across_kill(node: Node) -> None:
    found = []
    for seconds in (100, 4000, 4000, 9000):
        node.spend(seconds)
        found += node.record(3600)["goodput"]
        node.start()
    assert [row["productive_seconds"] for row in found] == [100, 3900, 5000]
    assert [row["since_unix_seconds"] for row in found] == [1000, 1100, 5000]


def test_recorder_run_has_one_row_after_its_end(node: Node) -> None:
    node.verdicts = [SLOW]
    node.record()
    for rank in node.ranks:
        rank.state = State.FINISHED
        node.store.leave(rank)
    assert node.record()["runs"] == []
    [row] = node.record()["runs"]
    assert (row["ending"], row["ranks"], row["cause"], row["saves_seconds"]) == (
        "finished",
        live_runs.RANKS,
        "slow rank",
        0.01,
    )
    assert node.record()["runs"] == []
    node.start()
    assert node.record(final=True)["runs"] == []


def test_recorder_failed_run_hides_exception(node: Node) -> None:
    node.ranks[1].failure = "ValueError: no"
    for rank in node.ranks:
        node.store.leave(rank)
    [row] = node.record(final=True)["runs"]
    assert row["ending"] == "failed"
    assert "ValueError" not in json.dumps(row)


def worker(node: Node, command: list[str]) -> LakeWorker:
    return LakeWorker(node.recorder, node.journal, command, JSON_LINES, lambda: node.now)


def run(worker: LakeWorker, seconds: float = 60) -> None:
    async def both() -> None:
        await worker.record()
        await worker.send(seconds)

    asyncio.run(both())


def test_worker_sends_what_was_recorded(node: Node, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    sending = worker(node, sender_command(lake.as_uri(), "c", str(node.folder), "node-a"))
    run(sending)
    assert sending.counts.rows["sent"] == sending.counts.rows["recorded"] > 0
    assert sending.counts.pending.rows == 0
    assert sending.counts.bytes == sum(path.stat().st_size for path in lake.rglob("*.gz"))


@pytest.mark.parametrize(
    ("script", "seconds", "reason", "left"),
    [
        ("import sys; print(1, 9, flush=True); sys.exit('it is full')", 60, "it is full", False),
        ("import time; print(1, 9, flush=True); time.sleep(60)", 1, "within 1 s", False),
        ("raise SystemExit('no bucket')", 60, "no bucket", True),
    ],
)
def test_worker_keeps_what_store_has_not(
    node: Node, script: str, seconds: float, reason: str, left: bool
) -> None:
    sending = worker(node, [sys.executable, "-c", script])
    with pytest.raises(TorchperfdError, match=reason):
        run(sending, seconds)
    assert bool(sending.counts.pending.rows) is left
    assert sending.counts.rows["sent"] == (0 if left else sending.counts.rows["recorded"])


def test_worker_keeps_rows_while_disk_is_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = worker(node, [sys.executable, "-c", ""])

    def full(*_: Any) -> int:
        raise TorchperfdError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(node.journal, "append", full)
        with pytest.raises(TorchperfdError, match="disk is full"):
            asyncio.run(sending.record())
    asyncio.run(sending.record())
    assert sending.counts.rows["recorded"] > live_runs.RANKS


def test_recorder_evidence_has_neither_lines_nor_stacks(node: Node) -> None:
    hang = replace(SLOW, cause=Cause.HANG, evidence="rank 2 at wait() in secret.py:3")
    waits = replace(SLOW, evidence="40 ms of each 100 ms step, most of it in item() at secret.py:7")
    node.verdicts = [waits, hang]
    node.record()
    rows = node.record(final=True)
    assert len(rows["verdicts"]) == 2
    assert "secret" not in json.dumps(rows)
