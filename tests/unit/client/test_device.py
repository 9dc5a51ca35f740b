"""Device times, on a scripted device: every nanosecond is charged to the phase that used it, or to none."""

import ctypes
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperfd.hooks.accelerator import cuda_device_times
from torchperfd.hooks.cuda import CurrentStream, record_without_stream, recorder_of_events
from torchperfd.hooks.device_clock import MARKS, NO_PHASE, DeviceTimes, apart_from_captures
from torchperfd.steps.device_times import NO_KIND, DeviceTime
from torchperfd.steps.phases import (
    BACKWARD,
    COLLECTIVE_WAIT,
    DATA,
    FORWARD,
    LOSS,
    NO_CUDA_EVENT,
    OTHER,
    TRAIN,
    VALIDATE,
)


class Device:
    """One stream, in nanoseconds of its own: what was launched, and how far the device has come."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0
        self.now = 0
        self.capturing = False
        self.apart = 0
        self.made: list[FakeEvent] = []

    def launch(self, ns: int) -> None:
        self.launched += ns

    def run(self, ns: int | None = None) -> None:
        """Work for that long, or until nothing is left to do."""
        self.done = self.launched if ns is None else min(self.launched, self.done + ns)

    def event(self) -> "FakeEvent":
        self.made.append(FakeEvent(self))
        return self.made[-1]

    @contextmanager
    def kept_apart(self, event: "FakeEvent") -> Iterator[bool]:
        assert event.at >= 0, "this event was never recorded"
        self.apart += 1
        try:
            yield True
        finally:
            self.apart -= 1

    def times(self, capacity: int = 64) -> DeviceTimes:
        return DeviceTimes(
            self.event,
            record_without_stream,
            lambda: self.capturing,
            self.kept_apart,
            capacity,
            clock=lambda: self.now,
            chance=lambda _: 0,
        )


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = -1

    def record(self) -> None:
        assert not self.device.capturing, "an event in a graph has no time"
        self.at = self.device.launched

    def query(self) -> bool:
        assert self.device.apart, "this query would fail another thread's graph capture"
        assert self.at >= 0
        return self.device.done >= self.at

    def elapsed_time(self, end_event: "FakeEvent", /) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("the device is not there yet")
        return (end_event.at - self.at) / 1e6


class Script:
    """Marks boundaries and reports them, as the hooks and the replay do, at once."""

    def __init__(self, device: Device, capacity: int = 64) -> None:
        self.device = device
        self.times = device.times(capacity)

    def boundary(self, phase: int) -> int:
        cuda_event_id = self.times.mark()
        self.times.boundary(phase, cuda_event_id)
        return cuda_event_id

    def phase(self, phase: int, ns: int) -> None:
        """Between the boundary before and the next, the device works for ``phase``."""
        self.device.launch(ns)
        self.boundary(phase)
        self.times.call(phase)


def test_an_interval_belongs_to_the_phase_between_its_boundaries() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 3_000_000)
    script.phase(BACKWARD, 5_000_000)
    script.times.close(TRAIN)
    device.run()

    assert script.times.collect() == [
        DeviceTime(TRAIN, FORWARD, 3_000_000, 1),
        DeviceTime(TRAIN, BACKWARD, 5_000_000, 1),
    ]
    assert script.times.collect() == []


def test_only_passed_events_are_read_oldest_first() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 100)
    script.phase(BACKWARD, 1000)
    script.times.close(TRAIN)
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 0, 1), DeviceTime(TRAIN, BACKWARD, 0, 1)]

    device.run(1099)
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 100, 0)]
    device.run(1)
    assert script.times.collect() == [DeviceTime(TRAIN, BACKWARD, 1000, 0)]


def test_times_wait_for_step_end_and_forgotten_step_has_none() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 7)
    device.run()
    assert script.times.collect() == []
    script.times.close(NO_KIND)
    script.phase(FORWARD, 9)
    script.times.close(VALIDATE)
    device.run()
    assert script.times.collect() == [DeviceTime(VALIDATE, FORWARD, 9, 1)]


def test_what_is_held_rejoins_or_is_a_step_of_its_own() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 1)
    script.times.hold()
    script.phase(FORWARD, 10)
    script.times.rejoin()
    script.phase(FORWARD, 100)
    script.times.hold()
    script.phase(FORWARD, 1000)
    script.times.release(TRAIN)
    script.times.close(VALIDATE)
    device.run()
    assert script.times.collect() == [
        DeviceTime(TRAIN, FORWARD, 111, 3),
        DeviceTime(VALIDATE, FORWARD, 1000, 1),
    ]


def test_what_rejoined_is_one_step_to_the_last_of_its_intervals() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    device.launch(1)
    script.boundary(FORWARD)
    script.times.hold()
    device.launch(10)
    script.boundary(OTHER)
    script.times.rejoin()
    script.times.close(TRAIN)
    device.run(1)
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 1, 1), DeviceTime(TRAIN, OTHER, 0, 1)]
    device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, OTHER, 10, 0)]


def test_event_is_kept_while_an_interval_begins_with_it() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 1)
    script.phase(BACKWARD, 10)
    device.run(1)
    script.times.collect()
    script.phase(OTHER, 100)
    script.phase(DATA, 1000)
    script.times.close(TRAIN)
    device.run()
    assert [(time.phase, time.ns) for time in script.times.collect()] == [
        (DATA, 1000),
        (FORWARD, 1),
        (BACKWARD, 10),
        (OTHER, 100),
    ]


def test_a_phase_that_is_open_when_its_step_ends_is_one_call() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    for _ in range(3):
        device.launch(5)
        script.boundary(OTHER)
        script.phase(DATA, 2)
    script.times.close(TRAIN)
    device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 6, 3), DeviceTime(TRAIN, OTHER, 15, 1)]


def test_nested_phase_splits_the_call_and_not_the_count() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    device.launch(1)
    script.boundary(BACKWARD)
    script.phase(FORWARD, 20)
    script.phase(BACKWARD, 300)
    script.times.close(TRAIN)
    device.run()
    assert script.times.collect() == [
        DeviceTime(TRAIN, FORWARD, 20, 1),
        DeviceTime(TRAIN, BACKWARD, 301, 1),
    ]


def test_interval_with_one_missing_event_id_is_lost() -> None:
    times = Device().times()
    for cuda_event_id in (times.mark(), NO_CUDA_EVENT, NO_CUDA_EVENT, times.mark()):
        times.boundary(FORWARD, cuda_event_id)
    times.close(TRAIN)
    assert times.collect() == []
    assert times.lost == 4


def test_two_boundaries_may_share_an_event_id() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    device.launch(4)
    cuda_event_id = script.boundary(FORWARD)
    script.times.close(TRAIN)
    script.times.boundary(LOSS, cuda_event_id)
    script.phase(BACKWARD, 6)
    script.times.close(TRAIN)
    device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 4, 1), DeviceTime(TRAIN, BACKWARD, 6, 1)]


def test_graph_capture_is_not_recorded_and_charged_to_no_phase() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(DATA, 1)
    device.capturing = True
    assert script.boundary(FORWARD) == NO_CUDA_EVENT
    device.launch(50)
    device.capturing = False
    assert script.boundary(BACKWARD) != NO_CUDA_EVENT
    script.phase(OTHER, 2)
    script.times.close(TRAIN)
    device.run()
    assert script.times.collect() == []
    assert script.times.lost == 2
    script.phase(DATA, 3)
    script.times.close(TRAIN)
    device.run()
    # The step stands for the one before it as well.
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 6, 2)]


def test_nothing_is_queried_in_a_thread_that_captures() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(DATA, 1)
    script.times.close(TRAIN)
    device.run()
    device.capturing = True
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 0, 1)]
    device.capturing = False
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 1, 0)]


def test_stream_inseparable_from_captures_is_not_queried() -> None:
    device = Device()

    @contextmanager
    def refused(_: FakeEvent) -> Iterator[bool]:
        yield False

    times = DeviceTimes(device.event, record_without_stream, lambda: False, refused)
    times.boundary(NO_PHASE, times.mark())
    times.boundary(FORWARD, times.mark())
    times.close(TRAIN)
    # The fake event fails a query from here.
    assert times.collect() == [DeviceTime(TRAIN, FORWARD, 0, 1)]
    assert times.failure == ""


def test_events_are_made_as_they_are_needed_and_used_again() -> None:
    device = Device()
    script = Script(device)
    for _ in range(100):
        script.phase(FORWARD, 1)
        script.phase(BACKWARD, 1)
        script.times.close(TRAIN)
        device.run()
        script.times.collect()
    assert len(device.made) == 3


def test_no_event_left_loses_intervals_until_device_catches_up() -> None:
    device = Device()
    script = Script(device, capacity=2)
    assert [script.boundary(FORWARD) for _ in range(4)] == [0, 1, NO_CUDA_EVENT, NO_CUDA_EVENT]
    device.launch(8)
    device.run()
    script.times.collect()
    assert script.boundary(DATA) == 2
    script.times.close(TRAIN)
    script.phase(BACKWARD, 16)
    script.times.close(TRAIN)
    device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, BACKWARD, 32, 2)]
    # Two without an event, one that began with none, and the very first.
    assert script.times.lost == 4
    assert len(device.made) == 2


@pytest.mark.parametrize("fails", ["make", "record", "query", "elapsed_time", "capturing"])
def test_an_error_of_cuda_stays_inside_and_ten_are_the_end(fails: str) -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 1)
    script.times.close(TRAIN)
    device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 1, 1)]

    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    times = DeviceTimes(
        broken if fails == "make" else device.event,
        record_without_stream,
        broken if fails == "capturing" else lambda: device.capturing,
        device.kept_apart,
    )
    with pytest.MonkeyPatch.context() as patch:
        if fails in ("record", "query", "elapsed_time"):
            patch.setattr(FakeEvent, fails, broken)
        for _ in range(20):
            times.boundary(FORWARD, times.mark())
            times.close(TRAIN)
            assert all(time.ns == 0 for time in times.collect())
        assert times.failure == "RuntimeError: CUDA error: device-side assert triggered"
    assert times.mark() == NO_CUDA_EVENT


def test_negative_interval_across_streams_is_charged_to_no_phase() -> None:
    device = Device()
    times = device.times()
    device.launch(10)
    times.boundary(NO_PHASE, times.mark())
    device.launched = 4  # a stream of its own that has less to do
    times.boundary(FORWARD, times.mark())
    times.close(TRAIN)
    device.done = 5
    assert [time.ns for time in times.collect()] == [0]
    assert (times.lost, times.failure) == (0, "")
    device.launched = 10
    device.run()
    assert times.collect() == []
    assert (times.lost, times.failure) == (1, "")


# Whatever happens, in whatever order.


@dataclass
class Truth:
    """What a step should come to: nanoseconds and calls by phase."""

    ns: Counter[int] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    running: set[int] = field(default_factory=set)
    is_whole: bool = True


class Model:
    """The same events for device times, and for a reference that knows the device's clock."""

    def __init__(self, capacity: int) -> None:
        self.device = Device()
        self.times = self.device.times(capacity)
        self.capacity = capacity
        self.previous: int | None = None
        self.step = Truth()
        self.held: Truth | None = None
        self.expected: dict[tuple[int, int, str], float] = defaultdict(float)
        self.steps: Counter[int] = Counter()
        self.whole: dict[int, list[Truth]] = defaultdict(list)
        self.given: Counter[tuple[int, int, str]] = Counter()

    def boundary(self, phase: int) -> None:
        cuda_event_id = self.times.mark()
        self.times.boundary(phase, cuda_event_id)
        here = self.device.launched
        if phase != NO_PHASE:
            if self.previous is None or cuda_event_id == NO_CUDA_EVENT:
                self.step.is_whole = False
            else:
                self.step.ns[phase] += here - self.previous
                self.step.running.add(phase)
        self.previous = None if cuda_event_id == NO_CUDA_EVENT else here

    def work(self, phase: int, ns: int) -> None:
        """A phase of which the device does a part at once, and somebody looks."""
        self.device.launch(ns)
        self.boundary(phase)
        self.device.run(ns // 2 + 1)
        self.collect()

    def call(self, phase: int) -> None:
        self.times.call(phase)
        if phase in self.step.running:
            self.step.running.remove(phase)
            self.step.calls[phase] += 1

    def settle(self, truth: Truth, kind: int) -> None:
        if kind != NO_KIND:
            for phase in truth.running:
                truth.calls[phase] += 1
            self.steps[kind] += 1
            if truth.is_whole:
                self.whole[kind].append(truth)

    def pass_over(self, kind: int, count: int) -> None:
        self.times.pass_over(kind, count)
        self.steps[kind] += count
        self.step = Truth(is_whole=False)
        self.previous = None

    def weigh(self) -> None:
        """The whole steps since the last time stand for all steps since those before."""
        for kind, whole in self.whole.items():
            weight = self.steps.pop(kind) / len(whole)
            for truth in whole:
                for phase, ns in truth.ns.items():
                    self.expected[kind, phase, "ns"] += ns * weight
                for phase, calls in truth.calls.items():
                    self.expected[kind, phase, "calls"] += calls * weight
        self.whole.clear()

    def close(self, kind: int) -> None:
        self.times.close(kind)
        self.settle(self.step, kind)
        self.step = Truth()

    def hold(self) -> None:
        if self.held is None:
            self.times.hold()
            self.held, self.step = self.step, Truth()

    def rejoin(self) -> None:
        self.times.rejoin()
        if self.held is not None:
            self.step.ns += self.held.ns
            self.step.calls += self.held.calls
            self.step.running |= self.held.running
            self.step.is_whole &= self.held.is_whole
            self.held = None

    def release(self, kind: int) -> None:
        self.times.release(kind)
        if self.held is not None:
            self.settle(self.held, kind)
            self.held = None

    def collect(self) -> None:
        self.weigh()
        for time in self.times.collect():
            self.given[time.kind, time.phase, "ns"] += time.ns
            self.given[time.kind, time.phase, "calls"] += time.calls
            assert time.kind in (TRAIN, VALIDATE)

    def allow(self) -> None:
        self.times.allow()

    def capture(self, capturing: bool) -> None:
        self.device.capturing = capturing


PHASES = st.sampled_from((NO_PHASE, DATA, FORWARD, OTHER))
KINDS = st.sampled_from((NO_KIND, TRAIN, VALIDATE))
WORK = st.integers(0, 9)
EVENT_LISTS = st.lists(
    st.one_of(
        st.tuples(st.just("boundary"), PHASES),
        st.tuples(st.just("launch"), WORK),
        st.tuples(st.just("work"), PHASES, WORK),
        st.tuples(st.just("work"), PHASES, WORK),
        st.tuples(st.just("work"), PHASES, WORK),
        st.tuples(st.just("call"), st.sampled_from((DATA, FORWARD))),
        st.tuples(st.just("run"), WORK),
        st.tuples(st.just("close"), KINDS),
        st.tuples(st.just("pass_over"), st.sampled_from((TRAIN, VALIDATE)), st.integers(1, 5)),
        st.tuples(st.just("allow")),
        st.tuples(st.just("release"), KINDS),
        st.tuples(st.just("capture"), st.booleans()),
        st.tuples(st.sampled_from(("hold", "rejoin", "collect"))),
    ),
    max_size=80,
)


@settings(max_examples=500)
@given(events=EVENT_LISTS, capacity=st.integers(1, 12))
def test_totals_are_the_truth_and_no_event_is_lost_to_the_pool(
    events: list[tuple[Any, ...]], capacity: int
) -> None:
    model = Model(capacity)
    calls: dict[str, Callable[..., None]] = {
        name: getattr(model, name, None) or getattr(model.device, name)
        for name in (
            "boundary", "launch", "work", "call", "run", "collect",
            "close", "hold", "rejoin", "release", "capture", "pass_over", "allow",
        )
    }  # fmt: skip
    for name, *details in events:
        calls[name](*details)
    model.capture(False)
    model.close(TRAIN)
    model.release(TRAIN)
    model.device.run()
    model.collect()

    for key in model.given.keys() | model.expected.keys():
        # Whole units are given out; a fraction waits for more.
        assert model.expected[key] - 1 < model.given[key] <= model.expected[key] + 0.01
    assert model.times.failure == ""
    model.times.allow()
    assert len(model.device.made) <= capacity
    # Nothing is under way, but perhaps the newest boundary's event.
    model.times.boundary(NO_PHASE, NO_CUDA_EVENT)
    assert NO_CUDA_EVENT not in [model.times.mark() for _ in range(capacity)]
    assert len(model.device.made) <= capacity
    assert model.times.mark() == NO_CUDA_EVENT


# Not every step has its events.


def marked(script: Script, phases: int) -> int:
    """Train a step of so many phases of 10 ns each; return how many boundaries were marked."""
    marks = 0
    for _ in range(phases):
        script.device.launch(10)
        marks += script.boundary(FORWARD) != NO_CUDA_EVENT
        script.times.call(FORWARD)
    script.times.close(TRAIN)
    return marks


def test_steps_with_all_their_events_stand_for_the_others() -> None:
    device = Device()
    script = Script(device, capacity=4096)
    spent: list[int] = []
    script.times.spent = lambda: spent.append(1)
    script.boundary(NO_PHASE)
    marks = [marked(script, 10) for _ in range(20)]
    assert marks == [10] * 6 + [3] + [0] * 13
    assert len(spent) == 7 + 130
    device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 20 * 100, 20 * 10)]

    script.times.allow()
    script.times.pass_over(TRAIN, 980)
    assert [marked(script, 10) for _ in range(8)] == [10] * 6 + [4, 0]
    device.run()
    # The first of these began before there were events again.
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 988 * 100, 988 * 10)]


