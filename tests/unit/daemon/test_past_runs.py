"""Marks of a run, and the runs of the last day that have ended."""

from typing import Any

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.store import RankIdentity, State, Store
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.past_runs import MOST_FINISHED, MOST_MARKS, PastRuns

DAY_S = 86_400.0


class Scene:
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
    scene = Scene()
    rank = scene.store.join(RankIdentity("a", 3))
    rank.state = State.CHECKPOINTING
    scene.later()
    scene.later()
    rank.state = State.TRAINING
    scene.later()
    assert scene.past.marks("a") == [
        {"kind": "checkpoint", "rank": 3, "unix_seconds": 1001.0, "end_unix_seconds": 1003.0}
    ]
    assert [mark["end_unix_seconds"] for mark in scene.marks] == [None, 1003.0]
    rank.state = State.VALIDATING
    scene.later()
    assert [mark["kind"] for mark in scene.past.marks("a")] == ["checkpoint", "validation"]
    assert scene.past.marks("b") == []


def test_a_verdict_is_a_mark_when_its_cause_changes() -> None:
    scene = Scene()
    scene.store.join(RankIdentity("a", 0))
    for cost in (0.1, 0.2):
        scene.verdicts["a"] = Verdict(Cause.INPUT_BOUND, "a", "", 0, "data", "slow", cost, "")
        scene.later()
    assert [mark["text"] for mark in scene.past.marks("a")] == ["input-bound"]


def test_marks_are_bounded() -> None:
    scene = Scene()
    scene.store.join(RankIdentity("a", 0))
    scene.later()
    for number in range(MOST_MARKS + 10):
        scene.past.add_mark("a", kind="capture", unix_seconds=float(number))
    scene.past.add_mark("unknown", kind="capture", unix_seconds=0.0)
    assert len(scene.past.marks("a")) == MOST_MARKS
    assert scene.past.marks("a")[-1]["unix_seconds"] == MOST_MARKS + 9


def test_ended_runs_are_forgotten_after_a_day() -> None:
    scene = Scene()
    scene.store.leave(scene.store.join(RankIdentity("a", 0)))
    scene.later()
    assert [row["run"] for row in scene.past.rows(Access.STRANGER, {"a": 0.5})] == ["a"]
    assert scene.past.rows(Access.STRANGER, {"a": 0.5})[0]["goodput_ratio"] == 0.5
    for rank in [*scene.store.ranks()]:
        scene.store.forget(rank)
    scene.later(DAY_S - 10)
    assert scene.past.row("a", Access.STRANGER) is not None
    scene.later(20)
    assert scene.past.rows(Access.STRANGER, {}) == []


def test_ended_runs_are_bounded_and_the_newest_stay() -> None:
    scene = Scene()
    for number in range(MOST_FINISHED + 5):
        scene.store.leave(scene.store.join(RankIdentity(f"r{number:03}", 0)))
        scene.later()
        for rank in [*scene.store.ranks()]:
            scene.store.forget(rank)
    rows = scene.past.rows(Access.STRANGER, {})
    assert len(rows) == MOST_FINISHED
    assert (rows[0]["run"], rows[-1]["run"]) == (f"r{MOST_FINISHED + 4:03}", "r005")


def test_a_run_that_starts_again_is_no_ended_one() -> None:
    scene = Scene()
    rank = scene.store.join(RankIdentity("a", 0, pid=7))
    scene.later()
    scene.store.leave(rank)
    scene.later()
    assert scene.past.row("a", Access.STRANGER) is not None
    scene.store.join(RankIdentity("a", 0, pid=8))
    scene.later()
    assert scene.past.row("a", Access.STRANGER) is None
    assert scene.past.first_seen("a") == 1001.0


def test_lines_in_the_verdict_of_an_ended_run_stay_hidden() -> None:
    scene = Scene()
    rank = scene.store.join(RankIdentity("a", 0), uid=1234)
    scene.verdicts["a"] = Verdict(Cause.HANG, "a", "", 0, "", "stands in secret.py:1", 0.0, "")
    scene.store.leave(rank)
    scene.later()
    assert "secret" not in str(scene.past.rows(Access.STRANGER, {}))
    assert "secret" in str(scene.past.rows(Access.OWNER, {}))
