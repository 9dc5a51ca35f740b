"""GPU metrics: families, counters, fields that drivers changed, newest readings and simulated GPUs."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.collectors.base import CollectorUnavailableError, Family
from torchperfd_daemon.collectors.gpu_readings import (
    FAMILIES,
    GpuCollector,
    GpuReading,
    NewestGpuReadings,
    gpu_model,
    to_families,
)
from torchperfd_daemon.collectors.nvml_counters import (
    ActiveTime,
    FieldValue,
    RateTotal,
    WrappingTotal,
    slowdown_ns,
)
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.simulated import SimulatedGpuCollector


class Fixed(GpuCollector):
    """Reads what a test has given."""

    name = "fixed"

    def __init__(self, proc: Path, readings: list[GpuReading], ranks: list[RankProcess]) -> None:
        super().__init__(lambda: ranks, proc)
        self._readings = readings

    def read(self) -> list[GpuReading]:
        return self._readings


def write_process(proc: Path, pid: int, start: int, ns_pids: str | None) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    line = f"NSpid:\t{ns_pids}\n" if ns_pids else ""
    (folder / "status").write_text(f"Name:\tpython (x) y\nPid:\t{pid}\n{line}Threads:\t9\n")
    (folder / "stat").write_text(f"{pid} (python (x) y) S " + " ".join(["0"] * 18) + f" {start} 0 0\n")


def holding(index: int, **bytes_by_pid: int) -> GpuReading:
    reading = GpuReading(str(index), f"GPU-{index}")
    reading.process_bytes.update({int(pid.removeprefix("p")): size for pid, size in bytes_by_pid.items()})
    return reading


def test_families_have_gpu_labels_first_and_no_unused_family() -> None:
    first, second = GpuReading("0", "GPU-a"), GpuReading("1", "GPU-b")
    first.put("gpu_temperature_celsius", 61, "gpu")
    first.put("gpu_up", 1)
    second.put("gpu_up", 0)
    up, temperature = to_families([first, second])
    assert (up.name, up.kind, up.labels) == ("gpu_up", "gauge", ("gpu", "gpu_uuid"))
    assert up.samples == [(("0", "GPU-a"), 1), (("1", "GPU-b"), 0)]
    assert (temperature.labels, temperature.samples) == (
        ("gpu", "gpu_uuid", "sensor"),
        [(("0", "GPU-a", "gpu"), 61)],
    )


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_number_is_absent_and_zero_is_not(value: float | None) -> None:
    reading = GpuReading("0", "GPU-a")
    reading.put("gpu_power_watts", value)
    assert to_families([reading]) == []
    reading.put("gpu_power_watts", 0)
    assert [family.name for family in to_families([reading])] == ["gpu_power_watts"]


def rank(number: int, pid: int, start: int) -> RankProcess:
    return RankProcess("bert", number, pid, 4026531836, start)


def test_memory_is_summed_over_gpus_and_joined_by_pid_and_start(tmp_path: Path) -> None:
    write_process(tmp_path, 4000, 111, "4000")
    # Two containers, in both of which the rank is process 12.
    write_process(tmp_path, 5000, 222, "5000\t77\t12")
    write_process(tmp_path, 5001, 333, "5001\t12")
    write_process(tmp_path, 6000, 444, None)
    write_process(tmp_path, 7000, 555, "7000")
    readings = [holding(0, p4000=1, p5000=2, p9999=50), holding(1, p4000=10, p5001=3, p6000=4, p7000=5)]
    # The last is another process than the one that has its pid now.
    ranks = [rank(0, 4000, 111), rank(1, 12, 222), rank(2, 12, 333), rank(3, 6000, 444), rank(4, 7000, 1)]
    [memory] = Fixed(tmp_path, readings, ranks).sample()
    assert (memory.name, memory.labels) == ("process_gpu_memory_bytes", ("run", "rank"))
    assert memory.samples == [
        (("bert", "0"), 11),
        (("bert", "1"), 2),
        (("bert", "2"), 3),
        (("bert", "3"), 4),
    ]


def test_ranks_that_hold_nothing_have_no_series(tmp_path: Path) -> None:
    assert Fixed(tmp_path, [holding(0)], [rank(0, 4000, 111)]).sample() == []


def test_a_rate_becomes_its_integral() -> None:
    rate = RateTotal()
    rate.add(10.0, 2.0)
    rate.add(0.0, 100.0)
    rate.add(4.0, 0.5)
    assert rate.total == 22


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=20), st.sampled_from([32, 64]))
def test_a_wrapping_counter_goes_on(start: int, increments: list[int], bits: int) -> None:
    counter = WrappingTotal()
    true = start
    counter.update(true % 2**bits, bits)
    for increment in increments:
        true += increment
        counter.update(true % 2**bits, bits)
    assert counter.total == true - start


def test_what_was_on_at_one_end_counts_half() -> None:
    active = ActiveTime(["hot", "brake"])
    active.update(10.0, frozenset({"hot"}))
    assert active.seconds == {"hot": 0, "brake": 0}
    active.update(12.0, frozenset({"hot", "brake"}))
    assert active.seconds == {"hot": 2, "brake": 1}
    active.update(13.0, frozenset())
    assert active.seconds == {"hot": 2.5, "brake": 1.5}


def test_nothing_is_counted_over_a_pause() -> None:
    active = ActiveTime(["hot"])
    active.update(0.0, frozenset({"hot"}))
    active.pause()
    active.update(100.0, frozenset({"hot"}))
    active.update(101.0, frozenset({"hot", "unnamed"}))
    assert active.seconds == {"hot": 1}


@given(st.lists(st.tuples(st.floats(0.01, 10), st.booleans()), min_size=2, max_size=30))
def test_time_on_never_exceeds_time(looks: list[tuple[float, bool]]) -> None:
    active = ActiveTime(["hot"])
    now, shown = 0.0, [0.0]
    for seconds, on in looks:
        now += seconds
        active.update(now, frozenset({"hot"} if on else ()))
        shown.append(active.seconds["hot"])
    assert shown == sorted(shown)
    assert shown[-1] <= now - looks[0][0] + 1e-9
    if all(on for _, on in looks):
        assert shown[-1] == pytest.approx(now - looks[0][0])


OLD = {number: FieldValue(number, 64) for number in (251, 252, 253)}
NEW = {number: FieldValue(number, 64) for number in (269, 270, 271)}
FLAGS_IN_OLD_PLACE = {number: FieldValue(1, 32) for number in (251, 252, 253)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (OLD, (251, 252, 253)),
        (NEW, (269, 270, 271)),
        (NEW | FLAGS_IN_OLD_PLACE, (269, 270, 271)),
        (OLD | NEW, None),
        (FLAGS_IN_OLD_PLACE, None),
        ({251: OLD[251], 252: OLD[252]}, None),
        ({}, None),
    ],
)
def test_slowdown_is_reported_only_when_unambiguous(
    fields: dict[int, FieldValue], expected: tuple[float, float, float] | None
) -> None:
    assert slowdown_ns(fields) == expected


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


NOT_SIMULATED = {"gpu_mig_info", "gpu_xid_errors", "gpu_xid_last_timestamp_seconds"}


def at(*moments: float) -> list[dict[str, Family]]:
    now = [1000.0]
    collector = SimulatedGpuCollector(clock=lambda: now[0])
    looks = []
    for moment in moments:
        now[0] = 1000.0 + moment
        looks.append({family.name: family for family in collector.sample()})
    return looks


def test_simulated_gpus_are_eight_with_every_healthy_family() -> None:
    [look] = at(10)
    assert set(look) == FAMILIES.keys() - NOT_SIMULATED
    assert {len({labels[1] for labels, _ in family.samples}) for family in look.values()} == {8}


def test_counters_only_grow_and_ratios_are_ratios() -> None:
    looks = at(*range(0, 400, 7))
    for before, after in pairwise(looks):
        for name, family in after.items():
            if family.kind == "counter":
                then = dict(before[name].samples)
                assert all(value >= then[labels] for labels, value in family.samples), name
            if name.endswith("_ratio"):
                assert all(0 <= value <= 1 for _, value in family.samples), name


def test_energy_is_the_integral_of_power() -> None:
    before, middle, after = at(9.5, 10, 10.5)
    joules = dict(after["gpu_energy_joules"].samples)
    for labels, value in before["gpu_energy_joules"].samples:
        joules[labels] -= value
    for labels, watts in middle["gpu_power_watts"].samples:
        assert abs(joules[labels] - watts) < 1


def test_one_gpu_gets_hot_is_throttled_and_recovers() -> None:
    cool, hot, again = at(60, 115, 125)

    def clock(look: dict[str, Family], gpu: str) -> float:
        return next(v for labels, v in look["gpu_clock_hertz"].samples if labels[0] == gpu)

    def throttled(look: dict[str, Family]) -> dict[str, float]:
        return {
            labels[0]: value
            for labels, value in look["gpu_throttle_seconds"].samples
            if labels[2] == "hw_thermal_slowdown" and value
        }

    assert clock(hot, "5") < clock(hot, "4") == clock(cool, "5") == clock(again, "5")
    assert (throttled(cool), throttled(hot), throttled(again)) == ({}, {"5": 25}, {"5": 30})


def test_gpu_model_is_found_by_uuid_without_prefix() -> None:
    whole, part = GpuReading("0", "GPU-a"), GpuReading("0:1", "MIG-b")
    whole.put("gpu_up", 1)
    whole.put("gpu_info", 1, "NVIDIA H200", "580", "0000:01")
    part.put("gpu_info", 1, "NVIDIA H200 MIG 1g.18gb", "580", "0000:01")
    assert gpu_model([whole, part], "a") == "NVIDIA H200"
    assert gpu_model([whole, part], "b") == "NVIDIA H200 MIG 1g.18gb"
    assert gpu_model([whole, part], "") == ""
