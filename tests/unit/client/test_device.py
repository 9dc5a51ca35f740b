"""Device times, on a scripted device: every nanosecond is charged to the phase that used it, or to none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.unit.client.scripted_device import Device, FakeEvent, Script, begun

from torchperfd.hooks.cuda import record_without_stream
from torchperfd.hooks.device_clock import NO_PHASE, DeviceTimes
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


@pytest.mark.parametrize(
    ("events", "times"),
    [
        pytest.param(
            [("phase", FORWARD, 3_000_000), ("phase", BACKWARD, 5_000_000), ("close", TRAIN)],
            [(TRAIN, FORWARD, 3_000_000, 1), (TRAIN, BACKWARD, 5_000_000, 1)],
            id="an interval belongs to the phase between its boundaries",
        ),
        pytest.param([("phase", FORWARD, 7)], [], id="times wait for the end of their step"),
        pytest.param(
            [("phase", FORWARD, 7), ("close", NO_KIND), ("phase", FORWARD, 9), ("close", VALIDATE)],
            [(VALIDATE, FORWARD, 9, 1)],
            id="a forgotten step has no times",
        ),
        pytest.param(
            [
                *(("phase", FORWARD, 1), ("hold",), ("phase", FORWARD, 10), ("rejoin",)),
                *(("phase", FORWARD, 100), ("hold",), ("phase", FORWARD, 1000)),
                *(("release", TRAIN), ("close", VALIDATE)),
            ],
            [(TRAIN, FORWARD, 111, 3), (VALIDATE, FORWARD, 1000, 1)],
            id="what is held rejoins, or is a step of its own",
        ),
        pytest.param(
            [*[("work", OTHER, 5), ("phase", DATA, 2)] * 3, ("close", TRAIN)],
            [(TRAIN, DATA, 6, 3), (TRAIN, OTHER, 15, 1)],
            id="a phase that is open when its step ends is one call",
        ),
        pytest.param(
            [("work", BACKWARD, 1), ("phase", FORWARD, 20), ("phase", BACKWARD, 300), ("close", TRAIN)],
            [(TRAIN, FORWARD, 20, 1), (TRAIN, BACKWARD, 301, 1)],
            id="a nested phase splits the call and not the count",
        ),
        pytest.param(
            [
                *(("phase", FORWARD, 30), ("close", TRAIN), ("phase", FORWARD, 7), ("close", VALIDATE)),
                ("pass_over", TRAIN, 2),
            ],
            [(TRAIN, FORWARD, 90, 3), (VALIDATE, FORWARD, 7, 1)],
            id="steps stand for others of their own kind",
        ),
    ],
)
def test_device_times_of_a_script(events: list[Any], times: list[tuple[int, int, int, int]]) -> None:
    script = begun(*events)
    script.device.run()
    assert script.times.collect() == [DeviceTime(*each) for each in times]
    assert script.times.collect() == []


def test_only_passed_events_are_read_oldest_first() -> None:
    script = begun(("phase", FORWARD, 100), ("phase", BACKWARD, 1000), ("close", TRAIN))
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 0, 1), DeviceTime(TRAIN, BACKWARD, 0, 1)]
    script.device.run(1099)
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 100, 0)]
    script.device.run(1)
    assert script.times.collect() == [DeviceTime(TRAIN, BACKWARD, 1000, 0)]


def test_what_rejoined_is_one_step_to_the_last_of_its_intervals() -> None:
    script = begun(("work", FORWARD, 1), ("hold",), ("work", OTHER, 10), ("rejoin",), ("close", TRAIN))
    script.device.run(1)
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 1, 1), DeviceTime(TRAIN, OTHER, 0, 1)]
    script.device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, OTHER, 10, 0)]


def test_event_is_kept_while_an_interval_begins_with_it() -> None:
    script = begun(("phase", FORWARD, 1), ("phase", BACKWARD, 10))
    script.device.run(1)
    script.times.collect()
    script.play(("phase", OTHER, 100), ("phase", DATA, 1000), ("close", TRAIN))
    script.device.run()
    found = [(time.phase, time.ns) for time in script.times.collect()]
    assert found == [(DATA, 1000), (FORWARD, 1), (BACKWARD, 10), (OTHER, 100)]


def test_interval_with_one_missing_event_id_is_lost() -> None:
    times = Device().times()
    for cuda_event_id in (times.mark(), NO_CUDA_EVENT, NO_CUDA_EVENT, times.mark()):
        times.boundary(FORWARD, cuda_event_id)
    times.close(TRAIN)
    assert times.collect() == []
    assert times.lost == 4


def test_two_boundaries_may_share_an_event_id() -> None:
    script = begun()
    cuda_event_id = script.work(FORWARD, 4)
    script.times.close(TRAIN)
    script.times.boundary(LOSS, cuda_event_id)
    script.play(("phase", BACKWARD, 6), ("close", TRAIN))
    script.device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, FORWARD, 4, 1), DeviceTime(TRAIN, BACKWARD, 6, 1)]


def test_graph_capture_is_not_recorded_and_charged_to_no_phase() -> None:
    script = begun(("phase", DATA, 1))
    script.device.capturing = True
    assert script.boundary(FORWARD) == NO_CUDA_EVENT
    script.device.launch(50)
    script.device.capturing = False
    assert script.boundary(BACKWARD) != NO_CUDA_EVENT
    script.play(("phase", OTHER, 2), ("close", TRAIN))
    script.device.run()
    assert script.times.collect() == []
    assert script.times.lost == 2
    script.play(("phase", DATA, 3), ("close", TRAIN))
    script.device.run()
    # The step stands for the one before it as well.
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 6, 2)]


def test_nothing_is_queried_in_a_thread_that_captures() -> None:
    script = begun(("phase", DATA, 1), ("close", TRAIN))
    script.device.run()
    script.device.capturing = True
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 0, 1)]
    script.device.capturing = False
    assert script.times.collect() == [DeviceTime(TRAIN, DATA, 1, 0)]


def test_stream_inseparable_from_captures_is_not_queried() -> None:
    @contextmanager
    def refused(_: FakeEvent) -> Iterator[bool]:
        yield False

    times = DeviceTimes(Device().event, record_without_stream, lambda: False, refused)
    times.boundary(NO_PHASE, times.mark())
    times.boundary(FORWARD, times.mark())
    times.close(TRAIN)
    # The fake event fails a query from here.
    assert times.collect() == [DeviceTime(TRAIN, FORWARD, 0, 1)]
    assert times.failure == ""


def test_events_are_made_as_they_are_needed_and_used_again() -> None:
    script = Script()
    for _ in range(100):
        script.play(("phase", FORWARD, 1), ("phase", BACKWARD, 1), ("close", TRAIN))
        script.device.run()
        script.times.collect()
    assert len(script.device.made) == 3


def test_no_event_left_loses_intervals_until_device_catches_up() -> None:
    script = Script(capacity=2)
    assert [script.boundary(FORWARD) for _ in range(4)] == [0, 1, NO_CUDA_EVENT, NO_CUDA_EVENT]
    script.device.launch(8)
    script.device.run()
    script.times.collect()
    assert script.boundary(DATA) == 2
    script.play(("close", TRAIN), ("phase", BACKWARD, 16), ("close", TRAIN))
    script.device.run()
    assert script.times.collect() == [DeviceTime(TRAIN, BACKWARD, 32, 2)]
    # Two without an event, one that began with none, and the very first.
    assert script.times.lost == 4
    assert len(script.device.made) == 2


@pytest.mark.parametrize("fails", ["make", "record", "query", "elapsed_time", "capturing"])
def test_an_error_of_cuda_stays_inside_and_ten_are_the_end(fails: str) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    device = Device()
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


def test_work_of_whole_training_steps_is_without_waits() -> None:
    script = begun()
    for kind, work in ((TRAIN, 3_000_000), (VALIDATE, 50_000_000), (NO_KIND, 50_000_000), (TRAIN, 7_000_000)):
        script.play(("phase", FORWARD, work), ("phase", COLLECTIVE_WAIT, 20_000_000))
        script.play(("phase", OTHER, 1_000_000), ("close", kind))
    # Half a step has been worked off: it does not count before the device has done the rest.
    script.device.run(script.device.launched - 10_000_000)
    script.times.collect()
    assert script.times.work == (1, 4_000_000, 4e6**2)
    script.device.run()
    script.times.collect()
    assert script.times.work == (2, 12_000_000, 4e6**2 + 8e6**2)


def test_step_with_a_lost_interval_is_no_work() -> None:
    script = begun(("phase", FORWARD, 3_000_000), ("work", FORWARD, -2_000_000), ("close", TRAIN))
    script.device.done = 3_000_000
    script.times.collect()
    assert script.times.lost == 1
    assert script.times.work == (0, 0, 0.0)
