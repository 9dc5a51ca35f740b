"""The owners of ranks and GPUs, from environments, control groups, GPUs and a kubelet on a real socket."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.served import short_directory

from torchperfd_daemon.collectors.base import CollectorUnavailableError
from torchperfd_daemon.collectors.gpu_readings import GpuReading
from torchperfd_daemon.collectors.kubelet import Given, PodResources
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.ownership import (
    Owner,
    OwnershipCollector,
    Pod,
    from_identity,
    gpus_of_environment,
    job_of_cgroup,
    pod_of_cgroup,
)
from torchperfd_daemon.store.model import RankIdentity

NAMESPACE = 4026531836
POD = "0d2cd4a6-5d7b-4b7e-9c1b-0123456789ab"
START = 500


class Proc:
    """A small procfs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self" / "ns").mkdir(parents=True)
        (root / "self" / "ns" / "pid").touch()
        self.namespace = (root / "self" / "ns" / "pid").stat().st_ino

    def add(self, pid: int, own_pid: int | None = None, cgroup: str = "0::/\n", **environ: str) -> None:
        """Add a process; one with an id of its own lives in a container."""
        directory = self.root / str(pid)
        directory.mkdir()
        fields = ["S", "1", *["0"] * 17, str(START), "0", "0", "0"]
        (directory / "stat").write_text(f"{pid} (python) {' '.join(fields)}\n")
        ids = f"{pid}" if own_pid is None else f"{pid}\t{own_pid}"
        (directory / "status").write_text(f"Name:\tpython\nNSpid:\t{ids}\n")
        (directory / "cgroup").write_text(cgroup)
        (directory / "environ").write_text("".join(f"{key}={value}\0" for key, value in environ.items()))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def rank_of(pid: int, rank: int = 0, namespace: int = 0, run: str = "r") -> RankProcess:
    return RankProcess(run, rank, pid, namespace, START)


def identity_of(rank: RankProcess, **reported: str) -> RankIdentity:
    return RankIdentity(
        rank.run,
        rank.rank,
        pid=rank.pid,
        pid_namespace=rank.pid_namespace,
        process_start_ticks=START,
        **reported,  # type: ignore[arg-type]
    )


def reading(index: int, **held: int) -> GpuReading:
    return GpuReading(
        str(index), f"GPU-{index}", process_bytes={int(pid[1:]): size for pid, size in held.items()}
    )


def collector(
    proc: Proc, ranks: list[RankProcess], *readings: GpuReading, pods: Path = Path("/nowhere")
) -> OwnershipCollector:
    return OwnershipCollector(lambda: ranks, lambda: readings, PodResources(pods), proc.root)


def allocations(collector: OwnershipCollector) -> list[tuple[str, ...]]:
    [family] = collector.sample()
    assert (family.name, family.labels) == (
        "gpu_allocation_info",
        ("gpu", "gpu_uuid", "allocator", "allocation"),
    )
    assert all(value == 1 for _, value in family.samples)
    return [labels for labels, _ in family.samples]


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n", "77"),
        ("0::/system.slice/node1_slurmstepd.scope/job_78/step_batch/user/task_0\n", "78"),
        ("11:memory:/slurm/uid_1000/job_79/step_0\n1:name=systemd:/system.slice/slurmd.service\n", "79"),
        ("4:cpuset:/slurm_node-1/uid_0/job_80\n", "80"),
        ("0::/user.slice/user-1000.slice\n", ""),
        ("0::/home/job_5/step_0\n", ""),
        ("0::/system.slice/slurmd.service\n", ""),
        ("0::/slurm/uid_1/job_x/step_0\n", ""),
    ],
)
def test_the_job_of_a_control_group(text: str, job: str) -> None:
    assert job_of_cgroup(text) == job


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        (
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{'ab' * 32}.scope\n",
            POD,
        ),
        (f"11:memory:/kubepods/besteffort/pod{POD}/{'cd' * 32}\n", POD),
        (f"0::/../../kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-0.scope\n", POD),
        (f"0::/kubepods/pod{'0a' * 16}/x\n", "0a" * 16),
        (f"0::/kubepods/pod{'0a' * 17}/x\n", ""),
        (f"0::/user.slice/pod{POD}\n", ""),
        ("0::/\n", ""),
    ],
)
def test_the_pod_of_a_control_group(text: str, pod: str) -> None:
    assert pod_of_cgroup(text) == pod


@given(st.text())
def test_any_control_group_text_has_a_valid_job_and_pod_or_none(text: str) -> None:
    assert job_of_cgroup(text) == "" or job_of_cgroup(text).isdecimal()
    assert len(pod_of_cgroup(text)) in (0, 32, 36)


