"""What a rank reports: who it is, its cumulative totals, and its steps in columns."""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from torchperfd_daemon.loader_workers import LoaderFacts


class State(Enum):
    """What a rank is doing."""

    STARTING = "starting"
    TRAINING = "training"
    VALIDATING = "validating"
    CHECKPOINTING = "checkpointing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Who a training process is; see the message of the same name."""

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

    @property
    def is_simulated(self) -> bool:
        """Whether there is no such process, as with the ranks of ``torchperfd serve --demo``."""
        return self.pid == 0


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """What tells two training processes apart.

    Attributes:
        run: The run's name, as the process gives it.
        rank: Likewise.
        node: Likewise, as are the two below.
        pid_namespace: Inode of its pid namespace.
        pid: In that namespace.
        start_ticks: When it started.
        uid: Its user, as the kernel says; None when that is not known.
        peer_pid: Its process id in the daemon's own pid namespace, as the kernel says; 0 when not known.
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
        """Return the key of a process that says who it is."""
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
    """All steps of one kind since attach; what is not known of them is 0."""

    steps: int = 0
    ns: int = 0
    samples: int = 0
    phases: dict[str, PhaseTotal] = field(default_factory=dict)
    squares: float = 0.0
    micro_batches: int = 0
    skipped: int = 0
    tokens: int = 0

    def mean_seconds(self, without: "KindTotal") -> tuple[int, float, dict[str, float]]:
        """Return how many steps there are, the mean step and the mean of each phase, without some of them."""
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
    """Bytes that the caching allocator of a rank's device holds."""

    allocated: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True)
class Totals:
    """A rank's cumulative account; see the message ``Account``.

    What an older client does not tell, or this one does not know, is None, empty or 0.
    """

    train: KindTotal = KindTotal()
    validate: KindTotal = KindTotal()
    recorded: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    warmup: KindTotal = KindTotal()
    checkpoint: PhaseTotal | None = None
    gc: tuple[GcTotal, ...] = ()
    compiled: PhaseTotal | None = None
    loader_ready: int | None = None
    cuda: CudaMemory | None = None
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

    def steady_means(self) -> tuple[int, float, dict[str, float]]:
        """Return how many training steps means are made of, the mean step and each phase's mean in seconds.

        These are the steps after the first, as in the client's report; the first while it is the only one.
        """
        return self.train.mean_seconds(self.warmup if self.train.steps > 1 else KindTotal())


@dataclass(frozen=True, slots=True)
class ArrivalColumns:
    """Training steps that had a collective: index, and when the rank came to the first and to the last."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    first_unix_ns: "array[int]" = field(default_factory=lambda: array("q"))
    last_unix_ns: "array[int]" = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Consecutive training steps: one array per column, nanoseconds, all of one length.

    ``arrivals`` has a length of its own: that of the steps with a collective.
    """

    end_unix_ns: "array[int]"
    duration_ns: "array[int]"
    phases: dict[str, "array[int]"]
    arrivals: ArrivalColumns = field(default_factory=ArrivalColumns)
