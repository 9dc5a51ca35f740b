"""Readings of GPUs: their families, and the ranks whose processes are in them."""

from pathlib import Path

import pytest

from torchperfd_daemon.collectors.gpu_readings import GpuCollector, GpuReading, to_families
from torchperfd_daemon.collectors.process import RankProcess


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