def test_work_of_whole_training_steps_is_without_waits() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    for kind, work in ((TRAIN, 3_000_000), (VALIDATE, 50_000_000), (NO_KIND, 50_000_000), (TRAIN, 7_000_000)):
        script.phase(FORWARD, work)
        script.phase(COLLECTIVE_WAIT, 20_000_000)
        script.phase(OTHER, 1_000_000)
        script.times.close(kind)
    # Half a step has been worked off: it does not count before the device has done the rest.
    device.run(device.launched - 10_000_000)
    script.times.collect()
    assert script.times.work == (1, 4_000_000, 4e6**2)
    device.run()
    script.times.collect()
    assert script.times.work == (2, 12_000_000, 4e6**2 + 8e6**2)


def test_step_with_a_lost_interval_is_no_work() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 3_000_000)
    device.launch(-2_000_000)
    script.boundary(FORWARD)
    script.times.close(TRAIN)
    device.done = 3_000_000
    script.times.collect()
    assert script.times.lost == 1
    assert script.times.work == (0, 0, 0.0)


def test_kinds_of_steps_stand_for_their_own_kind() -> None:
    device = Device()
    script = Script(device)
    script.boundary(NO_PHASE)
    script.phase(FORWARD, 30)
    script.times.close(TRAIN)
    script.phase(FORWARD, 7)
    script.times.close(VALIDATE)
    script.times.pass_over(TRAIN, 2)
    device.run()
    assert script.times.collect() == [
        DeviceTime(TRAIN, FORWARD, 90, 3),
        DeviceTime(VALIDATE, FORWARD, 7, 1),
    ]


