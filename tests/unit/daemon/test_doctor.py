"""The doctor: each check from facts alone, the reading of a fake node, and the command."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.commands import Run
from tests.support.values import some
from tests.unit.daemon.host_tree import HostTree

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon import doctor
from torchperfd_daemon.collectors.procfs import parse_cpu_list
from torchperfd_daemon.doctor import checks, reading
from torchperfd_daemon.doctor.checks import Finding
from torchperfd_daemon.doctor.facts import Facts, Gpu, RankFacts
from torchperfd_daemon.doctor.reading import ClockState
from torchperfd_daemon.loader_workers import most_computing_workers

GPU = Gpu(
    index=3,
    name="H100",
    pci_bus_id="0000:3b:00.0",
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    persistence_mode=True,
    is_idle=False,
    numa_node=1,
    pids=frozenset({100}),
)
RANK = RankFacts(
    "bert-17", 0, 100, frozenset(range(8, 16)), frozenset(range(16)), None, workers=4, shm_bytes=1 << 34
)
WELL = Facts(
    gpus=(GPU,),
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
    torch_version="2.13.0+cu130",
    ranks=(RANK, replace(RANK, rank=1, pid=101, allowed=frozenset(range(8)))),
    numa_cpus={0: frozenset(range(8)), 1: frozenset(range(8, 16))},
    shm_bytes=1 << 34,
    clock_synchronised=True,
    clock_error_seconds=0.002,
)


def test_a_node_that_is_well_has_no_findings() -> None:
    assert doctor.examine(WELL) == []
    assert doctor.examine(Facts()) == [], "what could not be read is no finding"


def with_gpu(**changes: Any) -> Facts:
    return replace(WELL, gpus=(replace(GPU, **changes),))


def with_rank(**changes: Any) -> Facts:
    return replace(WELL, ranks=(replace(RANK, **changes),))


@pytest.mark.parametrize(
    ("facts", "check", "problem", "fix"),
    [
        (with_gpu(pcie_width=8), "pcie", "8 lanes of 16", "lspci -vv -s 0000:3b:00.0"),
        (with_gpu(pcie_generation=3), "pcie", "generation 3 of 5", "firmware"),
        (
            with_gpu(throttled_by=("heat (hardware)", "the power brake")),
            "throttling",
            "heat (hardware) and the power brake",
            "nvidia-smi -q -i 3",
        ),
        (with_gpu(persistence_mode=False), "persistence", "is off", "sudo nvidia-smi -pm 1"),
        (
            replace(WELL, driver_cuda=(12, 4)),
            "cuda",
            "built for CUDA 13.0, the driver runs 12.4",
            "torch for CUDA 12",
        ),
        (
            replace(WELL, torch_cuda=None, torch_version="2.13.0+cpu"),
            "cuda",
            "2.13.0+cpu is a build without CUDA, on a node with 1 GPUs",
            "pip install --force-reinstall torch",
        ),
        (with_rank(shm_bytes=64 << 20), "shared-memory", "/dev/shm holds 64 MiB", "--shm-size"),
        (replace(WELL, ranks=None, shm_bytes=1 << 20), "shared-memory", "holds 1 MiB", "--shm-size"),
        (with_rank(cpu_cores=5.5), "affinity", "may run on 8 CPUs", "OMP_NUM_THREADS=5"),
        (
            with_rank(allowed=frozenset({8}), workers=0),
            "affinity",
            "may run on 1 CPUs, and its share of the control group's is 16",
            "taskset -acp 0-15 100",
        ),
        (
            with_rank(allowed=frozenset(range(8)), cgroup_cpus=None),
            "affinity",
            "no CPU of NUMA node 1, where its GPU 3 is",
            "taskset -acp 8-15 100",
        ),
        (
            with_rank(workers=8, cgroup_cpus=None),
            "workers",
            "9 processes share 8 CPUs, 8 of them loader workers",
            "num_workers=7",
        ),
        (replace(WELL, clock_synchronised=False), "clock", "nothing keeps", "timedatectl set-ntp true"),
        (replace(WELL, missing_native=("_cycles",)), "native-hooks", "are not compiled", "pip install -e ."),
        (replace(WELL, clock_error_seconds=2.5), "clock", "wrong by 2.5 s", "chronyc tracking"),
    ],
)
def test_each_finding_says_what_and_how_to_mend_it(facts: Facts, check: str, problem: str, fix: str) -> None:
    found = [finding for finding in doctor.examine(facts) if finding.check == check]
    (finding,) = (one for one in found if problem in one.problem)
    assert fix in finding.fix
    assert finding.why
    others = {one.check for one in doctor.examine(facts)} - {check}
    assert not others


def test_an_idle_gpu_slows_its_link_down_and_that_is_well() -> None:
    assert doctor.examine(with_gpu(is_idle=True, pcie_generation=1)) == []


def test_a_newer_minor_version_of_cuda_runs_on_an_older_driver() -> None:
    assert doctor.examine(replace(WELL, driver_cuda=(13, 0), torch_cuda=(13, 9))) == []


def test_ranks_that_share_cpus_are_counted_together() -> None:
    ranks = tuple(replace(RANK, rank=rank, pid=200 + rank, cgroup_cpus=None) for rank in range(2))
    (finding,) = doctor.examine(replace(WELL, ranks=ranks))
    assert finding.subject == "rank 0 of bert-17, rank 1 of bert-17"
    assert "10 processes share 8 CPUs" in finding.problem
    assert "num_workers=3" in finding.fix


@pytest.mark.parametrize(
    ("threads", "fix"),
    [
        (None, "`export OMP_NUM_THREADS=2` before it starts, unless the script sets its threads, or"),
        (8, "`export OMP_NUM_THREADS=2` (now 8) before"),
        (2, None),
    ],
)
def test_quota_advises_no_number_of_threads_in_effect(threads: int | None, fix: str | None) -> None:
    found = [each.fix for each in doctor.examine(with_rank(cpu_cores=2.5, workers=0, threads=threads))]
    assert len(found) == (fix is not None)
    assert all(fix in each for each in found if fix)


def workers_findings(loader: LoaderFacts | None, cpus: int = 8) -> list[doctor.Finding]:
    facts = with_rank(workers=16, cgroup_cpus=None, allowed=frozenset(range(cpus)), loader=loader)
    return [finding for finding in doctor.examine(facts) if finding.check == "workers"]


def test_workers_that_wait_may_be_more_than_the_cpus() -> None:
    """Sixteen that wait for storage were faster than two on two CPUs."""
    assert not workers_findings(LoaderFacts(workers=16, worker_queued=0.02))


def test_workers_that_wait_for_cpus_get_no_number() -> None:
    """Fewer workers that compute all the time would make fewer batches."""
    (finding,) = workers_findings(LoaderFacts(workers=16, worker_queued=0.5))
    assert "stand in line for a CPU 50% of the time" in finding.problem
    assert "num_workers" not in finding.fix


@pytest.mark.parametrize("loader", [None, LoaderFacts(workers=16)])
def test_workers_of_unknown_kind_get_the_rules_number(loader: LoaderFacts | None) -> None:
    (finding,) = workers_findings(loader)
    assert f"num_workers={most_computing_workers(8.0)}" in finding.fix


@given(cpus=st.frozensets(st.integers(0, 200)))
def test_taskset_gets_the_same_cpus(cpus: frozenset[int]) -> None:
    assert parse_cpu_list(checks.format_cpu_list(cpus)) == cpus


def break_driver(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    break_driver(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A driver with two GPUs, of which the second is lost."""

    def handle(index: int) -> int:
        if index:
            raise pynvml.NVMLError_GpuIsLost
        return index

    def unknown(gpu: int) -> int:
        raise pynvml.NVMLError_NotSupported

    calls: dict[str, Any] = {"open": 0}
    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: calls.update(open=calls["open"] + 1),
        "nvmlShutdown": lambda: calls.update(open=calls["open"] - 1),
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12040,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId="00000000:3B:00.0"),
        "nvmlDeviceGetName": lambda gpu: "H100",
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 4,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x4 | 0x40,
        "nvmlDeviceGetPersistenceMode": unknown,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=100)],
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=90),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    yield calls
    assert calls["open"] == 0, "the driver is left as it was"


