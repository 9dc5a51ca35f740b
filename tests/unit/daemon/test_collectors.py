"""Collectors and their samplers: a failure costs the collector concerned, and only that."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from torchperfd_daemon.collectors.base import CollectorUnavailableError, Family, Sampler
from torchperfd_daemon.collectors.host import HostCollector
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
        # Once it is late there is no burst to catch up: the grid begins anew.
        ([3.5, 0.25, 0.25], [0.0, 0.75, 0.75]),
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


def write_pressure(proc: Path, resource: str, some: int, full: int | None) -> None:
    (proc / "pressure").mkdir(exist_ok=True)
    lines = [f"some avg10=0.50 avg60=0.10 avg300=0.00 total={some}"]
    if full is not None:
        lines.append(f"full avg10=0.00 avg60=0.00 avg300=0.00 total={full}")
    (proc / "pressure" / resource).write_text("\n".join(lines) + "\n")


def test_pressure_is_read_in_seconds(tmp_path: Path) -> None:
    write_pressure(tmp_path, "cpu", 12_345_678, None)
    write_pressure(tmp_path, "memory", 2_000_000, 1_000_000)
    families = HostCollector(tmp_path).sample()
    assert values(families, "node_pressure_seconds") == {
        ("cpu", "some"): 12.345678,
        ("memory", "some"): 2.0,
        ("memory", "full"): 1.0,
    }


def test_without_pressure_there_is_no_such_family(tmp_path: Path) -> None:
    families = HostCollector(tmp_path).sample()
    assert "node_pressure_seconds" not in {family.name for family in families}
    assert families


def test_the_node_is_told_in_base_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 25.0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3, total=4))
    monkeypatch.setattr(psutil, "net_io_counters", lambda: SimpleNamespace(bytes_recv=5, bytes_sent=6))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=7, write_bytes=8))
    families = HostCollector(tmp_path).sample()
    assert {family.name: dict(family.samples) for family in families} == {
        "node_cpu_utilization_ratio": {(): 0.25},
        "node_memory_available_bytes": {(): 3},
        "node_memory_total_bytes": {(): 4},
        "node_network_bytes": {("receive",): 5, ("transmit",): 6},
        "node_disk_bytes": {("read",): 7, ("write",): 8},
    }


def test_a_node_without_disks_or_network_has_no_such_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    names = {family.name for family in HostCollector(tmp_path).sample()}
    assert names == {
        "node_cpu_utilization_ratio",
        "node_memory_available_bytes",
        "node_memory_total_bytes",
    }


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


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace NVML by a node with two GPUs; the second knows neither its energy nor its temperature."""
    calls: dict[str, Any] = {"init": 0}

    def init() -> None:
        calls["init"] += 1

    def unless_second(error: type[Exception], value: int) -> Callable[..., int]:
        def read(gpu: int, *_: int) -> int:
            if gpu == 1:
                raise error()
            return value

        return read

    for name, function in {
        "nvmlInit": init,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}{gpu}",
        "nvmlDeviceGetName": lambda gpu: "H200",
        "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"0000:0{gpu}:00.0"),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=50 + gpu),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=1000 + gpu, total=2000),
        "nvmlDeviceGetPowerUsage": lambda gpu: 0 if gpu else 350_500,
        "nvmlDeviceGetTotalEnergyConsumption": unless_second(pynvml.NVMLError_NotSupported, 12_500),
        "nvmlDeviceGetTemperature": unless_second(pynvml.NVMLError_NoPermission, 61),
    }.items():
        monkeypatch.setattr(pynvml, name, function)
    return calls


def test_two_gpus_in_base_units_and_what_one_cannot_tell_is_absent(two_gpus: dict[str, Any]) -> None:
    collector = NvmlCollector()
    families = collector.sample()
    first, second = ("0", "GPU-00"), ("1", "GPU-11")
    assert {family.name: dict(family.samples) for family in families} == {
        "gpu_info": {
            (*first, "H200", "580.1", "0000:00:00.0"): 1,
            (*second, "H200", "580.1", "0000:01:00.0"): 1,
        },
        "gpu_utilization_ratio": {first: 0.5, second: 0.51},
        "gpu_memory_used_bytes": {first: 1000, second: 1001},
        "gpu_memory_total_bytes": {first: 2000, second: 2000},
        "gpu_power_watts": {first: 350.5, second: 0},
        "gpu_energy_joules": {first: 12.5},
        "gpu_temperature_celsius": {(*first, "gpu"): 61},
    }
    assert collector.sample() == families
    assert two_gpus["init"] == 1


def test_a_gpu_that_has_fallen_off_the_bus_is_a_failure_not_an_absence(
    two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", raising_any(pynvml.NVMLError_GpuIsLost()))
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        NvmlCollector().sample()


def raising_any(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call