def test_steps_of_many_events_get_more_until_one_is_whole() -> None:
    device = Device()
    script = Script(device, capacity=4096)
    script.boundary(NO_PHASE)
    rounds = 0
    while not (times := script.times.collect()):
        marked(script, 300)
        marked(script, 300)
        device.run()
        script.times.allow()
        rounds += 1
    assert rounds < 8
    assert times == [DeviceTime(TRAIN, FORWARD, 2 * rounds * 3000, 2 * rounds * 300)]


# Streams.


class Streams:
    """Two devices with streams by address, as CUDA has them; counts the objects made of them."""

    def __init__(self) -> None:
        self.device, self.addresses, self.made, self.fails = 0, {0: 0, 1: 0}, 0, False
        self.recorded: list[tuple[int, int]] = []

    def stream(self) -> tuple[int, int]:
        if self.fails:
            raise RuntimeError("CUDA error")
        self.made += 1
        return self.device, self.addresses[self.device]

    def current(self) -> CurrentStream:
        return CurrentStream(lambda: self.device, lambda device: self.addresses[device], self.stream)

    def record(self, stream: tuple[int, int]) -> None:
        """What an event does with the stream that it is given."""
        self.recorded.append(stream)


def test_events_go_on_the_current_stream_and_only_a_change_costs() -> None:
    streams = Streams()
    current = streams.current()
    expected = []
    for device, address in ((0, 0), (0, 0), (0, 7), (0, 7), (1, 0), (1, 7), (0, 7), (0, 0)):
        streams.device = device
        streams.addresses[device] = address
        current.record(streams)
        expected.append((device, address))
    assert streams.recorded == expected
    assert streams.made == 6