@given(
    job=st.integers(1, 2**31),
    node=st.from_regex(r"[a-z0-9-]{0,20}", fullmatch=True),
    step=st.text("0123456789"),
)
def test_a_job_is_found_below_every_name_of_the_group(job: int, node: str, step: str) -> None:
    assert job_of_cgroup(f"0::/system.slice/{node}_slurmstepd.scope/job_{job}/step_{step}") == str(job)


def test_gpus_of_a_step_go_before_those_of_its_job() -> None:
    assert gpus_of_environment({"SLURM_JOB_GPUS": "0-3", "SLURM_STEP_GPUS": "2,3"}) == {"2", "3"}
    assert gpus_of_environment({"SLURM_JOB_GPUS": "0-2,7"}) == {"0", "1", "2", "7"}
    assert gpus_of_environment({"SLURM_STEP_GPUS": "gpu:2"}) == frozenset()
    assert gpus_of_environment({}) == frozenset()


def test_owner_reported_by_a_rank_precedes_its_process(proc: Proc) -> None:
    rank = rank_of(10)
    proc.add(10, cgroup=f"0::/kubepods/pod{POD}/x\n", SLURM_JOB_ID="5", TORCHELASTIC_RUN_ID="bert")
    seen = collector(proc, [rank])
    assert seen.of(identity_of(rank, slurm_job_id="4")) == Owner(slurm_job_id="4"), "not looked at yet"
    seen.sample()
    assert seen.of(identity_of(rank)) == Owner("5", POD, "bert")
    assert seen.of(identity_of(rank, slurm_job_id="4", pod_uid="p")) == Owner("4", "p", "bert")
    stranger = identity_of(rank_of(11))
    assert seen.of(stranger) == from_identity(stranger)


def test_the_control_group_is_the_fallback_of_slurm(proc: Proc) -> None:
    rank = rank_of(10)
    proc.add(10, cgroup="0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n")
    seen = collector(proc, [rank])
    seen.sample()
    assert seen.of(identity_of(rank)).slurm_job_id == "77"


def test_gpus_of_a_slurm_step_are_the_jobs_before_use(proc: Proc) -> None:
    ranks = [rank_of(10), rank_of(11, 1)]
    for pid in (10, 11):
        proc.add(pid, SLURM_JOB_ID="5", SLURM_STEP_GPUS="1,2", TORCHELASTIC_RUN_ID="bert")
    seen = collector(proc, ranks, reading(0), reading(1, p10=100), reading(2), reading(3))
    assert allocations(seen) == [("1", "GPU-1", "slurm", "5"), ("2", "GPU-2", "slurm", "5")]
    assert seen.of(identity_of(ranks[0])).gpu_uuid == "GPU-1"
    assert seen.of(identity_of(ranks[1])).gpu_uuid == ""


def test_job_without_a_gpu_list_has_the_gpus_its_ranks_hold(proc: Proc) -> None:
    rank = rank_of(10)
    proc.add(10, SLURM_JOB_ID="5")
    assert allocations(collector(proc, [rank], reading(0), reading(1, p10=1))) == [
        ("1", "GPU-1", "slurm", "5")
    ]


@pytest.mark.parametrize("elastic", ["none", "bert"])
def test_torchrun_alone_gives_gpus_to_the_run(proc: Proc, elastic: str) -> None:
    rank = rank_of(10, run="bert-17")
    proc.add(10, TORCHELASTIC_RUN_ID=elastic)
    seen = collector(proc, [rank], reading(0, p10=1))
    assert allocations(seen) == [("0", "GPU-0", "torchrun", "bert-17")]
    assert seen.of(identity_of(rank)).torchelastic_run_id == ("" if elastic == "none" else "bert")


# In a container the driver names processes that are not seen, or none; otherwise what it shows precedes.
@pytest.mark.parametrize(
    ("claimed", "shown", "gpu"),
    [("1", "p999", "GPU-1"), *((each, "p10", "GPU-0") for each in ("2", "1", "")), ("elsewhere", "", "")],
)
def test_rank_names_its_gpu_where_the_driver_does_not(proc: Proc, claimed: str, shown: str, gpu: str) -> None:
    rank = RankProcess("r", 0, 10, 0, START, device_uuid=claimed)
    proc.add(10)
    seen = collector(proc, [rank], reading(0, **({shown: 7} if shown else {})), reading(1))
    seen.sample()
    assert seen.of(identity_of(rank)).gpu_uuid == gpu


def test_script_without_a_launcher_was_given_no_gpus(proc: Proc) -> None:
    rank = rank_of(10)
    proc.add(10, PATH="/bin", SECRET="x")
    seen = collector(proc, [rank], reading(0, p10=1))
    assert allocations(seen) == []
    assert seen.of(identity_of(rank)) == Owner(gpu_uuid="GPU-0")


