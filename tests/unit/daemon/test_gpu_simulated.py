"""The simulated GPUs: the same families as real ones, counters that only grow, and one that gets hot."""

from itertools import pairwise

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import FAMILIES
from torchperfd_daemon.simulated import SimulatedGpuCollector

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
