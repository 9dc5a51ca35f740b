"""Arrivals: the first and the last of each training step, whatever becomes of a step that may have ended."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.scripted import NAMES, WALL_AHEAD, Clock, unpack

from torchperfd.steps.phases import BACKWARD, OTHER, TRAIN, VALIDATE
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import ArrivalRecorder, Arrivals


def rows(arrivals: Arrivals) -> list[tuple[int, int, int]]:
    return list(zip(arrivals.step, arrivals.first_ns, arrivals.last_ns, strict=True))


@given(st.lists(st.sampled_from(["arrive", "close", "forget", "drain", "hold"]), max_size=60), st.data())
def test_drained_arrivals_are_those_written(ops: list[str], data: st.DataObject) -> None:
    recorder, reported, expected = ArrivalRecorder(), [], []
    step = 0
    # By hand: the arrivals of the open step and of a held one, None for none held.
    current: list[int] = []
    held: list[int] | None = None

    def ended(times: list[int]) -> None:
        nonlocal step
        if times:
            expected.append((step, min(times), max(times)))
        step += 1

    for now, op in enumerate(ops, start=1):
        if op == "arrive":
            recorder.arrive(now)
            current.append(now)
        elif op == "drain":
            reported += rows(recorder.drain())
        elif op == "hold" and held is None:
            recorder.hold()
            current, held = [], current
        elif op in ("close", "forget"):
            if held is not None:
                fate = data.draw(st.sampled_from(["rejoin", "release", "discard"]))
                if fate == "rejoin":
                    recorder.rejoin()
                    current = held + current
                elif fate == "release":
                    recorder.release(step)
                    ended(held)
                else:
                    recorder.discard()
                held = None
            if op == "close":
                recorder.close(step)
                ended(current)
            else:
                recorder.forget()
            current = []
    assert reported + rows(recorder.drain()) == expected
    assert rows(recorder.drain()) == []


def test_undrained_arrivals_are_bounded() -> None:
    recorder = ArrivalRecorder()
    for step in range(10_000):
        recorder.arrive(step + 1)
        recorder.close(step)
    arrivals = recorder.drain()
    assert arrivals.step == array("q", range(len(arrivals.step)))
    assert 1_000 < len(arrivals.step) < 10_000


def test_recorder_times_the_wait_and_gives_arrival_in_wall_time() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    recorder.wall_offset = WALL_AHEAD
    recorder.arrive()
    recorder.exit()
    assert not recorder.is_open, "a collective between steps starts none"
    for kind, index in ((TRAIN, 0), (VALIDATE, 0), (TRAIN, 1)):
        recorder.enter(BACKWARD)
        clock.advance(10)
        began = clock.now
        recorder.arrive()
        clock.advance(30)
        recorder.exit()
        recorder.exit()
        recorder.close(kind, index)
        if index:
            assert rows(recorder.arrivals.drain()) == [
                (0, began + WALL_AHEAD - 80, began + WALL_AHEAD - 80),
                (1, began + WALL_AHEAD, began + WALL_AHEAD),
            ]
    for step in unpack(recorder.drain(), NAMES):
        assert (step.duration, step.phases["collective_wait"], step.phases["backward"]) == (
            40,
            (1, 30),
            (1, 10),
        )


@pytest.mark.parametrize(("ago", "waited"), [(0, 30), (25, 55), (70, 100), (71, 100), (10_000, 100)])
def test_arrival_recorded_late_takes_nothing_from_earlier_steps(ago: int, waited: int) -> None:
    clock = Clock()
    recorder = Recorder(clock)
    recorder.enter(BACKWARD)
    clock.advance(10)
    recorder.enter(OTHER)
    clock.advance(5)
    recorder.exit()
    clock.advance(70)
    recorder.arrive(ago)
    came = clock.now - ago
    clock.advance(30)
    recorder.exit()
    clock.advance(1)
    recorder.exit()
    recorder.close(TRAIN, 0)
    (step,) = unpack(recorder.drain(), NAMES)
    assert step.duration == 116
    assert step.phases["collective_wait"] == (1, waited)
    assert step.phases["backward"] == (1, 111 - waited)
    assert rows(recorder.arrivals.drain()) == [(0, came, came)]


def test_arrivals_of_a_step_that_is_abandoned_are_forgotten() -> None:
    recorder = Recorder(Clock())
    recorder.open()
    recorder.arrive()
    recorder.abandon()
    recorder.open()
    recorder.close(TRAIN, 0)
    assert rows(recorder.arrivals.drain()) == []


def test_a_step_that_goes_on_keeps_its_first_arrival() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    recorder.open()
    for _ in range(2):
        clock.advance(100)
        recorder.arrive()
        recorder.exit()
        recorder.hold()
        recorder.rejoin()
    clock.advance(100)
    recorder.close(TRAIN, 0)
    assert rows(recorder.arrivals.drain()) == [(0, 1100, 1200)]