def test_rank_gpu_is_its_largest_memory_and_instance_first(proc: Proc) -> None:
    ranks = [rank_of(10), rank_of(11, 1)]
    proc.add(10)
    proc.add(11)
    instance = GpuReading("1:0", "MIG-1", process_bytes={11: 900})
    seen = collector(proc, ranks, reading(0, p10=50, p11=50), reading(1, p10=900, p11=900), instance)
    seen.sample()
    assert [seen.of(identity_of(rank)).gpu_uuid for rank in ranks] == ["GPU-1", "MIG-1"]


def test_a_rank_in_a_container_is_found_by_its_own_id_and_start(proc: Proc) -> None:
    inside = rank_of(7, namespace=NAMESPACE)
    proc.add(4242, own_pid=7, cgroup=f"0::/kubepods/pod{POD}/x\n")
    proc.add(7, cgroup="0::/system.slice/slurmstepd.scope/job_1/step_0\n")  # another process to us
    seen = collector(proc, [inside], reading(3, p4242=1))
    seen.sample()
    assert seen.of(identity_of(inside)) == Owner(pod_uid=POD, gpu_uuid="GPU-3")


def test_ended_rank_is_listed_only_while_it_is_named(proc: Proc) -> None:
    rank = rank_of(10)
    proc.add(10, SLURM_JOB_ID="5")
    ranks, readings = [rank], [reading(0, p10=1)]
    seen = OwnershipCollector(lambda: ranks, lambda: readings, PodResources(Path("/nowhere")), proc.root)
    seen.sample()
    for file in (proc.root / "10").iterdir():
        file.unlink()
    (proc.root / "10").rmdir()
    readings[0] = reading(0)
    assert allocations(seen) == [("0", "GPU-0", "slurm", "5")]
    assert seen.of(identity_of(rank)) == Owner("5", gpu_uuid="GPU-0")
    ranks.clear()
    assert allocations(seen) == []
    assert seen.of(identity_of(rank)) == Owner()


def test_text_of_another_process_is_one_printable_line(proc: Proc) -> None:
    rank = rank_of(10)
    proc.add(10, SLURM_JOB_ID="5\n\x1b[2J" + "x" * 500)
    seen = collector(proc, [rank])
    seen.sample()
    job = seen.of(identity_of(rank)).slurm_job_id
    assert job.isprintable()
    assert len(job) == 200


def test_this_very_process_is_read_from_the_real_procfs() -> None:
    rank = RankProcess("r", 0, os.getpid(), 0, 0)
    seen = OwnershipCollector(lambda: [rank], tuple, PodResources(Path("/nowhere")))
    assert list(seen.sample()[0].samples) == []


def _bytes(number: int, payload: bytes) -> bytes:
    """Return a field of the wire: its number, its length in up to two bytes, itself."""
    assert len(payload) < 1 << 14
    length = (
        bytes([len(payload)]) if len(payload) < 128 else bytes([len(payload) & 127 | 128, len(payload) >> 7])
    )
    return bytes([number << 3 | 2]) + length + payload


def pod(namespace: str, name: str, container: str, resource: str, *devices: str) -> bytes:
    """Return a pod as the kubelet's list has it, with fields that this version does not know."""
    given = _bytes(1, resource.encode()) + b"".join(_bytes(2, device.encode()) for device in devices)
    topology = _bytes(3, _bytes(1, b""))
    held = _bytes(1, container.encode()) + _bytes(2, given + topology) + _bytes(3, b"\x01\x02")
    return _bytes(1, _bytes(1, name.encode()) + _bytes(2, namespace.encode()) + _bytes(3, held))