def test_gpus_are_read_and_missing_values_are_unknown(driver: dict[str, Any], tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    assert reading.read_gpus(tree.sys) == (
        (
            replace(
                GPU,
                index=0,
                pcie_generation=4,
                pcie_width=8,
                throttled_by=("heat (hardware)",),
                persistence_mode=None,
            ),
        ),
        (1,),
        (12, 4),
    )
    tree.write("sys/bus/pci/devices/0000:3b:00.0/numa_node", "-1\n")
    assert reading.read_gpus(tree.sys).gpus[0].numa_node is None
    facts = doctor.read_facts({}, tree.proc, tree.sys)
    [finding] = [each for each in doctor.examine(facts) if each.check == "driver"]
    assert (finding.subject, finding.problem) == ("GPU 1", "it does not answer")


@pytest.mark.parametrize(
    ("code", "problem", "fix"),
    [
        (9, "its module is not loaded (Driver Not Loaded, NVML error 9)", "sudo modprobe nvidia"),
        (18, "it was updated, and the old module is loaded", "rmmod nvidia_uvm"),
        (
            999,
            "the NVIDIA driver cannot be used (Unknown Error, NVML error 999)",
            "in a container, restart it",
        ),
        (4, "the NVIDIA driver cannot be used", "nvidia-smi"),
    ],
)
def test_broken_driver_is_a_finding(
    code: int, problem: str, fix: str, monkeypatch: pytest.MonkeyPatch, tree: HostTree
) -> None:
    break_driver(monkeypatch, code)
    facts = doctor.read_facts({}, tree.proc, tree.sys)
    [finding] = [each for each in doctor.examine(facts) if each.check == "driver"]
    assert problem in finding.problem
    assert fix in finding.fix
    assert "gpus" not in facts.skipped


def test_library_without_driver_is_no_finding(no_driver: None, tree: HostTree) -> None:
    facts = doctor.read_facts({}, tree.proc, tree.sys)
    assert "driver" not in {each.check for each in doctor.examine(facts)}
    assert facts.skipped["gpus"].startswith("no NVIDIA driver here")
    tree.write("proc/driver/nvidia/version", "NVRM version: 580\n")
    facts = doctor.read_facts({}, tree.proc, tree.sys)
    assert "driver" in {each.check for each in doctor.examine(facts)}


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    made = HostTree(tmp_path)
    made.write("sys/devices/system/node/node0/cpulist", "0-7\n")
    made.write("sys/fs/cgroup/job/cpu.max", "200000 100000\n")
    made.write("sys/fs/cgroup/job/cpuset.cpus.effective", "0-7\n")
    made.add_process(100, cpus="0-3", cgroup="/job")
    made.add_process(101, 100)
    made.add_process(102, 100, command="python\0-c\0from multiprocessing.spawn import spawn_main\0")
    made.add_process(103, 100, command="python\0-c\0from multiprocessing.resource_tracker import main\0")
    made.add_process(104, 100, command="python\0-c\0from multiprocessing.forkserver import main\0")
    made.add_process(105, 104, command="python\0-c\0from multiprocessing.forkserver import main\0")
    made.add_process(106, 1)
    return made


def test_a_rank_is_read_with_its_workers_and_limits(no_driver: None, tree: HostTree) -> None:
    ranks = dict.fromkeys((tree.rank(100), tree.rank(999, 1)), doctor.ReportedFacts())
    facts = doctor.read_facts(ranks, tree.proc, tree.sys, tree.proc / "none")
    assert facts.ranks == (
        RankFacts(
            "bert-17", 0, 100, frozenset(range(4)), frozenset(range(8)), 2.0, workers=3, shm_bytes=None
        ),
    )
    assert facts.numa_cpus == {0: frozenset(range(8))}
    assert facts.shm_bytes is None
    assert "no NVIDIA driver here" in facts.skipped["gpus"]
    assert "it has ended" in facts.skipped["rank 1 of bert-17"]


@pytest.mark.parametrize(
    ("reported", "environ", "threads"),
    [
        (None, "A=1\0OMP_NUM_THREADS=4\0B=2\0", 4),
        (None, "OMP_NUM_THREADS=4,2\0", 4),
        (None, "OMP_NUM_THREADS=\0", None),
        (None, "OMP_NUM_THREADS=0\0", None),
        (None, "OMP_NUM_THREADS=many\0", None),
        (None, "A=1\0", None),
        (None, None, None),
        (1, "OMP_NUM_THREADS=4\0", 1),
        (6, None, 6),
    ],
)
def test_read_threads_takes_the_report_before_the_start(
    no_driver: None, tree: HostTree, reported: int | None, environ: str | None, threads: int | None
) -> None:
    if environ is not None:
        tree.write("proc/100/environ", environ)
    ranks = {tree.rank(100): doctor.ReportedFacts(threads=reported)}
    (rank,) = doctor.read_facts(ranks, tree.proc, tree.sys, tree.proc / "none").ranks or ()
    assert rank.threads == threads


def test_torch_is_read_and_not_imported(tmp_path: Path) -> None:
    file = tmp_path / "version.py"
    file.write_text(
        "__all__ = ['cuda']\n__version__ = '2.13.0+cu126'\ncuda: Optional[str] = '12.6'\nhip = None\n"
    )
    assert reading.read_torch(file) == ("2.13.0+cu126", (12, 6))
    file.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert reading.read_torch(file) == ("2.13.0+cpu", None)
    assert reading.read_torch(tmp_path / "none.py") == ("", None)


def test_kernel_clock_state_is_read() -> None:
    assert some(reading.read_clock()).error_seconds >= 0


@pytest.fixture
def run(no_driver: None, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on a node without GPU and daemon."""
    monkeypatch.setattr(reading, "_size", lambda path: 1 << 34)

    def call(state: ClockState, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(reading, "read_clock", lambda: state)
        monkeypatch.setattr(reading, "read_cpu", lambda _: None)
        return run("doctor", "--socket", tmp_path / "no.sock", *options)

    return call


def test_no_findings_are_success_and_skipped_checks_are_listed(run: Run) -> None:
    code, out, err = run(ClockState(True, 0.001))
    assert (code, err) == (0, "")
    first, *skipped = out.splitlines()
    assert first == "nothing found"
    assert [line.split(":")[1] for line in skipped] == [" gpus", " ranks"]
    assert "torchperfd serve" in skipped[1]


def test_a_finding_is_a_line_and_a_failure(run: Run) -> None:
    code, out, err = run(ClockState(False, 0.001))
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == (
        "node: nothing keeps the clock right; steps and traces of several nodes cannot be laid side by side."
        " Fix: `sudo timedatectl set-ntp true`, or `sudo systemctl enable --now chronyd`"
    )


def test_findings_as_json(run: Run) -> None:
    code, out, err = run(ClockState(False, 0.001), "--json")
    assert (code, err) == (1, "")
    document = json.loads(out)
    assert document["schema"] == "torchperfd.doctor/1"
    (finding,) = document["findings"]
    assert set(finding) == set(Finding.__dataclass_fields__)
    assert finding["check"] == "clock"
    assert [skipped["check"] for skipped in document["skipped"]] == ["gpus", "ranks"]
