"""Device times over many steps: their totals are the truth; steps with all events stand for others."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.scripted_device import Device, Script, begun

from torchperfd.hooks.device_clock import NO_PHASE
from torchperfd.steps.device_times import NO_KIND, DeviceTime
from torchperfd.steps.phases import DATA, FORWARD, NO_CUDA_EVENT, OTHER, TRAIN, VALIDATE


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


def marked(script: Script, phases: int) -> int:
    """Train a step of so many phases of 10 ns each; return how many boundaries were marked."""
    marks = 0
    for _ in range(phases):
        marks += script.work(FORWARD, 10) != NO_CUDA_EVENT
        script.times.call(FORWARD)
    script.times.close(TRAIN)
    return marks


def test_steps_with_all_their_events_stand_for_the_others() -> None:
    script = begun(capacity=4096)
    spent: list[int] = []
    script.times.spent = lambda: spent.append(1)
    marks = [marked(script, 10) for _ in range(20)]
    assert marks == [10] * 6 + [3] + [0] * 13
    assert len(spent) == 7 + 130
    script.device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 20 * 100, 20 * 10)]

    script.times.allow()
    script.times.pass_over(TRAIN, 980)
    assert [marked(script, 10) for _ in range(8)] == [10] * 6 + [4, 0]
    script.device.run()
    # The first of these began before there were events again.
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 988 * 100, 988 * 10)]


def test_steps_of_many_events_get_more_until_one_is_whole() -> None:
    script = begun(capacity=4096)
    rounds = 0
    while not (times := script.times.collect()):
        marked(script, 300)
        marked(script, 300)
        script.device.run()
        script.times.allow()
        rounds += 1
    assert rounds < 8
    assert times == [DeviceTime(TRAIN, FORWARD, 2 * rounds * 3000, 2 * rounds * 300)]