class Kubelet(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers List with bytes made by hand."""

    def __init__(self, answer: bytes | grpc.StatusCode) -> None:
        self.answer = answer

    def service(self, details: Any) -> Any:
        if details.method != "/v1.PodResourcesLister/List":
            return None
        return grpc.unary_unary_rpc_method_handler(self._list)

    def _list(self, request: bytes, context: Any) -> bytes:
        assert request == b""
        if isinstance(self.answer, grpc.StatusCode):
            context.abort(self.answer, "no")
        return self.answer  # type: ignore[return-value]


@pytest.fixture
def kubelet() -> Iterator[tuple[Path, Kubelet]]:
    handler = Kubelet(b"")
    with short_directory() as directory, ThreadPoolExecutor(1) as pool:
        path = directory / "kubelet.sock"
        server = grpc.server(pool, handlers=[handler])
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield path, handler
        finally:
            server.stop(None).wait()


def test_kubelet_maps_containers_to_gpus(kubelet: tuple[Path, Kubelet], proc: Proc) -> None:
    path, handler = kubelet
    handler.answer = (
        pod("team-a", "bert-0", "train", "nvidia.com/gpu", "GPU-0", "GPU-1")
        + pod("team-b", "dev", "notebook", "nvidia.com/gpu.shared", "GPU-2::3")
        + pod("team-b", "mig", "serve", "nvidia.com/mig-1g.10gb", "MIG-1")
        + pod("team-c", "by-index", "x" * 100, "nvidia.com/gpu", "3")
        + pod("net", "cni", "c", "vendor.com/nic", "0")
    )
    assert PodResources(path).list() == [
        Given("GPU-0", "team-a/bert-0/train"),
        Given("GPU-1", "team-a/bert-0/train"),
        Given("GPU-2", "team-b/dev/notebook"),
        Given("MIG-1", "team-b/mig/serve"),
        Given("3", f"team-c/by-index/{'x' * 100}"),
    ]
    rank = rank_of(10)
    proc.add(10, TORCHELASTIC_RUN_ID="bert", POD_UID=POD)
    boards = [reading(0, p10=1), reading(1), reading(2), reading(3), GpuReading("4:0", "MIG-1")]
    assert allocations(collector(proc, [rank], *boards, pods=path)) == [
        ("0", "GPU-0", "kubernetes", "team-a/bert-0/train"),
        ("1", "GPU-1", "kubernetes", "team-a/bert-0/train"),
        ("2", "GPU-2", "kubernetes", "team-b/dev/notebook"),
        ("3", "GPU-3", "kubernetes", f"team-c/by-index/{'x' * 100}"),
        ("4:0", "MIG-1", "kubernetes", "team-b/mig/serve"),
    ]


def test_pod_of_a_rank_is_that_of_its_gpu(kubelet: tuple[Path, Kubelet], proc: Proc) -> None:
    path, handler = kubelet
    handler.answer = pod("team-a", "bert-0", "train", "nvidia.com/gpu", "GPU-0", "GPU-1")
    rank = rank_of(1, namespace=NAMESPACE)
    proc.add(10, own_pid=1, cgroup=f"0::/kubepods/pod{POD}/x\n")
    seen = collector(proc, [rank], reading(0, p10=1), reading(1), pods=path)
    assert seen.pod_of(identity_of(rank)) is None
    seen.sample()
    assert seen.pod_of(identity_of(rank)) == Pod("team-a", "bert-0", POD)
    assert seen.pod_of(identity_of(rank_of(2))) is None
    handler.answer = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(CollectorUnavailableError):
        seen.sample()
    assert seen.pod_of(identity_of(rank)) is None, "another pod may have the GPU by now"


def test_pod_of_a_shared_gpu_is_not_known(kubelet: tuple[Path, Kubelet], proc: Proc) -> None:
    path, handler = kubelet
    handler.answer = b"".join(
        pod("team-a", name, "c", "nvidia.com/gpu.shared", f"GPU-0::{replica}")
        for replica, name in enumerate(("one", "two"))
    )
    rank = rank_of(10)
    proc.add(10, POD_UID=POD)
    seen = collector(proc, [rank], reading(0, p10=1), pods=path)
    seen.sample()
    assert seen.pod_of(identity_of(rank)) is None


def test_pod_that_a_rank_only_claims_is_not_its_own(kubelet: tuple[Path, Kubelet], proc: Proc) -> None:
    """Neither by the GPU that torch reports, nor by the process of another user."""
    path, handler = kubelet
    handler.answer = pod("team-b", "theirs", "c", "nvidia.com/gpu", "GPU-0")
    proc.add(10, POD_UID=POD)
    claims = RankProcess("r", 0, 7, 0, START, device_uuid="0")
    liar = RankProcess("r", 1, 10, 0, START, uid=os.geteuid() + 1)
    seen = collector(proc, [claims, liar], reading(0, p10=1), pods=path)
    seen.sample()
    assert seen.of(identity_of(claims)).gpu_uuid == "GPU-0"
    assert seen.pod_of(identity_of(claims, pod_uid=POD)) is None
    assert seen.pod_of(identity_of(liar, pod_uid=POD)) is None


@pytest.mark.parametrize("answer", [grpc.StatusCode.UNIMPLEMENTED, b"\xff\xff not protobuf"])
def test_silent_kubelet_is_logged_once_and_owners_stay(
    kubelet: tuple[Path, Kubelet], proc: Proc, answer: bytes | grpc.StatusCode
) -> None:
    path, handler = kubelet
    handler.answer = answer
    rank = rank_of(10)
    proc.add(10, SLURM_JOB_ID="5")
    seen = collector(proc, [rank], pods=path)
    with pytest.raises(CollectorUnavailableError, match=r"the kubelet does not answer on .*kubelet\.sock"):
        seen.sample()
    assert seen.of(identity_of(rank)).slurm_job_id == "5"


def test_a_node_without_a_kubelet_lists_nothing() -> None:
    assert PodResources(Path("/nowhere/kubelet.sock")).list() == []


def test_a_kubelet_that_is_not_for_us_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "exists", forbidden)
    assert PodResources().list() == []
