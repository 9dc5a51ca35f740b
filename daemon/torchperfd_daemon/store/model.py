"""The data that a rank reports: its identity, its cumulative totals, and its steps in columns.

The kinds of parallelism that a job's ranks are split by come from the names of its process groups.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Final

from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.process import UNBOUND, Coordinate, CpuBinding, HostMemory
from torchperfd.model.source_lines import SyncWait, TimedLine

_WITHOUT_PHASES: Final = 2
"""From this degradation level on, clients do not record the phases within a step."""
_OF_THE_MODEL: Final = {"forward", "backward"}
_TIME_THE_MODEL: Final = ("models", "forward", "backward", "optimizers")
"""Hooks without which the model's own time is in the phase ``other``."""


class State(Enum):
    """The activity of a rank, as its client reports it."""

    STARTING = "starting"
    TRAINING = "training"
    VALIDATING = "validating"
    CHECKPOINTING = "checkpointing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The identity of a training process; see the message of the same name."""

    run: str
    rank: int
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    job_name: str = ""
    node: str = ""
    pid_namespace: int = 0
    pid: int = 0
    process_start_ticks: int = 0
    script: str = ""
    torch_version: str = ""
    python_version: str = ""
    slurm_job_id: str = ""
    pod_uid: str = ""
    command: str = ""

    @property
    def is_simulated(self) -> bool:
        """Whether there is no such process, as with the ranks of ``torchperfd serve --demo``."""
        return self.pid == 0


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """The key that distinguishes training processes.

    Attributes:
        run: The run's name, as the process reports it.
        rank: Its rank, as the process reports it.
        node: Its node, as the process reports it; likewise the next three.
        pid_namespace: Inode of its pid namespace.
        pid: Its process id in that namespace.
        start_ticks: Its start time in clock ticks since boot.
        uid: Its user, from the kernel; None if unknown.
        peer_pid: Its process id in the daemon's own pid namespace, from the kernel; 0 if unknown.
    """

    run: str
    rank: int
    node: str
    pid_namespace: int
    pid: int
    start_ticks: int
    uid: int | None = None
    peer_pid: int = 0

    @classmethod
    def of(cls, identity: RankIdentity, uid: int | None, peer_pid: int) -> "ProcessKey":
        """Return the key of a process with this identity."""
        return cls(
            identity.run,
            identity.rank,
            identity.node,
            identity.pid_namespace,
            identity.pid,
            identity.process_start_ticks,
            uid,
            peer_pid,
        )


@dataclass(frozen=True, slots=True)
class PhaseTotal:
    """One phase since attach: calls, exclusive nanoseconds, sum of their squares per call.

    ``device_ns`` is of the ``device_calls`` that were timed on the device.
    """

    calls: int = 0
    ns: int = 0
    squares: float = 0.0
    device_ns: int = 0
    device_calls: int = 0


@dataclass(frozen=True, slots=True)
class KindTotal:
    """All steps of one kind since attach; unknown values are 0."""

    steps: int = 0
    ns: int = 0
    samples: int = 0
    phases: dict[str, PhaseTotal] = field(default_factory=dict)
    squares: float = 0.0
    micro_batches: int = 0
    skipped: int = 0
    tokens: int = 0

    def mean_seconds(self, without: "KindTotal") -> tuple[int, float, dict[str, float]]:
        """Return the number of steps, the mean step and each phase's mean, after subtracting some steps."""
        steps = self.steps - without.steps
        if steps <= 0:
            return 0, 0.0, {}
        nothing = PhaseTotal()
        phases = {
            name: (total.ns - without.phases.get(name, nothing).ns) / steps / 1e9
            for name, total in self.phases.items()
        }
        return steps, (self.ns - without.ns) / steps / 1e9, phases


