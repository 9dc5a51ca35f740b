"""The check of steps after a capture: what it compares, what it writes, and when it warns."""

import logging
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.clock import Clock
from tests.support.values import some

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.server.workers import GIVE_UP_S, StepCheck, compare_steps
from torchperfd_daemon.store.model import KindTotal, RankIdentity, StepColumns
from torchperfd_daemon.store.store import Rank, Store

RUN = "bert-17"
FIRST, END = 100, 105
"""The captured steps."""


class Captured:
    """A rank that is captured on a daemon with a step check."""

    def __init__(self, directory: Path) -> None:
        self.clock = Clock()
        self.store = Store(clock=self.clock)
        self.catalog = Catalog(directory)
        self.check = StepCheck(self.store, self.catalog, self.clock)
        self.catalog.on_armed, self.catalog.on_ended = self.check.begin, self.check.end
        self.rank: Rank = self.store.join(RankIdentity(RUN, 0, 2))
        self.chance = np.random.default_rng(0)
        self.record = CaptureRecord("20261126-120000-abcdef", RUN, "command", 1.0, ranks=[RankTrace(0)])
        self.catalog.create(self.record.capture_id)

    def train(self, steps: int, seconds: float, spread: float = 0.01) -> None:
        durations = array(
            "q", (1e9 * self.chance.normal(seconds, spread * seconds, steps)).astype(int).tolist()
        )
        self.store.add_steps(self.rank, StepColumns(array("q", range(1, steps + 1)), durations, {}))
        made = self.rank.totals.train.steps + steps
        self.rank.totals = replace(self.rank.totals, train=KindTotal(steps=made))

    def capture(self, *, armed: bool = True, state: CaptureState = CaptureState.COMPLETE) -> None:
        """Capture the next five steps, which take longer; the first after them has the pause."""
        self.record.step_range = (FIRST, END)
        if armed:
            self.record.state = CaptureState.ARMED
            self.catalog.save(self.record)
        self.train(END - self.rank.totals.train.steps, 0.05)
        self.record.state = self.record.ranks[0].state = state
        self.catalog.save(self.record)
        self.train(1, 2.0)

    @property
    def step_change(self) -> float | None:
        return self.catalog.get(self.record.capture_id).ranks[0].step_change


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    captured = Captured(tmp_path / "captures")
    captured.train(FIRST, 0.01)
    return captured


@pytest.mark.parametrize("armed", [True, False], ids=["by a command", "by the script"])
def test_longer_steps_are_in_the_manifest_and_a_warning(
    captured: Captured, armed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    captured.capture(armed=armed)
    captured.train(1 + 63, 0.0136)
    captured.check.check()
    assert captured.step_change is None, "64 steps after the pause are not there yet"
    captured.train(1, 0.0136)
    captured.check.check()
    assert captured.step_change == pytest.approx(0.36, abs=0.02)
    [warning] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "steps take longer since then, on rank 0" in warning
    captured.train(64, 0.05)
    captured.check.check()
    assert captured.step_change == pytest.approx(0.36, abs=0.02), "checked once"


def test_equal_steps_are_in_the_manifest_without_a_warning(
    captured: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    captured.capture()
    captured.train(65, 0.01)
    captured.check.check()
    assert captured.step_change == pytest.approx(0.0, abs=0.01)
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


def test_steps_that_vary_are_no_warning() -> None:
    before = [*range(8_000_000, 12_000_000, 62_500)]
    change = some(compare_steps(before, [each + 300_000 for each in before]))
    assert change.ratio == pytest.approx(0.03, rel=0.01)
    assert not change.is_slower


@pytest.mark.parametrize("made", [15, 16])
def test_a_run_that_makes_few_steps_is_given_up(captured: Captured, made: int) -> None:
    captured.capture()
    captured.train(1 + made, 0.02)
    captured.clock.now += GIVE_UP_S - 1
    captured.check.check()
    assert captured.step_change is None
    captured.clock.now += 1
    captured.check.check()
    assert captured.step_change == (pytest.approx(1.0, abs=0.05) if made == 16 else None)


def test_a_capture_that_failed_is_not_checked(captured: Captured) -> None:
    captured.capture(state=CaptureState.FAILED)
    captured.train(200, 0.02)
    captured.check.check()
    assert captured.step_change is None


def test_a_capture_that_was_removed_meanwhile_does_no_harm(captured: Captured) -> None:
    captured.capture()
    captured.train(200, 0.02)
    captured.catalog.remove(captured.record.capture_id)
    captured.check.check()
    assert not captured.catalog.folder(captured.record.capture_id).exists()


def test_too_few_steps_on_a_side_are_no_comparison() -> None:
    assert compare_steps([1] * 15, [1] * 64) is None
    assert compare_steps([1] * 64, [1] * 15) is None
    assert compare_steps([0] * 64, [1] * 64) is None
