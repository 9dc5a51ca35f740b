"""What each step edge means for a capture, by numbers alone."""

import pytest

from torchperfd.captures.state import (
    Action,
    CaptureOptions,
    CaptureOutcome,
    CaptureStage,
    CaptureState,
    Decision,
)

FOREIGN_STEPS = 12
"""Validation steps that a capture of three steps bears with."""


def armed(start_step: int | None = 5, steps: int = 3) -> CaptureState:
    state = CaptureState(CaptureOptions())
    state.agree(start_step, steps)
    state.stage = CaptureStage.ARMED
    return state


def recording(start_step: int = 5, steps: int = 3) -> CaptureState:
    state = armed(start_step, steps)
    state.is_recording = True
    state.stage = CaptureStage.RUNNING
    return state


def test_armed_capture_waits_then_starts() -> None:
    state = armed()
    assert [state.train_edge(index).action for index in (3, 4, 5)] == [Action.WAIT, Action.WAIT, Action.START]


def test_armed_capture_past_its_start_gives_up() -> None:
    assert armed().train_edge(7) == Decision(Action.GIVE_UP, "step 5 was missed", retry=True)


def test_capture_without_start_step_starts_at_next_edge() -> None:
    state = armed(None)
    assert state.train_edge(41).action is Action.START
    assert (state.start_step, state.options.steps) == (41, 3)


def test_cancelled_capture_does_not_start() -> None:
    state = armed()
    state.cancel_reason = "enough"
    assert state.train_edge(5) == Decision(Action.GIVE_UP, "enough", retry=True)
    assert state.is_ending


def test_ended_capture_unwatches() -> None:
    state = armed()
    state.end(CaptureOutcome(ok=False, reason="enough"))
    assert state.train_edge(5).action is Action.UNWATCH


def test_recording_capture_stops_after_its_steps() -> None:
    state = recording()
    actions = [state.train_edge(index).action for index in (6, 7, 8)]
    assert actions == [Action.CONTINUE, Action.CONTINUE, Action.STOP]
    assert state.steps_made == 3


def test_recording_capture_when_cancelled_gives_up() -> None:
    state = recording()
    state.cancel_reason = "enough"
    assert state.train_edge(6) == Decision(Action.GIVE_UP, "enough")
    assert state.validate_edge() == Decision(Action.GIVE_UP, "enough")
    assert state.steps_made == 1


def test_long_validation_gives_up() -> None:
    state = recording()
    decisions = [state.validate_edge() for _ in range(FOREIGN_STEPS + 1)]
    assert {decision.action for decision in decisions[:-1]} == {Action.WAIT}
    assert decisions[-1] == Decision(Action.GIVE_UP, "a validation began among the chosen steps", retry=True)


def test_validation_before_the_start_does_not_count() -> None:
    state = armed()
    assert {state.validate_edge().action for _ in range(FOREIGN_STEPS + 1)} == {Action.WAIT}
    state.is_recording = True
    assert state.validate_edge().action is Action.WAIT


def test_capture_can_end_at_once_before_it_records() -> None:
    state = armed()
    can = set()
    for stage in CaptureStage:
        state.stage = stage
        if state.can_end_at_once:
            can.add(stage)
    assert can == {CaptureStage.QUEUED, CaptureStage.PREPARING, CaptureStage.READY, CaptureStage.ARMED}


@pytest.mark.parametrize(("ok", "stage"), [(True, CaptureStage.COMPLETE), (False, CaptureStage.FAILED)])
def test_end_sets_the_stage(ok: bool, stage: CaptureStage) -> None:
    state = recording()
    state.pause_seconds = 2.0
    state.end(CaptureOutcome(ok=ok))
    assert (state.stage, state.pause_seconds) == (stage, 2.0 if ok else 0.0)
