"""The simulated device: streams work in order and in exact time while the host goes on."""

import threading
import time
from collections.abc import Iterator

import pytest
from benchmarks.simulated_device.device import EXCHANGE_S, QUEUE_LENGTH, Device, Event

AHEAD_S = 0.05
"""A kernel that runs while what follows it is launched."""


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def recorded(device: Device) -> Event:
    event = device.event()
    event.record()
    return event


def test_kernels_take_exactly_their_times(device: Device) -> None:
    device.compute.launch_kernel(AHEAD_S)
    begin = recorded(device)
    for seconds in (0.001, 0.002, 0.0005):
        device.compute.launch_kernel(seconds)
    end = recorded(device)
    assert not end.query(), "the host goes on"
    device.compute.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) == pytest.approx(3.5, abs=1e-6)


def test_an_idle_stream_begins_at_the_launch(device: Device) -> None:
    first = recorded(device)
    first.synchronize()
    launched = time.monotonic()
    second = recorded(device)
    second.synchronize()
    assert second.seconds >= launched


def test_a_stream_waits_for_another_and_the_host_does_not(device: Device) -> None:
    device.compute.launch_kernel(AHEAD_S)
    device.communication.wait_stream(device.compute)
    device.communication.launch_kernel(0.002)
    device.compute.launch_kernel(0.001)
    device.compute.wait_stream(device.communication)
    end = recorded(device)
    begin = device.event()
    begin.record(device.communication)
    assert not begin.query()
    device.compute.synchronize()
    # The exchange of 2 ms lies beside the kernel of 1 ms, which ends earlier.
    assert end.seconds == pytest.approx(begin.seconds)


def test_an_event_that_is_recorded_again_is_passed_again(device: Device) -> None:
    event = recorded(device)
    event.synchronize()
    device.compute.launch_kernel(AHEAD_S)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_the_host_waits_while_the_queue_is_full(device: Device) -> None:
    gate = threading.Event()

    def hold(now: float) -> float:
        gate.wait(30)
        return now

    device.compute.launch(hold)
    launched = 0

    def launch_all() -> None:
        nonlocal launched
        for _ in range(2 * QUEUE_LENGTH):
            device.compute.launch_kernel(0.0)
            launched += 1

    host = threading.Thread(target=launch_all)
    host.start()
    host.join(0.5)
    # One more than the queue holds: the stream has taken the work that it is at.
    assert host.is_alive()
    assert launched <= QUEUE_LENGTH + 1
    gate.set()
    host.join(30)
    assert launched == 2 * QUEUE_LENGTH


def test_one_exchange_takes_more_when_it_is_to(device: Device) -> None:
    device.extra_exchange_seconds = 0.03
    assert [device.take_exchange_seconds() for _ in range(2)] == [EXCHANGE_S + 0.03, EXCHANGE_S]
