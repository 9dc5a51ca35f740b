"""The collector on the real binding and a fake library: each scenario, a second of its clock apart."""

import os
from pathlib import Path

import pytest
from tests.fakes.nvml import GIB, H100_METRICS, MISSING_IN_OLD_DRIVERS, Values, block, gpu, sample, scenario

pytestmark = pytest.mark.needs("gcc")

FIRST = ("0", "GPU-00000000")
SECOND = ("1", "GPU-00000001")


def only(look: dict[str, Values], gpu: tuple[str, str]) -> dict[str, dict[tuple[str, ...], float]]:
    """Return what a look says about one GPU, by family and the labels beyond the GPU's."""
    kept = {
        name: {labels[2:]: value for labels, value in values.items() if labels[:2] == gpu}
        for name, values in look.items()
    }
    return {name: values for name, values in kept.items() if values}


def test_healthy_gpu_has_every_metric_in_base_units(tmp_path: Path) -> None:
    _, look = sample(tmp_path, scenario(gpu(0)), scenario(gpu(0)))
    assert only(look, FIRST) == {
        **H100_METRICS,
        "gpu_info": {("NVIDIA H100 80GB HBM3", "580.95.05", "00000000:01:00.0"): 1},
        "gpu_power_watts": {(): 650.5},
        "gpu_energy_joules": {(): 12345.678},
        "gpu_throttle_seconds": {
            ("sw_power_cap",): 1.5,
            ("sync_boost",): 0,
            ("sw_thermal_slowdown",): 0.25,
            ("hw_thermal_slowdown",): 0.125,
            ("hw_power_brake_slowdown",): 0,
            ("hw_slowdown",): 0,
            ("applications_clocks_setting",): 0,
            ("display_clock_setting",): 0,
        },
        "gpu_pcie_bytes": {("receive",): 250 * 1024**2, ("transmit",): 100 * 1024**2},
        "gpu_nvlink_bytes": {("receive",): 3000 * 1024, ("transmit",): 1000 * 1024},
        "gpu_ecc_errors": {
            ("corrected", "volatile"): 1,
            ("corrected", "aggregate"): 2,
            ("uncorrected", "volatile"): 3,
            ("uncorrected", "aggregate"): 4,
        },
    }


def test_gpu_with_few_readings_has_few_series(tmp_path: Path) -> None:
    silent = block("gpu", {"uuid": "GPU-00000000", "name": "Tesla", "temperature_celsius": 40})
    _, look = sample(tmp_path, scenario(silent), scenario(silent))
    assert only(look, FIRST) == {
        "gpu_up": {(): 1},
        "gpu_info": {("Tesla", "580.95.05", ""): 1},
        "gpu_temperature_celsius": {("gpu",): 40},
    }


# One fact at a time, and the families, or series of one, that go with it.
@pytest.mark.parametrize("error", ["!3", "!4", "!999"])
@pytest.mark.parametrize(
    ("fact", "missing"),
    [
        ("utilization_percent", {("gpu_utilization_ratio",)}),
        ("memory_total_bytes", {("gpu_memory_used_bytes",), ("gpu_memory_total_bytes",)}),
        ("power_mw", {("gpu_power_watts",)}),
        ("energy_mj", {("gpu_energy_joules",)}),
        ("temperature_celsius", {("gpu_temperature_celsius", "gpu")}),
        ("sm_mhz", {("gpu_clock_hertz", "sm")}),
        ("ecc_corrected_volatile", {("gpu_ecc_errors", "corrected", "volatile")}),
        ("remapped", {("gpu_row_remap_pending",), ("gpu_row_remap_failure",)}),
        ("field.82", {("gpu_temperature_celsius", "memory")}),
        ("gpm.2", {("gpu_sm_active_ratio",)}),
        ("gpm.20", {("gpu_pcie_bytes", "transmit")}),
        ("name", set()),
        ("processes", set()),
        ("event_types", set()),
    ],
)
def test_each_fact_is_read_on_its_own(
    tmp_path: Path, fact: str, missing: set[tuple[str, ...]], error: str
) -> None:
    def series(look: dict[str, Values]) -> set[tuple[str, ...]]:
        found = {
            (name, *labels)
            for name, values in only(look, FIRST).items()
            for labels in values
            if name != "gpu_info"
        }
        return found | {("gpu_info",)} if "gpu_info" in look else found

    broken = scenario(gpu(0, **{fact: error}))
    _, whole = sample(tmp_path, scenario(gpu(0)), scenario(gpu(0)))
    _, look = sample(tmp_path, broken, broken)
    assert series(whole) - series(look) == missing
    assert series(look) <= series(whole)


