"""Replaying events into steps, and the rules that decide what a step is."""

import threading
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.scripted import unpack

from torchperfd.events import EventBuffer, codes
from torchperfd.safety.logs import Faults
from torchperfd.steps.loop import Loop
from torchperfd.steps.loop_rules import DECISIONS, Decision, Rule
from torchperfd.steps.loop_state import NOTHING, STEPPED
from torchperfd.steps.replay import Replay

PLAIN = (
    *((codes.DRAW, 112), (codes.DRAWN, 32)),
    *((codes.ZERO, 0), (codes.ZERO_END, 0)),
    *((codes.FORWARD, 0), (codes.FORWARD_END, 0)),
    *((codes.BACKWARD, 0), (codes.BACKWARD_END, 0)),
    *((codes.OPTIMIZER, 1), (codes.OPTIMIZER_END, 1)),
)


def make(events: int = 1024, steps: int = 64) -> tuple[EventBuffer, Replay]:
    buffer = EventBuffer(events, codes.CUDA_EVENT)
    return buffer, Replay(buffer, steps, Faults())


def write(buffer: EventBuffer, *events: tuple[int, int]) -> None:
    for code, argument in events:
        buffer.write(code, argument)


class Watcher:
    """Records the edges that it gets, and on which thread."""

    def __init__(self) -> None:
        self.edges: list[tuple[str, int, int]] = []

    def train_edge(self, next_index: int) -> None:
        self.edges.append(("train", next_index, get_ident()))

    def validate_edge(self) -> None:
        self.edges.append(("validate", 0, get_ident()))


def test_every_code_has_a_meaning() -> None:
    buffer, replay = make()
    for code in range(codes.CODES):
        buffer.write(code)
    replay.catch_up()
    assert replay.faults.counts() == {}
    known = {value for name, value in vars(codes).items() if name.isupper() and isinstance(value, int)}
    assert set(range(codes.CODES)) <= known


def test_steps_take_from_event_to_event_as_it_was_written() -> None:
    buffer, replay = make()
    for _ in range(4):
        write(buffer, *PLAIN)
    write(buffer, (codes.DRAW, 112), (codes.EXHAUSTED, 112))
    before = len(buffer)
    replay.catch_up()
    assert (before, len(buffer)) == (42, 0)
    steps = unpack(replay.recorder.drain())
    assert [(step.kind, step.index, step.samples) for step in steps] == [("train", n, 32) for n in range(4)]
    for step in steps:
        assert sum(ns for _, ns in step.phases.values()) == step.duration > 0
        assert {name: count for name, (count, _) in step.phases.items()} == dict.fromkeys(
            ("data", "forward", "loss", "backward", "optimizer", "zero_grad", "other"), 1
        )
    assert (replay.epochs.train.calls, replay.loop.micro_batches) == (1, 4)


def test_calls_that_nest_end_where_they_began() -> None:
    """A save within a backward within an optimizer's closure: each end belongs to the newest begin."""
    buffer, replay = make()
    write(
        buffer,
        *((codes.DRAW, 112), (codes.DRAWN, 1), (codes.OPTIMIZER, 1)),
        *((codes.ZERO, 0), (codes.ZERO_END, 0), (codes.FORWARD, 0), (codes.FORWARD_END, 0)),
        *((codes.BACKWARD, 0), (codes.SAVE, 0), (codes.SAVE_END, 0), (codes.BACKWARD_END, 0)),
        *((codes.OPTIMIZER_END, 1), (codes.DRAW, 112), (codes.EXHAUSTED, 112)),
    )
    replay.catch_up()
    (step,) = unpack(replay.recorder.drain())
    assert {name: count for name, (count, _) in step.phases.items()} == dict.fromkeys(
        ("data", "optimizer", "zero_grad", "forward", "backward", "checkpoint", "other"), 1
    )
    assert replay.recorder.depth == 0


def test_watcher_runs_on_writing_thread_for_every_later_edge() -> None:
    buffer, replay = make()
    write(buffer, *PLAIN, *PLAIN)
    watcher = Watcher()
    wanted = threading.Thread(target=lambda: replay.watch(watcher))  # as a capture's own thread does
    wanted.start()
    wanted.join()
    assert replay.live
    assert watcher.edges == []  # what was written so far was read before anybody watched
    assert replay.loop.train_steps == 1
    write(buffer, *PLAIN, *PLAIN)
    assert watcher.edges == [("train", 2, get_ident()), ("train", 3, get_ident())]
    replay.unwatch(watcher)
    assert not replay.live
    write(buffer, *PLAIN)
    assert len(buffer) == len(PLAIN)
    assert len(watcher.edges) == 2


