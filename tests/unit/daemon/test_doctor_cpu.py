"""Who takes the CPUs: read from a fake procfs whose counters move while the interval passes."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.values import some
from tests.unit.daemon.host_tree import HostTree

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon import doctor
from torchperfd_daemon.doctor.facts import Consumer, CpuFacts, Facts, Gpu, RankFacts, read_cpu


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

    found = some(read_cpu(tree.proc, half_a_second, 0.5))
    assert (found.cpus, found.runnable) == (2, 9)
    assert (found.busy, found.stolen, found.pressure) == pytest.approx((0.95, 0.1, 0.615))
    assert [(each.pid, each.name) for each in found.consumers] == [(11, "stress"), (10, "python3 train.py")]
    assert [each.cores for each in found.consumers] == pytest.approx([1.0, 0.4])


def test_read_cpu_without_procfs_is_not_known(tmp_path: Path) -> None:
    assert read_cpu(tmp_path, lambda _: None) is None
    HostTree(tmp_path).write("proc/stat", stat(5, 5))
    assert read_cpu(tmp_path / "proc", lambda _: None) is None, "no time has passed"


def pressed(
    busy: float = 1.0,
    pressure: float | None = 0.6,
    runnable: int = 9,
    stolen: float = 0.0,
    *,
    stressed: bool = True,
) -> CpuFacts:
    consumers = (
        Consumer(40, "stress", 1.2, 1),
        Consumer(41, "python train.py", 0.7, 1),
        Consumer(42, "python train.py", 0.1, 41),
    )
    return CpuFacts(2, busy, stolen, runnable, pressure, consumers[0 if stressed else 1 :])


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


def ranks_with(
    *threads: int | None, loader: LoaderFacts | None = None, workers: int = 0, stressed: bool = False
) -> Facts:
    """Return a pressed node of two CPUs, with a rank for each number of threads."""
    ranks = tuple(
        RankFacts(
            "bert", number, 41 + number, frozenset({0, 1}), threads=count, loader=loader, workers=workers
        )
        for number, count in enumerate(threads)
    )
    return Facts(ranks=ranks, cpu=pressed(stressed=stressed))


def pressure_fix(facts: Facts) -> str:
    (fix,) = [each.fix for each in doctor.examine(facts) if each.check == "cpu-pressure"]
    return fix


def running(threads: float, queued: float = 0.5) -> LoaderFacts:
    """Return the facts of a rank with so many threads that get a CPU for a part of their time."""
    return LoaderFacts(cpus=2.0, rest_cpus=threads * (1 - queued), queued=queued)


@pytest.mark.parametrize(
    "facts",
    [
        ranks_with(2),
        ranks_with(1),
        ranks_with(None),
        ranks_with(1, 1),
        ranks_with(1, 1, 1),
        ranks_with(1, loader=running(3.0)),
        ranks_with(8, loader=running(1.0)),
        ranks_with(None, loader=running(2.0)),
        ranks_with(8, stressed=True),
    ],
)
def test_cpu_pressure_threads_that_fit_get_no_number(facts: Facts) -> None:
    """Neither the default of two threads nor more are advice; beside other programs not even two."""
    assert "OMP_NUM_THREADS" not in pressure_fix(facts)


@pytest.mark.parametrize(
    ("facts", "setting"),
    [
        (ranks_with(8), "`export OMP_NUM_THREADS=2` (now 8) before each rank starts"),
        (ranks_with(2, 2), "`export OMP_NUM_THREADS=1` (now 2) before each rank starts"),
        (ranks_with(1, 2), "`export OMP_NUM_THREADS=1` (now 2) before rank 1 of bert starts"),
        (ranks_with(2, 4), "`export OMP_NUM_THREADS=1` (now 4 at most) before each rank starts"),
        (ranks_with(2, 2, 2), "`export OMP_NUM_THREADS=1` (now 2) before each rank starts"),
        (ranks_with(2, 2, stressed=True), "`export OMP_NUM_THREADS=1` (now 2) before each rank starts"),
        (ranks_with(8, loader=running(3.0)), "`export OMP_NUM_THREADS=2` (now 8) before each rank starts"),
        (
            ranks_with(None, None, loader=running(2.1)),
            "`export OMP_NUM_THREADS=1` (now 2) before each rank starts",
        ),
    ],
)
def test_cpu_pressure_crowding_threads_get_a_lower_number(facts: Facts, setting: str) -> None:
    assert setting in pressure_fix(facts)


def test_cpu_pressure_threads_are_left_to_tune() -> None:
    words = "fewer threads, which may be faster beside other load: `torchperfd tune --only threads SCRIPT`"
    assert words in pressure_fix(ranks_with(2))
    assert words not in pressure_fix(ranks_with(1)), "there are no fewer"
    on_gpu = (Gpu(0, "H100", "0000:3b:00.0", pids=frozenset({41})),)
    assert words not in pressure_fix(replace(ranks_with(2), gpus=on_gpu)), "tune tries none there"


@pytest.mark.parametrize("ranks", [None, ()])
def test_cpu_pressure_without_ranks_names_no_training(ranks: tuple[RankFacts, ...] | None) -> None:
    (finding,) = doctor.examine(Facts(ranks=ranks, cpu=pressed()))
    assert finding.why == "programs wait for a CPU, and so will a training that starts now"
    assert finding.fix == "see with `top -p 40,41,42` what can move elsewhere; or more CPUs"


def test_cpu_pressure_workers_are_named_where_there_are_some() -> None:
    assert "fewer loader workers" in pressure_fix(ranks_with(2, workers=1))
    assert "fewer loader workers" not in pressure_fix(ranks_with(2))