def test_an_old_driver_lacks_symbols_and_the_old_ones_do(tmp_path: Path) -> None:
    own = gpu(0, f"process {os.getpid()} 4096", **{f"field.{n}": None for n in (74, 76, 251, 252, 253)})
    text = scenario(own, driver="470.82.01")
    _, look = sample(tmp_path, text, text, without=MISSING_IN_OLD_DRIVERS)
    found = only(look, FIRST)
    assert found["gpu_info"] == {("NVIDIA H100 80GB HBM3", "470.82.01", "00000000:01:00.0"): 1}
    # The first version of the call counts what the driver reserves as used.
    assert found["gpu_memory_used_bytes"] == {(): 60.5 * GIB}
    assert found["gpu_temperature_celsius"] == {("gpu",): 61, ("memory",): 72}
    assert found["gpu_throttle_seconds"][("hw_thermal_slowdown",)] == 0
    assert look["process_gpu_memory_bytes"] == {("test", "0"): 4096}
    assert not {name for name in found if name.endswith("_active_ratio") or "occupancy" in name}
    assert "gpu_pcie_bytes" not in found


def test_pcie_without_gpm_continues_the_counter_past_32_bits(tmp_path: Path) -> None:
    def at(transmit: int, receive: int) -> str:
        facts = {"field.197": f"u32:{transmit}", "field.198": f"u32:{receive}"}
        return scenario(gpu(0, gpm=0, **facts))

    looks = sample(tmp_path, at(2**32 - 100, 0), at(50, 7), at(60, 8))
    assert [look["gpu_pcie_bytes"] for look in looks] == [
        {(*FIRST, "transmit"): 0, (*FIRST, "receive"): 0},
        {(*FIRST, "transmit"): 150, (*FIRST, "receive"): 7},
        {(*FIRST, "transmit"): 160, (*FIRST, "receive"): 8},
    ]
    assert "gpu_sm_active_ratio" not in looks[-1]


def test_gpm_without_values_falls_back_to_the_counter(tmp_path: Path) -> None:
    def at(transmit: int, mode: int) -> str:
        return scenario(gpu(0, mig_mode=mode, **{"field.197": f"u32:{transmit}"}))

    looks = sample(tmp_path, *(at(count, 1) for count in (1, 2, 3, 5, 8)))
    assert [look.get("gpu_pcie_bytes", {}).get((*FIRST, "transmit")) for look in looks] == [
        None,
        None,
        0,
        2,
        5,
    ]
    # Once it has given something, what it fails to give is absent: the two do not add up.
    looks = sample(tmp_path, *(at(1, mode) for mode in (0, 0, 1, 1, 1, 1, 1)))
    assert ["gpu_pcie_bytes" in look for look in looks] == [False, True] + [False] * 5


@pytest.mark.parametrize(("links", "expected"), [(18, 2 * 1000 * 1024**2), (0, None)])
def test_nvlink_without_a_counter_integrates_its_rate(
    tmp_path: Path, links: int, expected: int | None
) -> None:
    """Only where there are links."""
    facts = {"field.138.all": None, "field.139.all": None, "field.91": f"u32:{links}"}
    text = scenario(gpu(0, **facts))
    look = sample(tmp_path, text, text, text)[-1]
    assert look.get("gpu_nvlink_bytes", {}).get((*FIRST, "receive")) == expected


def test_throttling_without_counters_sums_the_time_of_its_bits(tmp_path: Path) -> None:
    def at(bits: int) -> str:
        facts = {f"field.{number}": None for number in (74, 76, 251, 252, 253)}
        return scenario(gpu(0, reasons=bits, reasons_supported=0xEC, **facts))

    # Idle, then hot for three looks (0x48: a hardware slowdown, thermal), then at the power cap.
    looks = sample(tmp_path, at(0x1), at(0x48), at(0x48), at(0x48), at(0x4))
    assert only(looks[0], FIRST)["gpu_throttle_seconds"] == {
        (reason,): 0
        for reason in (
            "sw_power_cap",
            "hw_slowdown",
            "sw_thermal_slowdown",
            "hw_thermal_slowdown",
            "hw_power_brake_slowdown",
        )
    }
    found = only(looks[-1], FIRST)["gpu_throttle_seconds"]
    assert found[("hw_thermal_slowdown",)] == found[("hw_slowdown",)] == 0.5 + 1 + 1 + 0.5
    assert found[("sw_power_cap",)] == 0.5
    assert found[("hw_power_brake_slowdown",)] == 0


