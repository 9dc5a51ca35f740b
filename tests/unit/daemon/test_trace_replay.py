"""The replay of steps: unedited it gives the recorded times, and edits do what a device would."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchperfd_daemon.analysis.advice.edits import (
    NOTHING,
    DeviceEvents,
    DeviceWork,
    Edit,
    HostCost,
    HostTime,
    Spans,
)
from torchperfd_daemon.analysis.advice.replay import Timeline
from torchperfd_daemon.analysis.trace import Int64

US = 1_000
STEPS = 4
LAUNCH = US


@dataclass
class Program:
    """What a host does in each step, run in virtual time by rules of its own.

    Attributes:
        parts: Parts of a step: ("work", ns), ("launch", stream, ns) or ("sync",).
    """

    parts: Sequence[tuple[Any, ...]]
    latency: int = 5 * US
    events: list[tuple[int, int, int, int]] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def run(self) -> "Program":
        now, streams = 0, dict.fromkeys((1, 2), 0)
        for _ in range(STEPS):
            self.starts.append(now)
            for part in self.parts:
                if part[0] == "work":
                    now += part[1]
                elif part[0] == "launch":
                    _, stream, length = part
                    now += LAUNCH
                    start = max(now + self.latency, streams[stream])
                    streams[stream] = start + length
                    self.events.append((stream, now, start, start + length))
                else:
                    begun, now = now, max(now, *streams.values()) + self.latency
                    self.waits.append((begun, now))
            self.ends.append(now)
        return self

    def timeline(self, scale: int = 1) -> Timeline:
        stream, launched, start, end = (
            np.array([each[at] for each in self.events], dtype=np.int64) for at in range(4)
        )
        begun, until = (np.array([each[at] for each in self.waits], dtype=np.int64) for at in (0, 1))
        rows = np.arange(len(stream))
        return Timeline(
            DeviceEvents(
                rows, stream, (launched - LAUNCH) * scale, launched * scale, start * scale, end * scale
            ),
            Spans(1000 + np.arange(len(begun)), begun * scale, until * scale),
            HostTime(rows[:0], rows[:0]),
            column(self.starts) * scale,
            column(self.ends) * scale,
        )


def column(values: list[int]) -> Int64:
    return np.array(values, dtype=np.int64)


# Times of at least 0.1 ms, far above what counts as a delay of no cause.
TIMES = st.integers(100, 900).map(lambda us: us * US)
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("work"), TIMES),
        st.tuples(st.just("launch"), st.sampled_from([1, 2]), TIMES),
        st.just(("sync",)),
    ),
    min_size=1,
    max_size=8,
)
PROGRAMS = PARTS.map(lambda parts: Program([("work", 100 * US), *parts, ("launch", 1, 100 * US)]).run())


@given(PROGRAMS)
@settings(deadline=None)
def test_unedited_replay_is_the_recording(program: Program) -> None:
    graph = program.timeline()
    found = graph.replay(NOTHING)
    ends = {row: each[3] for row, each in enumerate(program.events)}
    assert found.ends.tolist() == pytest.approx([ends[row] for row in graph.ending.tolist()])
    marks = np.unique(program.starts + program.ends)
    assert found.marks.tolist() == pytest.approx(marks.tolist())


def edits(program: Program, data: st.DataObject) -> Edit:
    rows = np.arange(len(program.events))
    waits = 1000 + np.arange(len(program.waits))
    keep = data.draw(st.floats(0, 1))
    span = (column([data.draw(st.integers(0, program.ends[-1] // 2))]), column([program.ends[-1]]))
    return Edit(
        host=(HostTime(*span, keep),) if data.draw(st.booleans()) else (),
        waits=(waits[data.draw(st.integers(0, len(waits))) :],),
        device=(DeviceWork(rows[data.draw(st.integers(0, len(rows))) :], keep),),
        host_share=data.draw(st.floats(0, 1)) if data.draw(st.booleans()) else 0.0,
    )


@given(PROGRAMS, st.data())
@settings(deadline=None)
def test_edit_saves_between_nothing_and_the_step(program: Program, data: st.DataObject) -> None:
    graph, edit = program.timeline(), edits(program, data)
    whole = graph.replay(NOTHING).step_ns
    left = graph.replay(edit).step_ns
    assert -1 <= left <= whole + 1
    # More edits leave no more.
    assert graph.replay(edit + edits(program, data)).step_ns <= left + 1


@given(PROGRAMS, st.data(), st.integers(2, 7))
@settings(deadline=None)
def test_longer_times_are_longer_savings(program: Program, data: st.DataObject, scale: int) -> None:
    edit = edits(program, data)
    longer = Edit(
        tuple(HostTime(each.start * scale, each.end * scale, each.keep) for each in edit.host),
        edit.waits,
        edit.device,
        edit.host_share,
    )
    once, times = program.timeline(), program.timeline(scale)
    # Where no event shows it a stream takes a µs from one event to the next, whatever the scale.
    least = scale * US * len(program.events)
    assert times.replay(NOTHING).step_ns == pytest.approx(scale * once.replay(NOTHING).step_ns, abs=least)
    assert times.replay(longer).step_ns == pytest.approx(scale * once.replay(edit).step_ns, abs=least)


@given(st.lists(TIMES, min_size=1, max_size=6), st.integers(1, 4))
@example([100 * US, 302 * US], 1)
@settings(deadline=None)
def test_host_hidden_behind_the_device_saves_nothing(kernels: list[int], reads: int) -> None:
    """The host launches a step in less time than its kernels take, and is ahead of the device."""
    parts = [part for length in kernels for part in (("work", length // 3), ("launch", 1, length))]
    program = Program(parts * reads).run()
    graph = program.timeline()
    everywhere = HostTime(column([0]), column(program.ends[-1:]))
    whole = graph.replay(NOTHING).step_ns
    # In the first step the host is not ahead yet: a kernel may begin a few µs after the one before it.
    assert whole == pytest.approx(reads * sum(kernels), rel=1e-3, abs=2 * US)
    assert graph.replay(Edit(host=(everywhere,))).step_ns == pytest.approx(whole, rel=1e-3)


def test_kernels_hidden_behind_the_host_save_nothing() -> None:
    program = Program([("work", 400 * US), ("launch", 1, 100 * US)]).run()
    graph = program.timeline()
    everything = DeviceWork(np.arange(STEPS), 0.5)
    assert graph.replay(Edit(device=(everything,))).step_ns == graph.replay(NOTHING).step_ns == 401 * US


def test_wait_that_is_removed_lets_the_host_run_ahead() -> None:
    parts = [("work", 300 * US), ("launch", 1, 500 * US), ("sync",), ("work", 100 * US)]
    program = Program(parts).run()
    graph = program.timeline()
    assert graph.replay(NOTHING).step_ns == pytest.approx(911 * US)
    without = Edit(waits=(1000 + np.arange(STEPS),))
    # The device's 500 µs then bound the step.
    assert graph.replay(without).step_ns == pytest.approx(501 * US, rel=0.02)


def test_event_of_another_stream_is_waited_for() -> None:
    """A collective begins behind a kernel, and the next kernel behind the collective."""
    rows = np.arange(6)
    launched = np.repeat(column([0, 1000 * US]), 3) + np.tile(column([10, 20, 30]), 2) * US
    start = np.repeat(column([0, 1000 * US]), 3) + np.tile(column([15, 315, 715]), 2) * US
    end = np.repeat(column([0, 1000 * US]), 3) + np.tile(column([315, 715, 1000]), 2) * US
    stream = np.tile(column([1, 2, 1]), 2)
    none = HostTime(rows[:0], rows[:0])
    waits = Spans(column([7, 8]), column([50, 1050]) * US, column([1000, 2000]) * US)
    marks = column([0, 1000, 2000]) * US
    graph = Timeline(
        DeviceEvents(rows, stream, launched - LAUNCH, launched, start, end), waits, none, marks[:2], marks[1:]
    )
    assert graph.unexplained_ns == 0
    faster = Edit(device=(DeviceWork(rows[1::3], 0.5),))
    assert graph.replay(faster).step_ns == pytest.approx(800 * US, rel=0.01)


def test_host_cost_of_recording_is_taken_off() -> None:
    program = Program([("work", 400 * US), ("launch", 1, 100 * US)]).run()
    base = HostCost(lambda moments: moments // 4, (HostTime(column([0]), column([200 * US]), 0.5),), 0.9)
    # Of the first step 200 µs are half as long, and the speed is that of the rest.
    first, others = 0.75 * (100 + 0.9 * 201) * US, 0.75 * 0.9 * 401 * US
    expected = (first + 3 * others) / 4
    assert program.timeline().replay(NOTHING, base).step_ns == pytest.approx(expected, rel=1e-6)
