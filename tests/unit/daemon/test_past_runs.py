"""Marks of a run, and the runs of the last day that have ended."""

from typing import Any

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.store import RankIdentity, State, Store
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.past_runs import MOST_FINISHED, MOST_MARKS, PastRuns

DAY_S = 86_400.0


class History:
    """A store, and what is known of its runs, by the clock of the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = Store()
        self.verdicts: dict[str, Verdict] = {}
        self.marks: list[dict[str, Any]] = []
        self.past = PastRuns(self.store, self.verdicts.get, lambda: self.now)
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
    for number in range(MOST_MARKS + 10):
        history.past.add_mark("a", kind="capture", unix_seconds=float(number))
    history.past.add_mark("unknown", kind="capture", unix_seconds=0.0)
    assert len(history.past.marks("a")) == MOST_MARKS
    assert history.past.marks("a")[-1]["unix_seconds"] == MOST_MARKS + 9


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
    for number in range(MOST_FINISHED + 5):
        history.store.leave(history.store.join(RankIdentity(f"r{number:03}", 0)))
        history.later()
        for rank in [*history.store.ranks()]:
            history.store.forget(rank)
    rows = history.past.rows(Access.STRANGER, {})
    assert len(rows) == MOST_FINISHED
    assert (rows[0]["run"], rows[-1]["run"]) == (f"r{MOST_FINISHED + 4:03}", "r005")


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