def test_throttle_counters_follow_the_driver(tmp_path: Path) -> None:
    later = {"field.252": "ull:5125000000", "reasons": 0x48}
    looks = sample(tmp_path, scenario(gpu(0)), scenario(gpu(0, **later)), scenario(gpu(0, **later)))
    seconds = [only(look, FIRST)["gpu_throttle_seconds"] for look in looks]
    assert [each[("hw_thermal_slowdown",)] for each in seconds] == [0.125, 5.125, 5.125]
    # No counter for this one, so it is watched.
    assert [each[("hw_slowdown",)] for each in seconds] == [0, 0.5, 1.5]


def test_xids_are_counted_with_the_time_of_the_last(tmp_path: Path) -> None:
    looks = sample(
        tmp_path,
        scenario(gpu(0), gpu(1)),
        scenario(gpu(0, "xid 13", "xid 13", "xid 48"), gpu(1)),
        scenario(gpu(0, "xid 13", "xid 13", "xid 48", "xid 13"), gpu(1)),
    )
    assert "gpu_xid_errors" not in looks[0]
    assert looks[1]["gpu_xid_errors"] == {(*FIRST, "13"): 2, (*FIRST, "48"): 1}
    assert looks[2]["gpu_xid_errors"] == {(*FIRST, "13"): 3, (*FIRST, "48"): 1}
    assert looks[2]["gpu_xid_last_timestamp_seconds"] == {
        (*FIRST, "13"): 1_700_000_002,
        (*FIRST, "48"): 1_700_000_001,
    }


def test_a_lost_gpu_costs_its_own_series_and_comes_back(tmp_path: Path) -> None:
    facts = {"field.252": None}
    healthy = scenario(gpu(0), gpu(1, reasons=0x48, **facts))
    lost = scenario(gpu(0), gpu(1, "xid 79", "lost 1"))
    back = scenario(gpu(0), gpu(1, "xid 79", reasons=0x48, **facts))
    looks = sample(tmp_path, healthy, healthy, lost, lost, lost, back, back)
    xid = {
        "gpu_xid_errors": {("79",): 1},
        "gpu_xid_last_timestamp_seconds": {("79",): 1_700_000_002},
    }
    for look in looks[2:5]:
        assert only(look, SECOND) == {"gpu_up": {(): 0}, **xid}
    first = [only(look, FIRST) for look in looks[1:]]
    steady = [{name: values for name, values in look.items() if name != "gpu_pcie_bytes"} for look in first]
    assert all(look == steady[0] for look in steady)
    assert only(looks[5], SECOND)["gpu_up"] == {(): 1}
    assert only(looks[5], SECOND).keys() - xid.keys() == only(looks[0], SECOND).keys() | {
        "gpu_pcie_bytes",
        "gpu_sm_active_ratio",
        "gpu_sm_occupancy_ratio",
        "gpu_tensor_active_ratio",
        "gpu_dram_active_ratio",
    }
    # Nobody knows what held its clocks down while it was lost: only what was seen counts.
    hot = [only(look, SECOND)["gpu_throttle_seconds"][("hw_thermal_slowdown",)] for look in looks[5:]]
    assert hot == [1, 2]


def test_a_lost_gpu_does_not_silence_the_errors_of_the_others(tmp_path: Path) -> None:
    lost = gpu(1, "xid 79", "lost 1")
    looks = sample(
        tmp_path,
        scenario(gpu(0), gpu(1)),
        scenario(gpu(0), lost),
        scenario(gpu(0, "xid 48"), lost),
        scenario(gpu(0, "xid 48"), gpu(1, "xid 79", "xid 94")),
    )
    assert looks[1]["gpu_xid_errors"] == {(*SECOND, "79"): 1}
    assert looks[2]["gpu_xid_errors"] == {(*FIRST, "48"): 1, (*SECOND, "79"): 1}
    assert looks[3]["gpu_xid_errors"] == {(*FIRST, "48"): 1, (*SECOND, "79"): 1, (*SECOND, "94"): 1}


def test_errors_of_memory_are_asked_for_every_ten_seconds(tmp_path: Path) -> None:
    worse = scenario(gpu(0, ecc_uncorrected_volatile=7, remapped="1 2 1 0"))
    looks = sample(tmp_path, scenario(gpu(0)), *[worse] * 10)
    uncorrected = [look["gpu_ecc_errors"][*FIRST, "uncorrected", "volatile"] for look in looks]
    assert uncorrected == [3] * 10 + [7]
    assert [look["gpu_row_remap_pending"][FIRST] for look in looks] == [0] * 10 + [1]


