"""The newest readings of the GPUs, between two samples."""

from collections.abc import Callable, Iterator

import pytest

from torchperfd_daemon.collectors.base import CollectorUnavailableError
from torchperfd_daemon.collectors.gpu_readings import GpuCollector, GpuReading, NewestGpuReadings

GPUS = [GpuReading("0", "GPU-0"), GpuReading("1", "GPU-1")]


class Gpus(GpuCollector):
    """Two readings, then no driver."""

    name = "nvml"

    def __init__(self) -> None:
        super().__init__()
        self.answers: Iterator[list[GpuReading]] = iter([[GPUS[0]], [GPUS[0], GPUS[1]]])

    def read(self) -> list[GpuReading]:
        found = next(self.answers, None)
        if found is None:
            raise CollectorUnavailableError("gone")
        return found


def test_newest_gpu_readings_are_kept_until_a_read_fails() -> None:
    watch = NewestGpuReadings(Gpus())
    assert (watch.name, watch.newest()) == ("nvml", ())
    watch.sample()
    assert watch.newest() == [GPUS[0]]
    watch.sample()
    assert watch.newest() == [GPUS[0], GPUS[1]]
    with pytest.raises(CollectorUnavailableError):
        watch.sample()
    assert watch.newest() == ()


class SlowGpus(GpuCollector):
    """One reading, during which others look."""

    name = "nvml"

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    def read(self) -> list[GpuReading]:
        self.meanwhile()
        return [GPUS[0]]


def test_last_reading_stays_while_the_driver_is_read() -> None:
    """A driver takes a good part of a second, and the diagnosis looks once a second: it must not miss."""
    gpus, now = SlowGpus(), [0.0]
    watch = NewestGpuReadings(gpus, clock=lambda: now[0])
    watch.sample()
    seen: list[int] = []

    def look() -> None:
        for passed in (0.5, 9.0, 10.1):
            now[0] = 100 + passed
            seen.append(len(watch.newest()))

    now[0], gpus.meanwhile = 100.0, look
    watch.sample()
    assert seen == [1, 1, 0], "of a driver that hangs, nothing is known"
    assert len(watch.newest()) == 1
