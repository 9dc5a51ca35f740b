"""Who takes the CPUs: read from a fake procfs whose counters move while the interval passes."""

from pathlib import Path

import pytest
from tests.unit.daemon.host_tree import HostTree

from torchperfd_daemon import doctor
from torchperfd_daemon.doctor.cpu import Consumer, CpuFacts, read_cpu
from torchperfd_daemon.doctor.facts import Facts, RankFacts


def stat(user: int, idle: int, steal: int = 0, running: int = 1) -> str:
    line = f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\n"
    return f"{line}cpu0 1 2 3 4\ncpu1 1 2 3 4\nctxt 77\nprocs_running {running}\n"


def test_read_cpu_names_the_busiest_process(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/stat", stat(1000, 1000))
    tree.write("proc/pressure/cpu", "some avg10=61.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00\n")
    tree.add_process(10, ticks=(100, 0, 5000, 0), command="/usr/bin/python3\0-u\0/job/train.py\0")
    tree.add_process(11, ticks=(100, 50, 0, 0), command="stress\0--cpu\0")
    tree.add_process(12, ticks=(7, 0, 0, 0))

    def half_a_second(_: float) -> None:
        tree.write("proc/stat", stat(1085, 1005, steal=10, running=10))
        # Children that were waited for are no use of its own.
        tree.add_process(10, ticks=(120, 0, 9000, 0), command="/usr/bin/python3\0-u\0/job/train.py\0")
        tree.add_process(11, ticks=(130, 70, 0, 0), command="stress\0--cpu\0")

    found = read_cpu(tree.proc, half_a_second, 0.5)
    assert found is not None
    assert (found.cpus, found.runnable) == (2, 9)
    assert (found.busy, found.stolen, found.pressure) == pytest.approx((0.95, 0.1, 0.615))
    assert [(each.pid, each.name) for each in found.consumers] == [(11, "stress"), (10, "python3 train.py")]
    assert [each.cores for each in found.consumers] == pytest.approx([1.0, 0.4])


def test_read_cpu_without_procfs_is_not_known(tmp_path: Path) -> None:
    assert read_cpu(tmp_path, lambda _: None) is None
    HostTree(tmp_path).write("proc/stat", stat(5, 5))
    assert read_cpu(tmp_path / "proc", lambda _: None) is None, "no time has passed"


def pressed(
    busy: float = 1.0, pressure: float | None = 0.6, runnable: int = 9, stolen: float = 0.0
) -> CpuFacts:
    consumers = (
        *(Consumer(40, "stress", 1.2, 1), Consumer(41, "python train.py", 0.7, 1)),
        Consumer(42, "python train.py", 0.1, 41),
    )
    return CpuFacts(2, busy, stolen, runnable, pressure, consumers)


def checks(cpu: CpuFacts) -> list[str]:
    return [finding.check for finding in doctor.examine(Facts(cpu=cpu))]


def test_check_cpu_pressure_names_process_and_remedy() -> None:
    (finding,) = doctor.examine(Facts(ranks=(RankFacts("bert", 0, 41),), cpu=pressed()))
    assert finding.check == "cpu-pressure"
    assert finding.problem == (
        "its 2 CPUs are 100% busy, and 9 threads want to run; CPUs in use by stress (pid 40) 1.2,"
        " rank 0 of bert (pid 41) 0.7, a child of rank 0 of bert (pid 42) 0.1"
    )
    assert "`top -p 40`" in finding.fix


@pytest.mark.parametrize(
    ("cpu", "found"),
    [
        (pressed(), ["cpu-pressure"]),
        (pressed(busy=0.5), []),
        (pressed(pressure=0.05), []),
        (pressed(pressure=None), ["cpu-pressure"]),
        (pressed(pressure=None, runnable=2), []),
        (pressed(busy=0.3, pressure=0.0, stolen=0.08), ["cpu-steal"]),
    ],
)
def test_check_cpu_pressure_needs_tasks_that_wait(cpu: CpuFacts, found: list[str]) -> None:
    assert checks(cpu) == found
