"""Collectors and their samplers: a failure costs the collector concerned, and only that."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pynvml
import pytest

from torchperfd_daemon.collectors.base import CollectorUnavailableError, Family, Sampler
from torchperfd_daemon.collectors.nvml import NvmlCollector

GIVE_UP_S = 20


class Scripted:
    """A collector that does what a test says, each time it is asked."""

    def __init__(self, name: str, sample: Callable[[], Sequence[Family]]) -> None:
        self.name = name
        self.sample = sample


def gauge(value: float) -> list[Family]:
    family = Family("thing", "A thing.", "gauge")
    family.add(value)
    return [family]


def ticking(*moments: float) -> Callable[[], float]:
    """Return a clock that shows each of these moments once."""
    left: Iterator[float] = iter(moments)
    return lambda: next(left)


def raising(error: Exception) -> Callable[[], Sequence[Family]]:
    def sample() -> Sequence[Family]:
        raise error

    return sample


def test_a_good_sample_is_kept() -> None:
    sampler = Sampler(Scripted("good", lambda: gauge(3)), 1, ticking(10, 10.5), lambda: 1700.0)
    assert (sampler.families, sampler.success, sampler.last_success_unix_seconds) == ((), False, 0.0)
    sampler.sample_once()
    assert sampler.name == "good"
    assert sampler.families == gauge(3)
    assert (sampler.success, sampler.duration_seconds, sampler.last_success_unix_seconds) == (True, 0.5, 1700)


def test_a_failing_collector_shows_nothing_old_and_complains_once_per_spell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Scripted("flaky", lambda: gauge(1))
    walls = ticking(1700, 1800)
    sampler = Sampler(collector, 1, ticking(*range(0, 100, 2), *range(1, 100, 2)), walls)
    sampler.sample_once()
    collector.sample = raising(OSError("cable unplugged"))
    for _ in range(3):
        sampler.sample_once()
    assert (sampler.families, sampler.success) == ((), False)
    assert (sampler.duration_seconds, sampler.last_success_unix_seconds) == (2, 1700)
    assert [record.getMessage() for record in caplog.records] == ["collector flaky: cable unplugged"]
    assert caplog.records[0].exc_info, "a surprise is worth its traceback"
    collector.sample = lambda: gauge(2)
    sampler.sample_once()
    assert (sampler.families, sampler.success, sampler.last_success_unix_seconds) == (gauge(2), True, 1800)
    collector.sample = raising(OSError("again"))
    sampler.sample_once()
    assert [record.getMessage() for record in caplog.records][1:] == ["collector flaky: again"]


def test_what_does_not_exist_here_is_no_surprise(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(Scripted("absent", raising(CollectorUnavailableError("no such thing"))), 1)
    sampler.sample_once()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert not record.exc_info


def test_a_hanging_or_failing_collector_does_not_hold_the_others_up() -> None:
    hanging, released, sampled = threading.Event(), threading.Event(), threading.Event()
    count = 0

    def hang() -> Sequence[Family]:
        hanging.set()
        released.wait()
        return []

    def good() -> Sequence[Family]:
        nonlocal count
        count += 1
        if count == 3:
            sampled.set()
        return gauge(count)

    collectors = (Scripted("hang", hang), Scripted("fail", raising(ValueError("x"))), Scripted("good", good))
    samplers = [Sampler(collector, 0.001) for collector in collectors]
    for sampler in samplers:
        sampler.start()
    try:
        assert hanging.wait(GIVE_UP_S)
        assert sampled.wait(GIVE_UP_S)
        assert [sampler.success for sampler in samplers] == [False, False, True]
        assert not samplers[0].families
    finally:
        released.set()
        for sampler in samplers:
            sampler.stop()
    assert not any(sampler._thread.is_alive() for sampler in samplers)


class Waits:
    """Stands in for the sampler's stop event: notes each wait, and stops after enough of them."""

    def __init__(self, now: list[float], rounds: int) -> None:
        self.waited: list[float] = []
        self._now, self._rounds = now, rounds

    def is_set(self) -> bool:
        return len(self.waited) >= self._rounds

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self._now[0] += seconds


@pytest.mark.parametrize(
    ("durations", "waits"),
    [
        ([0.25] * 4, [0.75] * 4),
        ([0.25, 0.5, 0.0, 0.25], [0.75, 0.5, 1.0, 0.75]),
        # Once it is late there is no burst to catch up, and the grid stays where it is.
        ([3.5, 0.25, 0.25], [0.5, 0.75, 0.75]),
    ],
)
def test_the_rate_does_not_drift(durations: list[float], waits: list[float]) -> None:
    now = [100.0]
    left = iter(durations)

    def sample() -> Sequence[Family]:
        now[0] += next(left)
        return []

    sampler = Sampler(Scripted("slow", sample), 1.0, lambda: now[0])
    stop = Waits(now, len(durations))
    sampler._stop = stop  # type: ignore[assignment]
    sampler._run()
    assert stop.waited == waits


def values(families: Sequence[Family], name: str) -> dict[tuple[str, ...], float]:
    found = [family for family in families if family.name == name]
    return dict(found[0].samples) if found else {}


def test_a_node_without_a_driver_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVMLError_LibraryNotFound()))
    with pytest.raises(CollectorUnavailableError, match=r"no NVIDIA driver here .*GPU metrics are off"):
        NvmlCollector().sample()
    sampler = Sampler(NvmlCollector(), 1)
    for _ in range(3):
        sampler.sample_once()
    assert (sampler.success, sampler.families) == (False, ())
    [record] = caplog.records
    assert "GPU metrics are off" in record.getMessage()
    assert not record.exc_info


def test_the_real_library_answers_or_says_why_not() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(CollectorUnavailableError):
            NvmlCollector().sample()
        return
    try:
        assert len(values(NvmlCollector().sample(), "gpu_info")) == pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