def test_stream_that_could_not_be_had_is_asked_for_again() -> None:
    streams = Streams()
    current = streams.current()
    current.record(streams)
    streams.addresses[0] = 7
    streams.fails = True
    with pytest.raises(RuntimeError):
        current.record(streams)
    streams.fails = False
    streams.addresses[0] = 0
    current.record(streams)
    assert streams.recorded == [(0, 0), (0, 0)]
    assert streams.made == 2


def test_torch_without_the_names_records_without_a_stream() -> None:
    assert recorder_of_events(SimpleNamespace(_C=SimpleNamespace())) is record_without_stream


# CUDA's own.


class Driver:
    """``cuThreadExchangeStreamCaptureMode`` of one thread."""

    def __init__(self, result: int = 0) -> None:
        self.mode = 0
        self.result = result

    def __call__(self, reference: Any) -> int:
        if not self.result:
            self.mode, reference._obj.value = reference._obj.value, self.mode
        return self.result


@contextmanager
def some_device() -> Iterator[None]:
    yield


def test_apart_from_captures_sets_thread_mode_and_restores_it() -> None:
    driver = Driver()
    with apart_from_captures(driver, some_device()) as apart:
        assert apart
        assert driver.mode == 1
    assert driver.mode == 0

    def fail() -> None:
        with apart_from_captures(driver, some_device()):
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert driver.mode == 0


