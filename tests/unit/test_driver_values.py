"""The comparison of the daemon's GPU values with those of nvidia-smi, on real output of an H200."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu_proof import nvidia_smi
from benchmarks.gpu_proof.checks import driver_values
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.nvidia_smi import PCIE_RATE, PROCESS_MEMORY, Key, Values
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.value_comparison import (
    IDLE,
    LIMITS,
    MATMUL,
    MEAN_POWER,
    State,
    compare,
    shown,
)

from torchperfd.hooks.accelerator import peak_flops
from torchperfd_daemon.collectors.gpu_readings import GpuReading

PRINTED = (Path(__file__).parents[1] / "golden" / "nvidia_smi_h200.xml").read_text(encoding="utf-8")
UUID = "GPU-00000000-1111-2222-3333-444444444444"
INFO = ("NVIDIA H200", "580.159.04", "00000000:00:06.0")
# What the daemon exported when nvidia-smi printed that.
OURS: Values = {
    ("gpu_memory_used_bytes", ()): 0,
    ("gpu_memory_total_bytes", ()): 150754820096,
    ("gpu_power_watts", ()): 79.356,
    ("gpu_energy_joules", ()): 2752.7,
    ("gpu_temperature_celsius", ("gpu",)): 35,
    ("gpu_temperature_celsius", ("memory",)): 34,
    ("gpu_clock_hertz", ("graphics",)): 345e6,
    ("gpu_clock_hertz", ("sm",)): 345e6,
    ("gpu_clock_hertz", ("memory",)): 3201e6,
    ("gpu_clock_hertz", ("video",)): 765e6,
    ("gpu_ecc_errors", ("uncorrected", "aggregate")): 2,
}
POWER: Key = ("gpu_power_watts", ())
SM_CLOCK: Key = ("gpu_clock_hertz", ("sm",))


def printed_with(before: str, after: str) -> Values:
    assert before in PRINTED
    return nvidia_smi.parse(PRINTED.replace(before, after), UUID).values


def state(ours: Values, printed: Values, name: str = IDLE, after: Values | None = None) -> State:
    return State(name, ours, ours if after is None else after, printed)


def bound_of(outcome: Outcome, family: str) -> Bound:
    (bound,) = [bound for bound in outcome.bounds if bound.text.startswith(f"{family} ")]
    return bound


def row_of(outcome: Outcome, name: str) -> list[str]:
    (row,) = [row for row in outcome.rows if row[0] == name]
    return row


def test_parse_real_output_equals_the_daemons_values() -> None:
    printed = nvidia_smi.parse(PRINTED, UUID)
    assert printed.info == INFO
    assert {key: printed.values[key] for key in OURS if key in printed.values} == pytest.approx(
        {key: value for key, value in OURS.items() if key[0] != "gpu_energy_joules"}, rel=1e-4
    )
    others: Values = {
        ("gpu_utilization_ratio", ()): 0,
        ("gpu_row_remap_pending", ()): 0,
        ("gpu_row_remap_failure", ()): 0,
        ("gpu_ecc_errors", ("corrected", "volatile")): 0,
        ("gpu_ecc_errors", ("corrected", "aggregate")): 0,
        ("gpu_ecc_errors", ("uncorrected", "volatile")): 0,
        (PCIE_RATE, ("transmit",)): 1677e3,
        (PCIE_RATE, ("receive",)): 561e3,
        (PROCESS_MEMORY, ()): 0,
    }
    throttled = {key: value for key, value in printed.values.items() if key[0] == "gpu_throttle_seconds"}
    assert len(throttled) == 5
    assert set(throttled.values()) == {0}
    assert printed.values == throttled | others | {
        key: printed.values[key] for key in OURS if key in printed.values
    }


def test_parse_unknown_uuid_raises() -> None:
    with pytest.raises(LookupError, match="GPU-1"):
        nvidia_smi.parse(PRINTED, "GPU-1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("79.36 W", 79.36), ("345 MHz", 345e6), ("1 MiB", 2**20), ("-8 C", -8), ("50 %", 0.5), ("7", 7)),
        *(("2500000 us", 2.5), ("Yes", 1), ("No", 0)),
        *(("N/A", None), ("Active", None), ("3072 bank(s)", None), ("", None), (None, None)),
    ],
)
def test_number_is_in_base_units(text: str | None, value: float | None) -> None:
    assert nvidia_smi.number(text) == (None if value is None else pytest.approx(value))


def test_parse_power_has_the_names_of_older_drivers() -> None:
    average = "<average_power_draw>79.36 W</average_power_draw>"
    missing = average.replace("79.36 W", "N/A")
    assert printed_with(average, missing)[POWER] == 79.56
    assert printed_with(average, f"{missing}<power_draw>80.00 W</power_draw>")[POWER] == 80
    document = PRINTED.replace("gpu_power_readings>", "power_readings>").replace("average_power", "power")
    assert nvidia_smi.parse(document, UUID).values[POWER] == 79.36


def test_parse_sums_memory_of_computing_processes() -> None:
    processes = "".join(
        f"<process_info><type>{kind}</type><used_memory>{size}</used_memory></process_info>"
        for kind, size in (("C", "100 MiB"), ("C+G", "20 MiB"), ("G", "3 MiB"), ("C", "N/A"))
    )
    values = printed_with("<processes>", f"<processes>{processes}")
    assert values[PROCESS_MEMORY, ()] == 120 * 2**20


def test_compare_real_values_agree() -> None:
    outcome = compare([state(OURS, nvidia_smi.parse(PRINTED, UUID).values)])
    judged = {bound.text.split()[0]: bound.held for bound in outcome.bounds}
    assert judged == {family: True if any(key[0] == family for key in OURS) else None for family in LIMITS}
    assert row_of(outcome, "gpu_clock_hertz sm") == ["gpu_clock_hertz sm", "345 MHz", "345 MHz", "agrees"]
    assert row_of(outcome, "gpu_energy_joules")[1:] == ["2752.7 J", "-", "only torchperfd"]
    assert row_of(outcome, f"{PCIE_RATE} transmit")[1:] == ["-", "1.68 MB/s", "only nvidia-smi"]
    assert bound_of(outcome, "gpu_power_watts").text == (
        "gpu_power_watts within 15 % of nvidia-smi's: farthest 79.4 W beside 79.4 W (idle)"
    )


@pytest.mark.parametrize(
    ("key", "near", "far"),
    [
        (POWER, 88.0, 95.0),
        (("gpu_temperature_celsius", ("memory",)), 36, 37),
        (SM_CLOCK, 330e6, 320e6),
        (("gpu_memory_used_bytes", ()), 2**20, 3 * 2**20),
        (("gpu_memory_total_bytes", ()), 150e9, 140e9),
        (("gpu_ecc_errors", ("uncorrected", "aggregate")), 2, 1),
        (("gpu_row_remap_pending", ()), 0, 1),
        (("gpu_throttle_seconds", ("sw_power_cap",)), 0.05, 0.2),
    ],
)
def test_compare_value_beyond_its_limit_differs(key: Key, near: float, far: float) -> None:
    printed = nvidia_smi.parse(PRINTED, UUID).values
    for value, verdict in ((near, "agrees"), (far, "differs")):
        outcome = compare([state(OURS | {key: value}, printed)])
        assert row_of(outcome, " ".join((key[0], *key[1])))[-1] == verdict
        assert bound_of(outcome, key[0]).held is (verdict == "agrees")


def test_compare_moving_value_agrees_within_its_range() -> None:
    printed: Values = {SM_CLOCK: 1500e6}
    outcome = compare([state(OURS, {}), state({SM_CLOCK: 1200e6}, printed, MATMUL, after={SM_CLOCK: 1700e6})])
    cells = ["345 MHz", "-", "1200 MHz to 1700 MHz", "1500 MHz", "agrees"]
    assert row_of(outcome, "gpu_clock_hertz sm")[1:] == cells
    assert len(outcome.columns) == 1 + len(cells)


def test_compare_rates_of_pcie_are_not_judged() -> None:
    key: Key = (PCIE_RATE, ("transmit",))
    outcome = compare([state({key: 9e9}, {key: 1e3})])
    assert outcome.rows == [["pcie_bytes_per_second transmit", "9000.00 MB/s", "0.00 MB/s", "not judged"]]


def test_shown_has_the_unit_of_the_family() -> None:
    assert shown("gpu_tensor_active_ratio", 0.873) == "87.3 %"
    assert shown("gpu_temperature_celsius", 35) == "35 °C"
    assert shown("gpu_ecc_errors", 2) == "2"


def test_peak_is_that_of_the_data_sheet_at_its_clock() -> None:
    sheet = peak_flops("NVIDIA H200", "bf16")
    assert driver_values.bf16_peak((9, 0), 132, 1830e6) == pytest.approx(sheet, rel=1e-3)
    assert driver_values.bf16_peak((7, 5), 40, 1590e6) is None


def test_achieved_flops_counts_batches_in_the_window() -> None:
    ended = [1.0, 2.0, 2.5, 3.0, 3.5, 9.0]
    assert driver_values.achieved_flops(ended, 1.5, 4.0) == 20 * 2 * 8192**3 / 0.5
    assert driver_values.achieved_flops(ended, 3.9, 9.5) is None


@pytest.mark.parametrize(("active", "held"), [(0.8, True), (0.9, True), (0.95, False), (None, None)])
def test_tensor_bound_is_relative_to_achieved_share(active: float | None, held: bool | None) -> None:
    bound = driver_values.tensor_bound(active, 640e12, 800e12)
    assert bound.held is held
    if active is not None:
        assert bound.text.endswith(f"{100 * active:.1f} % beside 640 of 800 TFLOP/s, 80.0 %")


def test_activity_bounds_fail_on_busy_idle_and_idle_load() -> None:
    utilization: Key = ("gpu_utilization_ratio", ())
    quiet: Values = {("gpu_sm_active_ratio", ()): 0.0, ("gpu_dram_active_ratio", ()): 0.01}
    busy: Values = {("gpu_sm_active_ratio", ()): 0.97, utilization: 1.0}
    assert [
        [bound.held for bound in driver_values.activity_bounds(idle, loaded)]
        for idle, loaded in (
            (state(quiet, {}), state(busy, {utilization: 0.95})),
            (state(busy, {}), state(quiet | {utilization: 1.0}, {utilization: 0.8})),
            (state({}, {}), state({}, {utilization: 1.0})),
        )
    ] == [[True, True, True], [False, False, False], [None, None, None]]


def test_run_in_rehearsal_shows_nothing_of_a_gpu() -> None:
    outcome = driver_values.run(Machine(is_rehearsal=True))
    assert (outcome.columns, outcome.rows, outcome.bounds, len(outcome.notes)) == ([], [], [], 1)


class ScriptedCollector:
    """Returns readings as of a GPU under constant power, whose counters rise with the readings."""

    def __init__(self) -> None:
        self.count = 0

    def read(self) -> list[GpuReading]:
        self.count += 1
        reading = GpuReading("0", UUID, dict(OURS))
        reading.put("gpu_info", 1, *INFO)
        reading.put("gpu_energy_joules", self.count * 10.0)
        reading.put("gpu_pcie_bytes", self.count * 1e6, "transmit")
        reading.put("gpu_tensor_active_ratio", 0.001 if self.count < 5 else 0.8)
        return [reading, GpuReading("0:0", "MIG")]


def test_run_with_readings_measures_both_states(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def load() -> Iterator[list[float]]:
        yield []

    monkeypatch.setattr(driver_values, "NvmlCollector", ScriptedCollector)
    monkeypatch.setattr(driver_values, "matmul_load", load)
    monkeypatch.setattr(driver_values, "achieved_flops", lambda *_: 0.82 * 4096 * 132 * 1500e6)
    monkeypatch.setattr(driver_values, "_sm_clock_hertz", lambda _uuid: 1500e6)
    monkeypatch.setattr(driver_values, "_SETTLE_S", 0)
    monkeypatch.setattr(driver_values, "_WINDOW_S", 0.1)
    monkeypatch.setattr(nvidia_smi, "query", lambda: PRINTED)
    h200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: h200)
    outcome = driver_values.run(Machine(is_rehearsal=False))

    assert {len(row) for row in outcome.rows} == {len(outcome.columns)}
    assert not any(row[0].startswith("gpu_info") for row in outcome.rows)
    idle_tensor, loaded_tensor = row_of(outcome, "gpu_tensor_active_ratio")[1:4:2]
    assert (idle_tensor, loaded_tensor) == ("0.1 %", "80.0 %")
    assert row_of(outcome, f"{PCIE_RATE} transmit")[-1] == "not judged"
    assert bound_of(outcome, "tensor").held
    assert bound_of(outcome, "model,").held
    mean_power = row_of(outcome, MEAN_POWER)
    assert mean_power[2] == mean_power[4] == "79.4 W"
    assert 0 < float(mean_power[1].removesuffix(" W")) <= 100
