"""Ownership: which job a rank belongs to, and to which job each GPU was given.

The owner is found from the rank's process (Slurm's or Kubernetes' control group, and the environment), the
GPUs that it holds memory on, and the kubelet.
"""

import contextlib
import math
import pwd
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torchperfd.model.formatting import one_line
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import GpuReading
from torchperfd_daemon.collectors.kubelet import PodResources
from torchperfd_daemon.collectors.process import RankProcess, Ranks, has_users, is_here
from torchperfd_daemon.collectors.procfs import parse_cpu_list, parse_stat, parse_table, read
from torchperfd_daemon.store.model import RankIdentity


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a rank; unknown fields are empty.

    Attributes:
        slurm_job_id: Slurm's number of the job.
        pod_uid: Kubernetes' uid of the pod.
        torchelastic_run_id: torchrun's run id.
        gpu_uuid: The GPU, or MIG instance, that the rank's process holds most memory on, by the driver or,
            where that shows none of its processes, by the rank itself.
    """

    slurm_job_id: str = ""
    pod_uid: str = ""
    torchelastic_run_id: str = ""
    gpu_uuid: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of Kubernetes."""

    namespace: str
    name: str
    uid: str


Owners = Callable[[RankIdentity], Owner]
"""Returns the owner of a rank."""


def from_identity(identity: RankIdentity) -> Owner:
    """Return the owner from the rank's own report."""
    return Owner(slurm_job_id=identity.slurm_job_id, pod_uid=identity.pod_uid)


# /slurm/uid_1000/job_77/step_0 with cgroups of version 1, which may name the node after "slurm";
# /system.slice/slurmstepd.scope/job_77/step_0/user/task_0 with those of version 2.
_JOB_CGROUP: Final = re.compile(r"/[^/\n]*slurm[^/\n]*(?:/uid_\d+)?/job_(\d+)(?:/|$)", re.MULTILINE)


def job_of_cgroup(text: str) -> str:
    """Return the number of the job in the text of ``/proc/<pid>/cgroup``; empty without one."""
    found = _JOB_CGROUP.search(text)
    return found[1] if found else ""