def test_driver_refusal_is_reported() -> None:
    driver = Driver(result=1)
    with apart_from_captures(driver, some_device()) as apart:
        assert not apart


def test_the_device_is_made_current_before_the_driver_is_asked() -> None:
    order: list[str] = []

    @contextmanager
    def device() -> Iterator[None]:
        order.append("device")
        yield

    def exchange(_: Any) -> int:
        order.append("driver")
        return 0

    with apart_from_captures(exchange, device()):
        pass
    assert order == ["device", "driver", "driver"]


def torch_with(**cuda: Any) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(**cuda), version=SimpleNamespace(cuda="13.0"))


@pytest.mark.parametrize(
    "torch",
    [
        pytest.param(None, id="not imported"),
        pytest.param(SimpleNamespace(), id="being imported"),
        pytest.param(torch_with(is_initialized=lambda: False), id="not initialised"),
        pytest.param(
            SimpleNamespace(
                cuda=SimpleNamespace(is_initialized=lambda: True), version=SimpleNamespace(cuda=None)
            ),
            id="ROCm",
        ),
    ],
)
def test_there_are_none_without_cuda(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuThreadExchangeStreamCaptureMode=Driver()))
    assert cuda_device_times() is None


def test_there_are_none_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "torch", torch_with(is_initialized=lambda: True))
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda_device_times() is None