def test_missing_fields_are_asked_for_every_ten_seconds(tmp_path: Path) -> None:
    without = scenario(gpu(0, **{"field.82": None}))
    looks = sample(tmp_path, without, without, *[scenario(gpu(0))] * 10)
    found = [(*FIRST, "memory") in look["gpu_temperature_celsius"] for look in looks]
    assert found == [False] * 11 + [True]


def test_a_gpu_that_is_lost_from_the_start_is_seen_to_be(tmp_path: Path) -> None:
    [look, later] = sample(tmp_path, scenario(gpu(0), gpu(1, handle="!15")), scenario(gpu(0), gpu(1)))
    assert look["gpu_up"] == {FIRST: 1, ("1", ""): 0}
    assert later["gpu_up"] == {FIRST: 1, SECOND: 1}


def test_a_gpu_that_is_kept_from_us_is_not_reported(tmp_path: Path) -> None:
    [look] = sample(tmp_path, scenario(gpu(0), gpu(1, handle="!4")))
    assert look["gpu_up"] == {FIRST: 1}


def test_a_gpu_of_which_nothing_can_be_read_is_down(tmp_path: Path) -> None:
    mute = block("gpu", {"uuid": "GPU-00000001", "name": "H100"})
    [look] = sample(tmp_path, scenario(gpu(0), mute))
    assert look["gpu_up"] == {FIRST: 1, SECOND: 0}
    assert only(look, SECOND).keys() == {"gpu_up"}


def test_the_instances_of_a_gpu_are_read_with_it(tmp_path: Path) -> None:
    def instance(index: int, own: int, sm: float) -> str:
        facts = {
            "uuid": f"MIG-{index}",
            "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
            "gpu_instance": own,
            "memory_total_bytes": 40 * GIB,
            "memory_used_bytes": (index + 1) * GIB,
            "gpm.2": sm,
        }
        return block(f"mig {index}", facts)

    whole = gpu(0, mig_mode=1, utilization_percent=None)
    both = scenario(whole, instance(0, 1, 25), instance(1, 2, 75), gpu(1))
    one = scenario(whole, instance(1, 2, 50), gpu(1))
    _, look, later, again = sample(tmp_path, both, both, one, both)
    first, second = ("0:0", "MIG-0"), ("0:1", "MIG-1")
    assert only(look, second) == {
        "gpu_info": {("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "580.95.05", "00000000:01:00.0"): 1},
        "gpu_mig_info": {FIRST: 1},
        "gpu_memory_used_bytes": {(): 2 * GIB},
        "gpu_memory_total_bytes": {(): 40 * GIB},
        "gpu_sm_active_ratio": {(): 0.75},
    }
    assert look["gpu_sm_active_ratio"] == {first: 0.25, second: 0.75, SECOND: 0.875}
    assert "gpu_utilization_ratio" not in only(look, FIRST)
    assert later["gpu_mig_info"] == {(*second, *FIRST): 1}
    assert later["gpu_sm_active_ratio"] == {second: 0.5, SECOND: 0.875}
    # The first has been made anew: there is no sample of it to compare with yet.
    assert again["gpu_sm_active_ratio"] == {second: 0.75, SECOND: 0.875}


def test_processes_are_summed_over_instances(tmp_path: Path) -> None:
    own = os.getpid()
    text = scenario(gpu(0, f"process {own} 1000 1", f"process {own} 200 2"), gpu(1, f"process {own} 30"))
    [look] = sample(tmp_path, text)
    assert look["process_gpu_memory_bytes"] == {("test", "0"): 1230}


def test_process_with_unknown_memory_is_absent(tmp_path: Path) -> None:
    [look] = sample(tmp_path, scenario(gpu(0, f"process {os.getpid()} {2**64 - 1}")))
    assert "process_gpu_memory_bytes" not in look


def test_a_driver_that_goes_and_comes_back(tmp_path: Path) -> None:
    away = "driver_error 9\n"
    looks = sample(tmp_path, away, scenario(gpu(0)), away, away, scenario(gpu(0), driver="590.1"))
    assert [next(iter(looks[number])).partition(":")[0] for number in (0, 2, 3)] == ["unavailable"] * 3
    assert "GPU metrics are off" in next(iter(looks[0]))
    assert "the NVIDIA driver was unloaded" in next(iter(looks[2]))
    assert looks[1]["gpu_up"] == looks[4]["gpu_up"] == {FIRST: 1}
    assert {labels[3] for labels in looks[4]["gpu_info"]} == {"590.1"}
