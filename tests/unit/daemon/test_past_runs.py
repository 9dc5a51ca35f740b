"""Marks of a run, and the runs of the last day that have ended."""

import json
import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.daemon.test_damaged_files import BAD_BYTES, ODD_FILES

from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.store.model import RankIdentity, State, StepColumns
from torchperfd_daemon.store.store import Store
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.past_runs import MAX_FINISHED, MAX_MARKS, PastRuns
from torchperfd_daemon.web.run_rows import MAX_RUNS_FILE_BYTES, RunsFile

DAY_S = 86_400.0
NS = 1_000_000_000


class History:
    """A store, and what is known of its runs, by the clock of the test."""

    def __init__(self, folder: Path | None = None) -> None:
        self.now = 1000.0
        self._file = RunsFile(folder, "node") if folder else None
        self.start()

    def start(self) -> None:
        """Start a daemon; what the one before had in memory is lost."""
        self.store = Store()
        self.verdicts: dict[str, Verdict] = {}
        self.marks: list[dict[str, Any]] = []
        self.past = PastRuns(self.store, self.verdicts.get, lambda: self.now, self._file)
        self.past.on_mark = lambda _, mark: self.marks.append(dict(mark))

    def later(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.past.sample()


def test_checkpoints_and_validations_are_marks_with_an_end() -> None:
    history = History()
    rank = history.store.join(RankIdentity("a", 3))
    rank.state = State.CHECKPOINTING
    history.later()
    history.later()
    rank.state = State.TRAINING
    history.later()
    assert history.past.marks("a") == [
        {"kind": "checkpoint", "rank": 3, "unix_seconds": 1001.0, "end_unix_seconds": 1003.0}
    ]
    assert [mark["end_unix_seconds"] for mark in history.marks] == [None, 1003.0]
    rank.state = State.VALIDATING
    history.later()
    assert [mark["kind"] for mark in history.past.marks("a")] == ["checkpoint", "validation"]
    assert history.past.marks("b") == []


def test_a_verdict_is_a_mark_when_its_cause_changes() -> None:
    history = History()
    history.store.join(RankIdentity("a", 0))
    for cost in (0.1, 0.2):
        history.verdicts["a"] = Verdict(Cause.INPUT_BOUND, "a", "", 0, "data", "slow", cost, "")
        history.later()
    assert [mark["text"] for mark in history.past.marks("a")] == ["input-bound"]


def test_marks_are_bounded() -> None:
    history = History()
    history.store.join(RankIdentity("a", 0))
    history.later()
    for number in range(MAX_MARKS + 10):
        history.past.add_mark("a", kind="capture", unix_seconds=float(number))
    history.past.add_mark("unknown", kind="capture", unix_seconds=0.0)
    assert len(history.past.marks("a")) == MAX_MARKS
    assert history.past.marks("a")[-1]["unix_seconds"] == MAX_MARKS + 9


def test_ended_runs_are_forgotten_after_a_day() -> None:
    history = History()
    history.store.leave(history.store.join(RankIdentity("a", 0)))
    history.later()
    assert [row["run"] for row in history.past.rows(Access.STRANGER, {"a": 0.5})] == ["a"]
    assert history.past.rows(Access.STRANGER, {"a": 0.5})[0]["goodput_ratio"] == 0.5
    for rank in [*history.store.ranks()]:
        history.store.forget(rank)
    history.later(DAY_S - 10)
    assert history.past.row("a", Access.STRANGER) is not None
    history.later(20)
    assert history.past.rows(Access.STRANGER, {}) == []


def test_ended_runs_are_bounded_and_the_newest_stay() -> None:
    history = History()
    for number in range(MAX_FINISHED + 5):
        history.store.leave(history.store.join(RankIdentity(f"r{number:03}", 0)))
        history.later()
        for rank in [*history.store.ranks()]:
            history.store.forget(rank)
    rows = history.past.rows(Access.STRANGER, {})
    assert len(rows) == MAX_FINISHED
    assert (rows[0]["run"], rows[-1]["run"]) == (f"r{MAX_FINISHED + 4:03}", "r005")


def test_a_run_that_starts_again_is_no_ended_one() -> None:
    history = History()
    rank = history.store.join(RankIdentity("a", 0, pid=7))
    history.later()
    history.store.leave(rank)
    history.later()
    assert history.past.row("a", Access.STRANGER) is not None
    history.store.join(RankIdentity("a", 0, pid=8))
    history.later()
    assert history.past.row("a", Access.STRANGER) is None
    assert history.past.first_seen("a") == 1001.0


def test_lines_in_the_verdict_of_an_ended_run_stay_hidden() -> None:
    history = History()
    rank = history.store.join(RankIdentity("a", 0), uid=1234)
    history.verdicts["a"] = Verdict(Cause.HANG, "a", "", 0, "", "stands in secret.py:1", 0.0, "")
    history.store.leave(rank)
    history.later()
    assert "secret" not in str(history.past.rows(Access.STRANGER, {}))
    assert "secret" in str(history.past.rows(Access.OWNER, {}))


def finished(history: History, run: str = "a", uid: int | None = None, outcome: str = "") -> None:
    """Let a run begin and end."""
    rank = history.store.join(RankIdentity(run, 0, 2, job_name="job"), uid=uid)
    ends = array("q", [int(history.now * NS)])
    history.store.add_steps(rank, StepColumns(ends, array("q", [NS]), {}))
    history.later()
    history.past.add_mark(run, kind="capture", unix_seconds=history.now, capture_id="c1", text="complete")
    rank.state, rank.outcome = State.FINISHED, outcome
    history.store.leave(rank)
    history.later()


def test_ended_run_after_a_restart_is_the_same(tmp_path: Path) -> None:
    history = History(tmp_path / "captures" / ".page")
    history.verdicts["a"] = Verdict(Cause.HANG, "a", "", 0, "", "stands in secret.py:1", 0.0, "")
    finished(history, uid=1234)
    known = [history.past.rows(access, {"a": 0.5}) for access in Access]
    marks = history.past.marks("a")
    assert known[0][0]["step_percentiles"]["p95_seconds"] == 1.0
    assert marks
    history.past.close()
    history.start()
    assert [history.past.rows(access, {"a": 0.5}) for access in Access] == known
    assert history.past.marks("a") == marks
    assert "secret" in str(known[0])
    assert "secret" not in str(known[1])
    history.later(DAY_S + 1)
    assert history.past.rows(Access.STRANGER, {}) == []


def test_run_kept_by_an_older_daemon_is_read(tmp_path: Path) -> None:
    history = History(tmp_path / ".page")
    finished(history)
    history.past.close()
    [file] = (tmp_path / ".page").iterdir()
    [kept] = json.loads(file.read_text())
    del kept["row"]["step_percentiles"], kept["row"]["outcome"]
    file.write_text(json.dumps([kept]))
    history.start()
    [row] = history.past.rows(Access.OWNER, {})
    assert (row["run"], row["step_percentiles"], row["outcome"]) == ("a", None, "")


def test_outcome_of_a_promise_is_kept_with_its_run(tmp_path: Path) -> None:
    history = History(tmp_path / ".page")
    finished(history, outcome="your change: +18 % (85.6 → 101 ms)")
    history.past.close()
    history.start()
    [row] = history.past.rows(Access.STRANGER, {})
    assert row["outcome"] == "your change: +18 % (85.6 → 101 ms)"


def test_run_in_progress_after_a_restart_has_its_marks(tmp_path: Path) -> None:
    history = History(tmp_path / ".page")
    history.store.join(RankIdentity("a", 0)).state = State.CHECKPOINTING
    history.later()
    history.later(5)
    history.past.close()
    history.start()
    assert history.past.row("a", Access.STRANGER) is not None, "it may have ended while no daemon ran"
    history.store.join(RankIdentity("a", 0))
    history.later()
    assert history.past.row("a", Access.STRANGER) is None
    assert history.past.first_seen("a") == 1001.0
    [mark] = history.past.marks("a")
    assert (mark["kind"], mark["end_unix_seconds"]) == ("checkpoint", 1006.0)


def test_same_verdict_after_a_restart_is_no_new_mark(tmp_path: Path) -> None:
    history = History(tmp_path / ".page")
    verdict = Verdict(Cause.INPUT_BOUND, "a", "", 0, "data", "slow", 0.1, "")
    history.store.join(RankIdentity("a", 0))
    history.verdicts["a"] = verdict
    history.later()
    history.past.close()
    history.start()
    history.store.join(RankIdentity("a", 0))
    history.verdicts["a"] = verdict
    history.later()
    assert len(history.past.marks("a")) == 1


@pytest.mark.parametrize("content", BAD_BYTES.values(), ids=BAD_BYTES)
def test_damaged_runs_file_starts_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / ".page"
    folder.mkdir(mode=0o700)
    (folder / "node.json").write_bytes(content)
    history = History(folder)
    assert history.past.rows(Access.OWNER, {}) == []
    finished(history)
    history.past.close()
    history.start()
    assert [row["run"] for row in history.past.rows(Access.OWNER, {})] == ["a"]


@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_odd_runs_file_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / ".page"
    folder.mkdir(mode=0o700)
    make(folder / "node.json")
    assert History(folder).past.rows(Access.OWNER, {}) == []


@pytest.mark.parametrize("kind", ["link", "open to all"])
def test_runs_folder_of_others_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder, target = tmp_path / ".page", tmp_path / "target"
    target.mkdir(mode=0o700)
    if kind == "link":
        folder.symlink_to(target)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    history = History(folder)
    finished(history)
    with caplog.at_level(logging.WARNING):
        history.past.close()
        history.past.close()
    assert [*folder.iterdir()] == [*target.iterdir()] == []
    assert sum("once the daemon has stopped" in record.message for record in caplog.records) == 1


def test_runs_file_is_bounded_and_private(tmp_path: Path) -> None:
    history = History(tmp_path / ".page")
    for number in range(60):
        run = f"r{number:02}"
        rank = history.store.join(RankIdentity(run, 0))
        history.later()
        for _ in range(MAX_MARKS):
            history.past.add_mark(run, kind="capture", unix_seconds=1.0, text="x" * 100)
        history.store.leave(rank)
        history.later()
    history.past.close()
    [file] = (tmp_path / ".page").iterdir()
    assert MAX_RUNS_FILE_BYTES / 2 < file.stat().st_size <= MAX_RUNS_FILE_BYTES
    assert file.parent.stat().st_mode & 0o777 == 0o700
    history.start()
    rows = history.past.rows(Access.OWNER, {})
    assert rows[0]["run"] == "r59"
    assert 10 < len(rows) < 60
