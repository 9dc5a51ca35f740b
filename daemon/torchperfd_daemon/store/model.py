"""The data that a rank reports: its identity, its cumulative totals, and its steps in columns.

The kinds of parallelism that a job's ranks are split by come from the names of its process groups.
"""

import re
import shlex
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Annotated, Final

from torchperfd.model.messages import AtMost, Count, KeyedBy, Label, Limit, Wire
from torchperfd.model.process import Coordinate
from torchperfd.model.totals import MAX_PHASES, PhaseTotals, ProcessTotals, StepTotals

_WITHOUT_PHASES: Final = 2
"""From this degradation level on, clients do not record the phases within a step."""
_OF_THE_MODEL: Final = {"forward", "backward"}
# 256 blocks of at most 28 columns need 58 KiB.
_MAX_BLOCKS_BYTES: Final = 64 << 10
_TIME_THE_MODEL: Final = ("models", "forward", "backward", "optimizers")
"""Hooks without which the model's own time is in the phase ``other``."""


PRESENT_S: Final = 10.0
"""The window of a verdict, and so of every number about the present beside one."""

MIN_PRESENT_STEPS: Final = 12
"""As many steps as ranks can be compared by."""


def ended_within(ends_ns: "array[int]", seconds: float) -> int:
    """Return how many steps ended in the last so many seconds before the newest one.

    Args:
        ends_ns: In nanoseconds, oldest first.
    """
    return len(ends_ns) - bisect_left(ends_ns, ends_ns[-1] - int(seconds * 1e9)) if ends_ns else 0


HISTORY_STEPS: Final = 256
"""The newest training steps of a rank that are kept one by one."""


class State(Enum):
    """The activity of a rank, as its client reports it."""

    STARTING = "starting"
    TRAINING = "training"
    VALIDATING = "validating"
    CHECKPOINTING = "checkpointing"
    FINISHED = "finished"


LAST_RANK: Final = 2**24
_RankNumber = Annotated[int, Limit(LAST_RANK)]
_LAST_PID: Final = 2**22
"""Of Linux on 64 bits."""
_MAX_COMMAND_CHARACTERS: Final = 4000


def _pid(value: int) -> int:
    return value if value <= _LAST_PID else 0


def _command(words: str) -> str:
    """Return a command as it is safe to be pasted: every word quoted; empty if it is none.

    One that is cut off would be another command.
    """
    if len(words) > _MAX_COMMAND_CHARACTERS or not words.isprintable():
        return ""
    try:
        return shlex.join(shlex.split(words))
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The identity of a training process; see the message of the same name."""

    run: Label
    rank: int
    world_size: _RankNumber = 1
    local_rank: _RankNumber = 0
    node_rank: _RankNumber = 0
    job_name: Label = ""
    node: Label = ""
    pid_namespace: int = 0
    pid: Annotated[int, _pid] = 0
    process_start_ticks: Count = 0
    script: Label = ""
    torch_version: Label = ""
    python_version: Label = ""
    slurm_job_id: Label = ""
    pod_uid: Label = ""
    command: Annotated[str, _command] = ""

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


def _blocks(packed: bytes) -> bytes:
    return packed if len(packed) <= _MAX_BLOCKS_BYTES else b""


@dataclass(slots=True)
class KindTotal(StepTotals):
    """All steps of one kind since attach, with their phases by name."""

    phases: Annotated[dict[str, PhaseTotals], KeyedBy("phase"), AtMost(MAX_PHASES)] = field(
        default_factory=dict
    )

    def mean_seconds(self, without: "KindTotal") -> tuple[int, float, dict[str, float]]:
        """Return the number of steps, the mean step and each phase's mean, after subtracting some steps."""
        steps = self.steps - without.steps
        if steps <= 0:
            return 0, 0.0, {}
        nothing = PhaseTotals()
        phases = {
            name: (total.ns - without.phases.get(name, nothing).ns) / steps / 1e9
            for name, total in self.phases.items()
        }
        return steps, (self.ns - without.ns) / steps / 1e9, phases


@dataclass(slots=True)
class Totals(ProcessTotals):
    """A rank's cumulative totals; see the message ``Account``. Replaced as a whole, and never changed.

    Attributes:
        warmup: The first training step alone.
        recorded: Steps that the client has recorded.
        dropped: Steps that were lost, by where.
        step_blocks: A serialised message ``StepBlocks``, passed on unread; empty while the loop runs.
    """

    train: KindTotal = field(default_factory=KindTotal)
    validate: KindTotal = field(default_factory=KindTotal)
    recorded: Annotated[Count, Wire("recorded_steps")] = 0
    dropped: dict[str, int] = field(default_factory=dict)
    warmup: KindTotal = field(default_factory=KindTotal)
    step_blocks: Annotated[bytes, _blocks] = b""

    @property
    def off_hooks(self) -> dict[str, str]:
        """Why each hook of the client's that is off is, by name."""
        return {hook.name: hook.reason for hook in self.hooks if not hook.is_on}

    @property
    def hides_script_code(self) -> bool:
        """Whether the phase ``other`` may have more than the script's own code.

        If CUDA is initialised, the host may wait there for a device that works meanwhile. Phases that are not
        recorded are part of it, too: of a step that is compiled as a whole, or of a model that was not found.
        """
        phases = self.train.phases
        on_device = self.cuda is not None or any(phase.device_calls for phase in phases.values())
        is_recorded = phases.keys() >= _OF_THE_MODEL and self.degradation_level < _WITHOUT_PHASES
        return on_device or not is_recorded or any(map(self.off_hooks.get, _TIME_THE_MODEL))

    @property
    def forward_unseen(self) -> bool:
        """Whether the model is trained, and its forward is in no phase but ``other``.

        Its methods are called instead of the model, or the model was not found.
        """
        phases = self.train.phases
        is_off = self.degradation_level >= _WITHOUT_PHASES or any(map(self.off_hooks.get, _TIME_THE_MODEL))
        return not is_off and "backward" in phases and "forward" not in phases

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
