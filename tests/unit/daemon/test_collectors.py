"""Collectors and their samplers: a failure costs the collector concerned, and only that."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pynvml
import pytest

from torchperfd_daemon.collectors.base import (
    CollectorUnavailableError,
    Family,
    NothingToCollectError,
    Sampler,
)
from torchperfd_daemon.collectors.nvml import NvmlCollector
from torchperfd_daemon.metrics.page import collector_metrics

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


def test_failing_collector_shows_nothing_old_and_logs_once(
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
    assert not sampler.has_nothing


def test_sampler_without_anything_to_collect_has_no_series(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted("absent", raising(NothingToCollectError("no such thing")))
    sampler = Sampler(scripted, 1)
    caplog.set_level(logging.INFO)
    sampler.sample_once()
    [record] = caplog.records
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    about = list(collector_metrics([sampler]))
    assert [family.samples for family in about] == [[], [], []]
    scripted.sample = lambda: gauge(1)
    sampler.sample_once()
    (success,) = (each for each in collector_metrics([sampler]) if each.name == "collector_success")
    assert success.samples == [(("absent",), 1.0)]


def values(families: Sequence[Family], name: str) -> dict[tuple[str, ...], float]:
    found = [family for family in families if family.name == name]
    return dict(found[0].samples) if found else {}


def test_node_without_a_driver_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVMLError_LibraryNotFound()))
    with pytest.raises(NothingToCollectError, match=r"no NVIDIA driver here .*GPU metrics are off"):
        NvmlCollector().sample()
    sampler = Sampler(NvmlCollector(), 1)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        sampler.sample_once()
    assert (sampler.success, sampler.families, sampler.has_nothing) == (False, (), True)
    [record] = caplog.records
    assert "GPU metrics are off" in record.getMessage()
    assert not record.exc_info


@pytest.mark.parametrize(
    "error", [pynvml.NVMLError_LibRmVersionMismatch, pynvml.NVMLError_Unknown, pynvml.NVMLError_NoPermission]
)
def test_driver_that_cannot_be_used_is_a_failure(
    error: type[pynvml.NVMLError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(error()))
    sampler = Sampler(NvmlCollector(), 1)
    sampler.sample_once()
    assert (sampler.success, sampler.has_nothing) == (False, False)


def test_loaded_driver_without_its_library_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVMLError_LibraryNotFound()))
    version = tmp_path / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n")
    with pytest.raises(CollectorUnavailableError, match="is loaded, but NVML cannot be used") as failed:
        NvmlCollector(proc=tmp_path).sample()
    assert not isinstance(failed.value, NothingToCollectError)


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
