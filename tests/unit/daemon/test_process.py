"""Processes of ranks: their metrics, their state, and the files in memory that they share."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.daemon.host_tree import HostTree
from tests.unit.daemon.processes import HERE, process, start_ticks

from torchperfd.v1 import contract
from torchperfd_daemon.collectors import process_usage, procfs
from torchperfd_daemon.collectors.base import CollectorUnavailableError, Family
from torchperfd_daemon.collectors.cgroup import CgroupCollector, Limits, read_limits
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.collectors.process_usage import ProcessCollector
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.service.rank_process import GoneError, StoppedError, check_running
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store

TICK = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    made = HostTree(tmp_path)
    made.write("sys/devices/system/node/node0/cpulist", "0-1\n")
    made.write("sys/devices/system/node/node1/cpulist", "2-3\n")
    return made


def values(families: Sequence[Family], rank: str = "0") -> dict[tuple[str, ...], float]:
    """Return what is said of a rank: by name and the labels after run and rank."""
    return {
        (family.name, *labels[2:]): value
        for family in families
        for labels, value in family.samples
        if labels[:2] == ("bert-17", rank)
    }


def test_a_rank_and_its_workers_in_base_units(tree: HostTree) -> None:
    # The first has two workers, of which one has a child; the second has none.
    tree.add_process(
        100,
        ticks=(200, 50, 30, 20),
        pages=50,
        moved=(1000, 10),
        delay_ns=1_500_000_000,
        switches=9,
        cpus="0-2",
    )
    tree.add_process(101, 100, ticks=(40, 0, 0, 0), pages=20, moved=(500, 1), switches=1000)
    tree.add_process(102, 100, ticks=(10, 0, 0, 0), pages=5, moved=(0, 1))
    tree.add_process(103, 102, ticks=(5, 0, 0, 0), pages=1, moved=(7, 0))
    tree.add_process(200, ticks=(1, 0, 0, 0), pages=2, cpus="3")
    tree.add_process(999, 1, ticks=(9999, 0, 0, 0))
    ranks = [tree.rank(100), tree.rank(200, 1)]
    families = ProcessCollector(lambda: ranks, tree.proc, tree.sys).sample()
    assert values(families) == {
        ("process_cpu_seconds",): pytest.approx(355 * TICK),
        ("process_resident_memory_bytes",): 76 * PAGE,
        ("process_io_bytes", "read"): 1507,
        ("process_io_bytes", "write"): 12,
        ("process_run_delay_seconds",): 1.5,
        ("process_collective_run_delay_seconds",): 0,
        ("process_thread_cpu_seconds", "main"): pytest.approx(123e-9),
        ("process_thread_cpu_seconds", "other"): pytest.approx(250 * TICK),
        ("process_involuntary_switches",): 9,
        ("process_allowed_cpus", "0"): 2,
        ("process_allowed_cpus", "1"): 1,
    }
    assert values(families, "1")["process_cpu_seconds",] == pytest.approx(TICK)
    assert ("process_allowed_cpus", "0") not in values(families, "1")


def test_threads_of_collectives_are_known_by_their_names(tree: HostTree) -> None:
    tree.add_process(100, delay_ns=7)
    names = {100: "python", 101: "pt_gloo_runloop", 102: "gloo_tcp_loop", 103: "NCCL Progress 0", 104: "grpc"}
    for thread, name in names.items():
        tree.write(f"proc/100/task/{thread}/comm", f"{name}\n")
        tree.write(f"proc/100/task/{thread}/schedstat", f"5 {10**9 * (thread - 99)} 3\n")
    collector = ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys)
    delay = ("process_collective_run_delay_seconds",)
    assert values(collector.sample())[delay] == 2 + 3 + 4
    (tree.proc / "100" / "task" / "103" / "schedstat").unlink()
    tree.write("proc/100/task/105/comm", "pt_nccl_watchdg\n")
    tree.write("proc/100/task/105/schedstat", f"5 {10**10} 3\n")
    assert values(collector.sample())[delay] == 2 + 3 + 10


def test_values_missing_in_the_kernel_are_absent(tree: HostTree) -> None:
    tree.add_process(100, moved=None, delay_ns=None)
    found = values(ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys / "none").sample())
    assert {name for name, *_ in found} == {
        "process_cpu_seconds",
        "process_resident_memory_bytes",
        "process_involuntary_switches",
    }


def test_io_that_cannot_be_read_is_absent(tree: HostTree) -> None:
    tree.add_process(100, moved=None)
    (tree.proc / "100/io").mkdir()
    found = values(ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys).sample())
    assert ("process_cpu_seconds",) in found
    assert ("process_io_bytes", "read") not in found


def test_io_of_a_worker_of_another_user_is_absent(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: str) -> str:
        if Path(path).name == "io":
            raise PermissionError(13, "Permission denied")
        return Path(path).read_text()

    tree.add_process(100)
    tree.add_process(101, 100)
    monkeypatch.setattr(process_usage, "read", refusing)
    found = values(ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys).sample())
    assert ("process_cpu_seconds",) in found
    assert ("process_io_bytes", "read") not in found


def test_totals_never_fall_when_workers_end(tree: HostTree) -> None:
    tree.add_process(100, ticks=(100, 0, 0, 0))
    tree.add_process(101, 100, ticks=(50, 0, 0, 0))
    collector = ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys)

    def cpu_ticks() -> int:
        return round(values(collector.sample())["process_cpu_seconds",] / TICK)

    assert cpu_ticks() == 150
    # It has ended, and is not waited for yet.
    tree.end_process(101)
    assert cpu_ticks() == 150
    tree.add_process(100, ticks=(100, 0, 52, 0))
    assert cpu_ticks() == 152
    # Its id goes to a process of somebody else's.
    tree.add_process(101, 1, ticks=(5000, 0, 0, 0), start=900)
    assert cpu_ticks() == 152


def test_ended_rank_keeps_its_totals_until_forgotten(tree: HostTree) -> None:
    tree.add_process(100, ticks=(100, 0, 0, 0))
    ranks = [tree.rank(100)]
    collector = ProcessCollector(lambda: ranks, tree.proc, tree.sys)
    before = values(collector.sample())
    tree.end_process(100)
    after = values(collector.sample())
    assert after["process_cpu_seconds",] == before["process_cpu_seconds",]
    assert ("process_resident_memory_bytes",) not in after
    ranks.clear()
    assert values(collector.sample()) == {}


@pytest.mark.parametrize("other", [{"start": 501}, {"namespace": 1}])
def test_a_process_that_is_not_the_rank_is_not_taken_for_it(tree: HostTree, other: dict[str, int]) -> None:
    tree.add_process(100, ticks=(100, 0, 0, 0))
    collector = ProcessCollector(lambda: [tree.rank(100, **other)], tree.proc, tree.sys)
    assert values(collector.sample()) == {}


def test_this_very_process_can_be_read() -> None:
    rank = RankProcess("bert-17", 0, os.getpid(), 0, 0)
    found = values(ProcessCollector(lambda: [rank]).sample())
    assert found["process_cpu_seconds",] > 0
    assert found["process_resident_memory_bytes",] > 1 << 20


def test_ranks_come_from_the_store() -> None:
    store = Store()
    store.join(RankIdentity("bert-17", 3, pid=42, pid_namespace=7, process_start_ticks=99))
    assert list(map(process_of, store.ranks())) == [RankProcess("bert-17", 3, 42, 7, 99)]


def limited(tree: HostTree, group: str, **files: str) -> None:
    tree.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    for name, text in files.items():
        tree.write(f"sys/fs/cgroup{group}/{name.replace('_', '.', 1)}", text)


def test_the_tightest_limit_of_all_groups_around_a_rank_holds(tree: HostTree) -> None:
    limited(tree, "/pod", cpu_max="400000 100000\n", memory_max="1000\n", cpu_stat="throttled_usec 2500000\n")
    limited(
        tree,
        "/pod/box",
        cpu_max="max 100000\n",
        memory_max="5000\n",
        cpu_stat="usage_usec 1\nthrottled_usec 7\n",
    )
    limited(tree, "/pod/box", cpuset_cpus_effective="")
    tree.write("sys/fs/cgroup/pod/box/cpuset.cpus.effective", "0-1\n")
    tree.add_process(100, cgroup="/pod/box")
    root = tree.sys / "fs/cgroup"
    assert read_limits(100, tree.proc, root) == Limits(4.0, 1000, frozenset({0, 1}), 2.5)
    assert values(CgroupCollector(lambda: [tree.rank(100)], tree.proc, root).sample()) == {
        ("process_cpu_limit_cores",): 4.0,
        ("process_memory_limit_bytes",): 1000,
        ("process_throttled_seconds",): 2.5,
    }


def test_without_limits_there_are_no_such_series(tree: HostTree) -> None:
    limited(tree, "/job", cpu_max="max 100000\n", memory_max="max\n", cpu_stat="usage_usec 5\n")
    tree.add_process(100, cgroup="/job")
    # Ours is a namespace below: its group is outside what we can see.
    tree.add_process(200, cgroup="/../other")
    ranks = [tree.rank(100), tree.rank(200, 1), tree.rank(300, 2)]
    families = CgroupCollector(lambda: ranks, tree.proc, tree.sys / "fs/cgroup").sample()
    assert [family.samples for family in families] == [[], [], []]


def test_groups_of_version_one_have_a_tree_for_each_controller(tree: HostTree) -> None:
    for path, text in {
        "cpu/pod/cpu.cfs_quota_us": "50000\n",
        "cpu/pod/cpu.cfs_period_us": "100000\n",
        "cpu/pod/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 2500000000\n",
        "cpu/pod/box/cpu.cfs_quota_us": "-1\n",
        "cpu/pod/box/cpu.cfs_period_us": "100000\n",
        "cpu/pod/box/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
        "memory/job/memory.limit_in_bytes": "1000\n",
        "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "cpuset/job/cpuset.effective_cpus": "0-1\n",
    }.items():
        tree.write(f"sys/fs/cgroup/{path}", text)
    tree.add_process(100)
    tree.write("proc/100/cgroup", "5:cpuset:/job\n4:cpu,cpuacct:/pod/box\n3:memory:/job\n0::/\n")
    tree.add_process(200)
    root = tree.sys / "fs/cgroup"
    assert read_limits(100, tree.proc, root) == Limits(0.5, 1000, frozenset({0, 1}), 2.5)
    assert read_limits(200, tree.proc, root) == Limits()
    assert values(CgroupCollector(lambda: [tree.rank(100)], tree.proc, root).sample()) == {
        ("process_cpu_limit_cores",): 0.5,
        ("process_memory_limit_bytes",): 1000,
        ("process_throttled_seconds",): 2.5,
    }


def test_node_without_cgroups_is_logged(tree: HostTree) -> None:
    with pytest.raises(CollectorUnavailableError, match="no control groups are mounted"):
        CgroupCollector(lambda: [], tree.proc, tree.sys / "fs/cgroup").sample()


def test_check_running_stopped_or_ended_process_raises() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = start_ticks(child.pid)
        check_running(process(child.pid))
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(StoppedError, match=f"kill -CONT {child.pid}"):
            check_running(process(child.pid))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(GoneError):
            check_running(process(child.pid))
    with pytest.raises(GoneError):
        check_running(process(child.pid, ticks))
    check_running(process(child.pid, ticks, namespace=HERE + 1))


def test_check_running_traced_process_names_the_tracer(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    (tmp_path / "70").mkdir()
    (tmp_path / "70/stat").write_text("70 (a) b) t " + " ".join(["0"] * 18 + ["9"] + ["0"] * 20))
    (tmp_path / "70/status").write_text("Name:\ta\nTracerPid:\t71\n")
    with pytest.raises(StoppedError, match="by a debugger, process 71"):
        check_running(RankProcess("r", 0, 70, (tmp_path / "self/ns/pid").stat().st_ino, 9), tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "file"])
def test_open_memory_file_by_a_false_link_opens_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = tmp_path / "false"
    os.mkfifo(false) if kind == "fifo" else false.write_bytes(bytes(16))
    process = tmp_path / "proc"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "3").symlink_to(false)
    monkeypatch.setattr(os, "readlink", lambda _: f"/memfd:{contract.STACKS_FILE} (deleted)")
    # Opening the FIFO would wait for a writer that never comes.
    assert procfs.open_memory_file(process, contract.STACKS_FILE, os.O_RDONLY) is None
