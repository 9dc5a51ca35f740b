"""What collectors read about the node, from a fake tree: right values, right units, right absences."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon.host_tree import HostTree

from torchperfd_daemon.collectors import cgroup, procfs
from torchperfd_daemon.collectors.base import CollectorUnavailableError, Family, Sampler
from torchperfd_daemon.collectors.node import (
    CpuCollector,
    DiskCollector,
    MemoryCollector,
    NetworkCollector,
    PressureCollector,
    parse_cpu_ticks,
    parse_diskstats,
    parse_interfaces,
    parse_pressure,
)


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


def values(families: Sequence[Family]) -> dict[str, dict[tuple[str, ...], float]]:
    return {family.name: dict(family.samples) for family in families if family.samples}


def cpu_line(*ticks: int) -> str:
    return f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3 4\nintr 5\n"


def test_cpu_use_is_that_between_two_samples(tree: HostTree) -> None:
    tree.write("proc/stat", cpu_line(100, 0, 50, 800, 50, 0, 0, 0, 40, 0))
    collector = CpuCollector(tree.proc)
    assert values(collector.sample()) == {}, "one sample has no use"
    # 30 ticks at work, 60 idle and 10 waiting for a disk; guests' time is part of user time.
    tree.write("proc/stat", cpu_line(120, 0, 60, 860, 60, 0, 0, 0, 60, 0))
    assert values(collector.sample()) == {"node_cpu_utilization_ratio": {(): 0.3}}
    assert values(collector.sample()) == {}, "no time has passed"


def test_idle_time_that_runs_backwards_is_no_use_beyond_all(tree: HostTree) -> None:
    tree.write("proc/stat", cpu_line(100, 0, 0, 100, 50, 0, 0, 0))
    collector = CpuCollector(tree.proc)
    collector.sample()
    tree.write("proc/stat", cpu_line(110, 0, 0, 100, 48, 0, 0, 0))
    assert values(collector.sample()) == {"node_cpu_utilization_ratio": {(): 1.0}}


def test_memory_is_in_bytes_and_absent_on_an_old_kernel(tree: HostTree) -> None:
    tree.write("proc/meminfo", "MemTotal:   2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nHuge: 0\n")
    assert values(MemoryCollector(tree.proc).sample()) == {
        "node_memory_available_bytes": {(): 1024 * 1024},
        "node_memory_total_bytes": {(): 2048 * 1024},
    }
    tree.write("proc/meminfo", "MemTotal: 2048 kB\n")
    assert values(MemoryCollector(tree.proc).sample()) == {"node_memory_total_bytes": {(): 2048 * 1024}}


def disk_line(name: str, read: int, written: int, busy_ms: int = 7) -> str:
    return f" 259  0 {name} 10 0 {read} 5 20 0 {written} 6 0 {busy_ms} 8 0 0 0 0 1 2\n"


def test_each_byte_of_a_disk_counts_once(tree: HostTree) -> None:
    lines = [
        ("nvme0n1", 100, 10),
        ("nvme0n1p1", 60, 6),
        ("dm-0", 60, 6),
        ("loop0", 9, 9),
        ("cciss/c0d0", 4, 2),
    ]
    tree.write("proc/diskstats", "".join(disk_line(*line) for line in lines))
    assert values(DiskCollector(tree.proc, tree.sys).sample()) == {}
    for name in ("nvme0n1", "cciss!c0d0"):
        (tree.sys / "block" / name / "device").mkdir(parents=True)
    (tree.sys / "block" / "dm-0").mkdir()
    assert values(DiskCollector(tree.proc, tree.sys).sample()) == {
        "node_disk_bytes": {("read",): 104 * 512, ("write",): 12 * 512},
        "node_disk_busy_seconds": {(): 0.014},
    }


def test_each_byte_of_the_network_counts_once(tree: HostTree) -> None:
    lines = ["Inter-|   Receive |  Transmit", " face |bytes packets |bytes packets"]
    for name, received, transmitted in (
        ("lo", 900, 900),
        ("eth0", 50, 7),
        ("eth0.1:2", 30, 3),
        ("cni0", 5, 5),
    ):
        lines.append(f"  {name}: {received} 1 0 0 0 0 0 0 {transmitted} 1 0 0 0 0 0 0")
    tree.write("proc/net/dev", "\n".join(lines) + "\n")
    # As a container sees it: no interface has a device.
    collector = NetworkCollector(tree.proc, tree.sys)
    assert values(collector.sample()) == {"node_network_bytes": {("receive",): 85, ("transmit",): 15}}
    (tree.sys / "class/net/eth0/device").mkdir(parents=True)
    collector = NetworkCollector(tree.proc, tree.sys)
    assert values(collector.sample()) == {"node_network_bytes": {("receive",): 50, ("transmit",): 7}}


def test_pressure_is_in_seconds_and_what_means_nothing_is_absent(tree: HostTree) -> None:
    stall = (
        "some avg10=0.50 avg60=0.10 avg300=0.00 total=12345678\nfull avg10=0.0 avg60=0 avg300=0 total=1000\n"
    )
    tree.write("proc/pressure/cpu", stall)
    tree.write("proc/pressure/memory", stall)
    assert values(PressureCollector(tree.proc).sample()) == {
        "node_pressure_seconds": {
            ("cpu", "some"): 12.345678,
            ("memory", "some"): 12.345678,
            ("memory", "full"): 0.001,
        }
    }


def test_without_pressure_it_is_said_how_to_have_it(tree: HostTree) -> None:
    with pytest.raises(CollectorUnavailableError, match="psi=1"):
        PressureCollector(tree.proc).sample()


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("stat", CpuCollector),
        ("meminfo", MemoryCollector),
        ("diskstats", DiskCollector),
        ("net/dev", NetworkCollector),
        ("pressure/cpu", PressureCollector),
    ],
)
def test_a_damaged_file_fails_its_collector_and_no_other(
    tree: HostTree, path: str, make: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    tree.write(f"proc/{path}", "MemTotal: x kB\n1\n2\n3 x\n")
    sampler = Sampler(make(tree.proc), 1)
    sampler.sample_once()
    assert (sampler.success, list(sampler.families)) == (False, [])
    assert f"collector {sampler.name}" in caplog.text


def test_this_very_node_can_be_read() -> None:
    cpu = CpuCollector()
    assert [family.name for family in cpu.sample()] == ["node_cpu_utilization_ratio"]
    memory = values(MemoryCollector().sample())
    assert 0 < memory["node_memory_available_bytes"][()] <= memory["node_memory_total_bytes"][()]
    for collector in (DiskCollector(), NetworkCollector()):
        for samples in values(collector.sample()).values():
            assert all(value >= 0 for value in samples.values())


PARSERS: list[Callable[[str], object]] = [
    parse_cpu_ticks,
    parse_diskstats,
    parse_interfaces,
    lambda text: list(parse_pressure(text)),
    procfs.parse_stat,
    procfs.parse_cpu_list,
    procfs.parse_table,
    cgroup.parse_membership,
    lambda text: cgroup.parse_membership(text, "cpu"),
    lambda text: cgroup.parse_cfs_quota(text, text),
    cgroup.parse_memory_limit,
    cgroup.parse_cpu_max,
    cgroup.parse_memory_max,
    cgroup.parse_throttled,
]
SHAPED = st.text(alphabet="cpu0123456789-,. :\n()max=totalsomefull/", max_size=120)


@given(text=st.text(max_size=80) | SHAPED)
def test_a_parser_returns_or_says_that_the_file_is_damaged(text: str) -> None:
    for parse in PARSERS:
        try:
            parse(text)
        except ValueError:
            continue


@given(cpus=st.frozensets(st.integers(0, 300)))
def test_cpu_lists_are_read_back(cpus: frozenset[int]) -> None:
    assert procfs.parse_cpu_list(",".join(map(str, sorted(cpus))) + "\n") == cpus


def test_cpu_lists_have_ranges() -> None:
    assert procfs.parse_cpu_list("0-2,7\n") == {0, 1, 2, 7}
    for damaged in ("3-1", "0-99999999999", "-1", "a"):
        with pytest.raises(ValueError, match=r".*"):
            procfs.parse_cpu_list(damaged)


def test_a_collector_that_hangs_shows_nothing_old_and_comes_back() -> None:
    now = [100.0]

    class Hanging:
        name = "slow"

        def sample(self) -> list[Family]:
            seen.append((list(sampler.families), sampler.success, sampler.duration_seconds))
            now[0] += 31
            seen.append((list(sampler.families), sampler.success, sampler.duration_seconds))
            return good

    good = [Family("thing", "A thing.", "gauge", (), [((), 1.0)])]
    seen: list[tuple[list[Family], bool, float]] = []
    sampler = Sampler(Hanging(), 10, lambda: now[0])
    sampler.sample_once()
    sampler.sample_once()
    # In its second sample: at first the one before holds, then it has taken too long.
    assert seen[2:] == [(good, True, 31), ([], False, 31)]
    assert (sampler.families, sampler.success) == (good, True)
