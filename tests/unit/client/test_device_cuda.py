"""How events get onto CUDA's current stream, and are read apart from graph captures."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.scripted_device import Device, FakeEvent

from torchperfd.hooks.accelerator import cuda_device_times
from torchperfd.hooks.cuda import CurrentStream, record_without_stream, recorder_of_events
from torchperfd.hooks.device_clock import NO_PHASE, apart_from_captures
from torchperfd.steps.device_times import DeviceTime
from torchperfd.steps.phases import FORWARD, TRAIN


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