def gpus_of_environment(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the indices of the node's GPUs that Slurm gave to a task; empty if unknown.

    The step's variable comes first, then the job's. Both count all GPUs of the node, while
    ``CUDA_VISIBLE_DEVICES`` may count only the job's own.
    """
    text = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS", "")
    with contextlib.suppress(ValueError):
        return frozenset(map(str, parse_cpu_list(text)))
    return frozenset()


# kubepods-burstable-pod<uid>.slice with the systemd driver, which writes the uid with underscores;
# kubepods/burstable/pod<uid> without. Pods from a file have the hash of that file as uid.
_POD_CGROUP: Final = re.compile(
    r"kubepods[^:\n]*?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)


def pod_of_cgroup(text: str) -> str:
    """Return the uid of the pod in the text of ``/proc/<pid>/cgroup``; empty without one."""
    found = _POD_CGROUP.search(text)
    return found[1].replace("_", "-") if found else ""


_MAX_CHARACTERS: Final = 200
# torchrun's id of a run without a name.
_UNNAMED_RUN: Final = "none"
_WANTED_VARIABLES: Final = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "POD_UID",
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """The owner in a process's environment and control group, which never changes."""

    owner: Owner
    torchrun: bool
    slurm_gpus: frozenset[str]


_RETRY_NAME_S: Final = 300.0


class UserNames:
    """The names of users, as this node knows them.

    Looking one up may wait for a directory service such as LDAP. So a name is looked up once for as long as
    it is asked for, and a user without a name again after five minutes: the service may have been away.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[str, float]] = {}

    def of(self, uid: int | None) -> str:
        """Return a user's name without waiting, the number where there is none; empty if not looked up."""
        return self._known[uid][0] if uid in self._known else ""

    def look_up(self, uids: Iterable[int]) -> None:
        """Look up the names of these users, and forget all others."""
        self._known = {uid: self._current(uid) for uid in set(uids)}

    def _current(self, uid: int) -> tuple[str, float]:
        """Return a user's name, and until when it counts."""
        if uid in self._known and self._clock() < self._known[uid][1]:
            return self._known[uid]
        try:
            return one_line(pwd.getpwuid(uid).pw_name, _MAX_CHARACTERS), math.inf
        except KeyError:
            return str(uid), self._clock() + _RETRY_NAME_S


class OwnershipCollector:
    """Finds the owner of each rank and of each GPU.

    Args:
        gpus: Returns the newest reading of each GPU.
        pods: The kubelet's list of the devices of containers.
        users: Has the names of the ranks' users looked up; None to look up none.
    """

    name = "ownership"

    def __init__(
        self,
        ranks: Ranks,
        gpus: Callable[[], Sequence[GpuReading]],
        pods: PodResources | None = None,
        proc: Path = Path("/proc"),
        users: UserNames | None = None,
    ) -> None:
        self._ranks = ranks
        self._gpus = gpus
        self._users = users
        self._pods = pods or PodResources()
        self._proc = proc
        self._facts: dict[RankProcess, _Facts] = {}
        self._owners: dict[tuple[str, int, int, int], Owner] = {}
        self._held: dict[tuple[str, int, int, int], str] = {}
        self._pods_of_gpus: dict[str, set[tuple[str, str]]] = {}

    def of(self, identity: RankIdentity) -> Owner:
        """Return a rank's owner, from its own report and from its process."""
        declared = from_identity(identity)
        seen = self._owners.get(_key_of(identity), declared)
        return replace(
            seen,
            slurm_job_id=declared.slurm_job_id or seen.slurm_job_id,
            pod_uid=declared.pod_uid or seen.pod_uid,
        )

    def pod_of(self, identity: RankIdentity) -> Pod | None:
        """Return the pod of a rank; None if it is not known for certain.

        By the kubelet, it alone has the GPU that the rank's process holds by the driver: what a rank reports
        itself could name another's pod.
        """
        pods = self._pods_of_gpus.get(self._held.get(_key_of(identity), ""), set())
        uid = self.of(identity).pod_uid
        if len(pods) != 1 or not uid:
            return None
        [(namespace, name)] = pods
        return Pod(namespace, name, uid)

    def sample(self) -> Sequence[Family]:
        """Return which job or pod each GPU is assigned to; unassigned GPUs have no series.

        Raises:
            CollectorUnavailableError: The kubelet does not answer.
        """
        readings = self._gpus()
        holders = dict(self._holders(readings))
        by_uuid = {reading.uuid.partition("-")[2]: reading.uuid for reading in readings if reading.uuid}
        facts, owners, held = {}, {}, {}
        ranks = list(self._ranks())
        for rank in ranks:
            pid, gpu = holders.get((rank.pid, rank.start_ticks), (None, ""))
            if pid is None and is_here(self._proc, rank):
                pid = rank.pid
            # An ended process keeps its owner until its series are dropped; there is nothing new to read.
            known = self._facts.get(rank) or (self._read_facts(pid, rank) if pid is not None else None)
            if known is not None:
                facts[rank] = known
            key = (rank.run, rank.rank, rank.pid, rank.start_ticks)
            if known is not None and gpu:
                held[key] = gpu
            before = self._owners.get(key, Owner())
            # A daemon in a container sees none of the processes that the driver names.
            gpu = gpu or by_uuid.get(rank.device_uuid, "")
            owners[key] = replace(
                known.owner if known is not None else Owner(), gpu_uuid=gpu or before.gpu_uuid
            )
        self._facts, self._owners, self._held = facts, owners, held
        self._pods_of_gpus = {}
        if self._users is not None:
            # This may wait, and the page reads all other owners meanwhile.
            self._users.look_up(rank.uid for rank in ranks if rank.uid is not None)

        family = Family(
            "gpu_allocation_info",
            "Who a GPU was given to, and by what.",
            "gauge",
            ("gpu", "gpu_uuid", "allocator", "allocation"),
        )
        by_name = {name: reading for reading in readings for name in (reading.uuid, reading.gpu) if name}
        given = [
            (by_name[each.device], each.container) for each in self._pods.list() if each.device in by_name
        ]
        self._pods_of_gpus = _pods_of_gpus(given)
        for labels in sorted(set(self._allocations(given, by_name))):
            family.add(1, *labels)
        return [family]

    def _allocations(
        self, given: Iterable[tuple[GpuReading, str]], by_name: Mapping[str, GpuReading]
    ) -> Iterator[tuple[str, str, str, str]]:
        for gpu, container in given:
            yield gpu.gpu, gpu.uuid, "kubernetes", container
        for rank, facts in self._facts.items():
            owner = self._owners[rank.run, rank.rank, rank.pid, rank.start_ticks]
            held = {owner.gpu_uuid} if owner.gpu_uuid else set()
            if owner.slurm_job_id:
                allocator, allocation, names = "slurm", owner.slurm_job_id, facts.slurm_gpus or held
            elif facts.torchrun and not owner.pod_uid:
                allocator, allocation, names = "torchrun", rank.run, held
            else:
                continue
            for name in names:
                if reading := by_name.get(name):
                    yield reading.gpu, reading.uuid, allocator, allocation

    def _holders(self, readings: Iterable[GpuReading]) -> Iterator[tuple[tuple[int, int], tuple[int, str]]]:
        """Yield the processes on GPUs: pid as they see it and start; pid as we see it and GPU.

        Of several GPUs that a process holds memory on, the one that it holds most on is its own:
        contexts that were opened by mistake are small. An instance comes after its GPU and goes before it.
        """
        most: dict[int, tuple[int, str]] = {}
        for reading in readings:
            for pid, size in reading.process_bytes.items():
                if size >= most.get(pid, (0, ""))[0]:
                    most[pid] = (size, reading.uuid)
        for pid, (_, uuid) in most.items():
            try:
                status = parse_table(read(self._proc / str(pid) / "status"))
                start = parse_stat(read(self._proc / str(pid) / "stat")).start_ticks
            except OSError:
                continue  # it has just ended, or is in another namespace
            # Kernels without pid namespaces have no such line: then there is only one id.
            own = int(status.get("NSpid", str(pid)).split()[-1])
            yield (own, start), (pid, uuid)

    def _read_facts(self, pid: int, rank: RankProcess) -> _Facts | None:
        """Return the owner from a process's environment and control group.

        None if it has just ended, or has other users than its session.
        """
        try:
            if not has_users(self._proc, pid, rank.uid, rank.gid):
                return None
            group = read(self._proc / str(pid) / "cgroup")
            environment = self._environment(pid)
            if not has_users(self._proc, pid, rank.uid, rank.gid):
                return None
        except OSError:
            return None
        elastic = environment.get("TORCHELASTIC_RUN_ID", "")
        owner = Owner(
            slurm_job_id=environment.get("SLURM_JOB_ID", "") or job_of_cgroup(group),
            pod_uid=environment.get("POD_UID", "") or pod_of_cgroup(group),
            torchelastic_run_id="" if elastic == _UNNAMED_RUN else elastic,
        )
        return _Facts(owner, bool(elastic), gpus_of_environment(environment))

    def _environment(self, pid: int) -> dict[str, str]:
        """Return the wanted variables of the environment that a process was started with.

        Empty if the process is another user's and the daemon is not root.
        """
        try:
            text = read(self._proc / str(pid) / "environ")
        except OSError:
            return {}
        pairs = (entry.partition("=")[::2] for entry in text.split("\0"))
        return {name: one_line(value, _MAX_CHARACTERS) for name, value in pairs if name in _WANTED_VARIABLES}


def _pods_of_gpus(given: Iterable[tuple[GpuReading, str]]) -> dict[str, set[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for reading, container in given:
        namespace, name, _ = container.split("/", 2)
        found.setdefault(reading.uuid, set()).add((namespace, name))
    return found


def _key_of(identity: RankIdentity) -> tuple[str, int, int, int]:
    return identity.run, identity.rank, identity.pid, identity.process_start_ticks