@dataclass(frozen=True, slots=True)
class GcTotal:
    """Collections of one generation of Python's garbage collector from the first step to the newest."""

    calls: int
    ns: int


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Bytes that the caching allocator of a rank's device holds.

    Attributes:
        device_uuid: Of that device, without ``GPU-`` or ``MIG-``; empty if unknown.
    """

    allocated: int
    reserved: int
    peak: int
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """A rank's cumulative totals; see the message ``Account``.

    Values that an older client does not report, or that are unknown, are None, empty or 0.
    """

    train: KindTotal = KindTotal()
    validate: KindTotal = KindTotal()
    recorded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    warmup: KindTotal = KindTotal()
    checkpoint: PhaseTotal | None = None
    gc: tuple[GcTotal, ...] = ()
    compiled: PhaseTotal | None = None
    background_saves: PhaseTotal | None = None
    loader_ready: int | None = None
    cuda: CudaMemory | None = None
    host_memory: HostMemory | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    overhead: float | None = None
    shed: int = 0
    epoch: PhaseTotal = PhaseTotal()
    train_pass: PhaseTotal = PhaseTotal()
    validate_pass: PhaseTotal = PhaseTotal()
    began_ns: int = 0
    ended_ns: int = 0
    loader: LoaderFacts | None = None
    hooks: dict[str, str] = field(default_factory=dict)
    """Why each of the client's hooks is off, by name; empty for one that is on."""
    coordinates: tuple[Coordinate, ...] = ()
    """The rank's place in each dimension of its job."""
    sync_waits: tuple[SyncWait, ...] = ()
    """The lines that wait longest for the device, the longest first."""
    threads: int | None = None
    """How many threads an operation on the CPU may use."""
    cpus: float | None = None
    """How many CPUs the process may use; None if unknown."""
    binding: CpuBinding = UNBOUND
    """To how many CPUs the process is bound, if these are fewer than its share."""
    switches: tuple[str, ...] = ()
    """Debugging switches that are on, as they are written."""
    epoch_starts: PhaseTotal = PhaseTotal()
    """Waits for the first batches of training passes beyond the usual wait; without the first pass."""
    collect_calls: tuple[TimedLine, ...] = ()
    """The lines whose calls of ``gc.collect()`` within training took longest."""
    script_collectives: tuple[TimedLine, ...] = ()
    """The lines whose own collectives took longest."""
    graph_limit: str = ""
    """A function that torch.compile has given up on, such as ``forward() at model.py:12``; empty for none."""
    device_lag: PhaseTotal = PhaseTotal()
    """How far the device was behind the host, by samples."""
    device_work: PhaseTotal = PhaseTotal()
    """What single training steps took on the device without waits for other ranks; calls are such steps."""
    step_blocks: bytes = b""
    """A serialised message ``StepBlocks``, passed on unread; empty while the loop runs."""

    @property
    def hides_script_code(self) -> bool:
        """Whether the phase ``other`` may have more than the script's own code.

        If CUDA is initialised, the host may wait there for a device that works meanwhile. Phases that are not
        recorded are part of it, too: of a step that is compiled as a whole, or of a model that was not found.
        """
        phases = self.train.phases
        on_device = self.cuda is not None or any(phase.device_calls for phase in phases.values())
        is_recorded = phases.keys() >= _OF_THE_MODEL and self.shed < _WITHOUT_PHASES
        return on_device or not is_recorded or any(map(self.hooks.get, _TIME_THE_MODEL))

    @property
    def forward_unseen(self) -> bool:
        """Whether the model is trained, and its forward is in no phase but ``other``.

        Its methods are called instead of the model, or the model was not found.
        """
        phases = self.train.phases
        is_off = self.shed >= _WITHOUT_PHASES or any(map(self.hooks.get, _TIME_THE_MODEL))
        return not is_off and "backward" in phases and "forward" not in phases

    @property
    def sync_wait_ns(self) -> int:
        """The time for which training steps have waited for the device in these lines."""
        return sum(wait.ns for wait in self.sync_waits)

    def device_means(self, step_seconds: float) -> dict[str, float]:
        """Return each phase's time on the device per training step in seconds; empty without device times.

        Steps on the device take as long as on the host, and not all are timed: only their shares are taken.
        """
        spent = {name: phase.device_ns for name, phase in self.train.phases.items() if phase.device_ns}
        whole = sum(spent.values())
        return {name: step_seconds * ns / whole for name, ns in spent.items()}

    def steady_means(self) -> tuple[int, float, dict[str, float]]:
        """Return the number of training steps for means, the mean step and each phase's mean in seconds.

        The first step is left out, as in the client's report, unless it is the only one.
        """
        return self.train.mean_seconds(self.warmup if self.train.steps > 1 else KindTotal())


@dataclass(frozen=True, slots=True)
class ArrivalColumns:
    """Training steps with a collective: index, and when the rank arrived at the first and the last one."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    first_unix_ns: "array[int]" = field(default_factory=lambda: array("q"))
    last_unix_ns: "array[int]" = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Consecutive training steps: one array per column, nanoseconds, all of one length.

    ``arrivals`` has a length of its own: that of the steps with a collective. ``next_step`` is the number of
    the last step plus one; 0 if the client did not send it.
    """

    end_unix_ns: "array[int]"
    duration_ns: "array[int]"
    phases: dict[str, "array[int]"]
    arrivals: ArrivalColumns = field(default_factory=ArrivalColumns)
    next_step: int = 0


PARALLELISM_KINDS: Final = ("data", "tensor", "pipeline", "expert", "context")
"""In the order in which people name them."""

# Meshes are named by scripts: torch's tutorials, torchtitan, accelerate and Megatron's process groups. A name
# is compared as a whole, so that a flattened mesh such as dp_cp is none of them.
_KIND_NAMES: Final = {
    "data": "dp|data|ddp|fsdp|replicate|shard|dp_replicate|dp_shard|hsdp|batch|data_parallel",
    "tensor": "tp|tensor|mp|model|tensor_parallel|tensor_model_parallel",
    "pipeline": "pp|pipe|pipeline|stage|pipeline_parallel|pipeline_model_parallel",
    "expert": "ep|expert|expert_parallel|expert_model_parallel",
    "context": "cp|sp|context|context_parallel|sequence_parallel",
}
_KIND_BY_NAME: Final = {name: kind for kind, names in _KIND_NAMES.items() for name in names.split("|")}
_GROUP_SUFFIX: Final = re.compile(r"[_-]group$")


@lru_cache(maxsize=256)
def parallelism_kind(dimension: str) -> str:
    """Return the kind of a dimension's parallelism; empty if its name says none."""
    return _KIND_BY_NAME.get(_GROUP_SUFFIX.sub("", dimension.lower()).replace("-", "_"), "")


def rank_in(kind: str, coordinates: Iterable[Coordinate]) -> int | None:
    """Return a rank's place in one kind of parallelism; None if the job is not split by it.

    Two dimensions of a kind, as those of hybrid sharding, count as one, of which the first is the slower.
    """
    place = None
    for each in coordinates:
        if parallelism_kind(each.dimension) == kind:
            place = (place or 0) * each.size + each.rank
    return place


def coordinates_text(coordinates: Sequence[Coordinate]) -> str:
    """Return a rank's coordinates as people write them: ``pp=1 dp=0``."""
    return " ".join(f"{each.dimension}={each.rank}" for each in coordinates)