def test_cuda_events_have_timing_and_are_read_outside_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, driver = Device(), Driver()
    modes: list[int] = []
    current: list[object] = []

    class CudaEvent(FakeEvent):
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            super().__init__(device)

        def query(self) -> bool:
            modes.append(driver.mode)
            return self.device.done >= self.at

    def made_current(wanted: object) -> AbstractContextManager[None]:
        current.append(wanted)
        return some_device()

    torch = torch_with(
        is_initialized=lambda: True,
        Event=CudaEvent,
        device=made_current,
        is_current_stream_capturing=lambda: False,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuThreadExchangeStreamCaptureMode=driver))
    times = cuda_device_times()
    assert times is not None
    times.boundary(NO_PHASE, times.mark())
    device.launch(42)
    times.boundary(FORWARD, times.mark())
    times.close(TRAIN)
    device.run()
    assert times.collect() == [DeviceTime(TRAIN, FORWARD, 42, 1)]
    assert set(modes) == {1}
    assert current == [device]
    assert driver.mode == 0


@pytest.mark.parametrize(
    ("works", "lag"),
    [
        (1.0, 0),  # the device waits for the host
        (4.0, 48_000),  # it has done a quarter of what was launched in 64 us
    ],
)
def test_lag_is_since_the_first_event_not_passed(works: float, lag: int) -> None:
    device = Device()
    script = Script(device, capacity=256)
    for _ in range(MARKS):
        device.launch(1000)
        device.now += 1000
        device.run(round(1000 / works))
        script.boundary(FORWARD)
    assert script.times.lags == 1
    assert script.times.lag_ns == pytest.approx(lag, abs=2000)
    script.boundary(FORWARD)
    assert script.times.lags == 1
    script.times.allow()
    for _ in range(3 * MARKS):
        script.boundary(FORWARD)
    assert script.times.lags == 2


def test_lag_is_not_sampled_while_a_graph_is_captured() -> None:
    device = Device()
    script = Script(device, capacity=256)
    device.capturing = True
    for _ in range(MARKS):
        script.boundary(FORWARD)
    assert (script.times.lags, script.times.lag_ns) == (0, 0)