def test_replay_on_the_training_thread_excludes_other_readers() -> None:
    buffer, replay = make()
    replay.go_live()
    buffer.on_event = lambda: None  # it has written, but not come to read yet
    write(buffer, *PLAIN)
    reader = threading.Thread(target=replay.catch_up)
    reader.start()
    reader.join()
    assert len(buffer) == len(PLAIN)
    replay.catch_up()
    assert len(buffer) == 0


def test_watcher_set_by_another_is_left_alone() -> None:
    _, replay = make()
    mine, yours = Watcher(), Watcher()
    replay.watch(yours)
    replay.unwatch(mine)
    assert replay.loop.watcher is yours
    assert replay.live


def test_full_ring_buffer_is_read_at_once() -> None:
    buffer, replay = make(events=32)
    for _ in range(50):
        write(buffer, *PLAIN)
    replay.finish()
    assert replay.loop.train_steps == 50
    assert buffer.lost == 0


def test_after_lost_events_the_open_step_is_lost_and_no_other() -> None:
    buffer, replay = make(events=32)
    buffer.on_full = None  # nothing makes room
    write(buffer, *PLAIN, *PLAIN[:5])
    replay.catch_up()
    for _ in range(9):
        write(buffer, *PLAIN)
    assert buffer.lost > 0
    write(buffer, *PLAIN)
    replay.catch_up()
    buffer.on_full = replay.catch_up
    write(buffer, *PLAIN, *PLAIN)
    replay.finish()
    durations = [step.phases for step in unpack(replay.recorder.drain())]
    assert replay.faults.counts() == {}
    assert 4 <= len(durations) <= 7
    assert replay.recorder.depth == 0


def test_invalid_events_are_counted_and_stop_reading_at_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    buffer, replay = make(events=4096)
    monkeypatch.setattr(Loop, "forward_end", fail)
    for _ in range(30):
        write(buffer, *PLAIN)
    replay.catch_up()
    assert replay.faults.counts() == {"hook forward": 10}
    assert buffer.thread == 0
    monkeypatch.undo()
    write(buffer, *PLAIN)
    replay.catch_up()
    replay.finish()
    assert replay.faults.counts() == {"hook forward": 10}


def test_grad_scaler_with_and_without_optimizer_step() -> None:
    buffer, replay = make()
    refused = ((codes.SCALER, 1), (codes.SCALER_END, 0))
    allowed = (
        (codes.SCALER, 1),
        (codes.OPTIMIZER, 1),
        (codes.OPTIMIZER_END, 1),
        (codes.SCALER_END, 0),
    )
    failed = ((codes.SCALER, 1), (codes.SCALER_FAILED, 0))
    for way in (refused, allowed, refused, failed, allowed):
        write(buffer, *PLAIN[:8], *way)
    replay.finish()
    assert replay.loop.refused == 2
    assert replay.recorder.depth == 0
    assert (replay.loop.train_steps, replay.loop.skipped) == (5, 3)  # the failed one's gradients go unused


def covers(rule: Rule, later: Rule) -> bool:
    """Return whether a rule applies wherever a later one would."""
    same_held = not rule.held or (bool(later.held) and later.held <= rule.held)
    return same_held and {c.__name__ for c in rule.when} <= {c.__name__ for c in later.when}


def test_loop_rules_none_is_hidden_by_one_before_it() -> None:
    for decision in DECISIONS:
        for number, later in enumerate(decision.rules):
            hidden = any(covers(rule, later) for rule in decision.rules[:number])
            assert not hidden, (decision.event, later)


def test_decision_first_matching_rule_applies() -> None:
    done: list[str] = []

    def note(name: str, held: int | tuple[()] = (), *, matches: bool = True) -> Rule:
        return Rule(held, when=[lambda _: matches], then=[lambda _: done.append(name)])

    state: Any = SimpleNamespace(held=NOTHING)
    Decision("event", note("no", matches=False), note("held", STEPPED), note("yes"), note("late")).apply(
        state
    )
    Decision("event", note("held", STEPPED)).apply(state)
    assert done == ["yes"]
