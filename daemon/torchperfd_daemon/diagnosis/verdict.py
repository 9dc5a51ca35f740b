"""The verdict on a run (cause, place, evidence, cost and next command) and the newest findings on it.

Triggers fire on `RunFindings`, so that they and the verdict never disagree.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Final

from torchperfd.model.card import command_after_run
from torchperfd.model.formatting import duration
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.messages import Evidence, Label, Name, Seconds
from torchperfd.model.source_lines import InputStages, SlowLine
from torchperfd.model.step_account import Account
from torchperfd_daemon.diagnosis.detect.straggler import Stall


class Cause(Enum):
    """Why a run is slow."""

    INPUT_BOUND = "input-bound"
    HOST_BOUND = "host-bound"
    SYNCHRONISATION = "needless synchronisation"
    SLOW_RANK = "slow rank"
    GARBAGE_COLLECTION = "garbage collection"
    CPU_CONTENTION = "CPU contention"
    CGROUP_THROTTLING = "CPU quota"
    SLOW_IO = "slow storage"
    GPU_THROTTLING = "GPU throttling"
    GPU_SHARED = "GPU shared"
    COLLECTIVE = "collective or network"
    PIPELINE_IMBALANCE = "pipeline imbalance"
    CHECKPOINT = "checkpoint"
    RECOMPILATION = "recompilation"
    MEMORY_PRESSURE = "memory pressure"
    SCRIPT_CODE = "script code"
    UNEVEN_WORK = "uneven work"
    INTERPRETER_LOCK = "interpreter lock"
    CPU_AFFINITY = "CPU affinity"
    TOO_MANY_THREADS = "too many threads"
    EPOCH_START = "epoch start"
    SLOW_WORKER = "slow worker"
    WORKER_OVERHEAD = "worker overhead"
    GROWING_STEPS = "growing steps"
    DEBUG_SWITCH = "debugging switch"
    SCRIPT_COLLECTIVES = "script collectives"
    SMALL_BATCHES = "small batches"
    HANG = "hang"
    NONE = "none"
    UNKNOWN = "unknown"

    @property
    def slug(self) -> str:
        """The name of the cause's page in ``docs/causes``, without its ending."""
        return self.value.lower().replace(" ", "-")


_NEXT: Final[Mapping[Cause, str]] = {
    Cause.CGROUP_THROTTLING: "torchperfd doctor",
    Cause.CPU_CONTENTION: "torchperfd doctor",
    Cause.GPU_THROTTLING: "torchperfd doctor",
    Cause.GPU_SHARED: "torchperfd doctor",
    Cause.MEMORY_PRESSURE: "torchperfd capture --run {run} --kind memory",
}


def _sound(stages: InputStages) -> InputStages | None:
    return stages if LoaderFacts(stages=stages).is_sound() else None


def _stepped(account: Account) -> Account | None:
    return account if account.step_seconds else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The diagnosis of a run.

    Attributes:
        cause: Why the run is slow.
        rank: The rank that causes it; None if all ranks are alike.
        phase: The phase that is affected; empty if it is not a single one.
        evidence: The measurements, in words.
        cost_seconds_per_step: What the run would save per step; 0 for a hang, during which no step ends.
        onset_step: The first slower step; None if the run was never faster.
        onset_unix_seconds: When that step ended; 0 without an onset.
        has_grown: Whether the cost came with the run's slowdown and did not exist before.
        stalled_seconds: For a hang, the time since the last step ended.
        window_seconds: The length of the newest window that the evidence covers; 0 without a window.
        step_seconds: The step that contains the cost; 0 without one.
        line: The slow line of the script, if stacks were sampled.
        stages: For a wait for data, what the stages of making a batch take; None if unknown.
        others: Further causes of the same run, the one with the largest share of its step first.
        fix: What to change, for a remedy that depends on measurements; the usual ones are in ``remedies.py``.
        saves_seconds: The predicted saving of the fix per step; 0 without a prediction.
        unseen_ranks: Ranks of the job that were not seen, where the verdict depends on them; without a cause,
            it is unknown only because of these.
        account: Where each millisecond of the run's step goes; None for a hang, or without a step.
        note: The state of the machine with what it costs, in words; empty if it is nothing to know of. It is
            no cause: the run's owner may be unable to change it.
    """

    cause: Cause
    run: Label
    node: Label = ""
    rank: int | None = None
    phase: Name = ""
    evidence: Evidence = ""
    cost_seconds_per_step: Seconds = 0.0
    next_command: str = ""
    onset_step: int | None = None
    onset_unix_seconds: float = 0.0
    has_grown: bool = False
    stalled_seconds: Seconds = 0.0
    window_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    line: SlowLine | None = None
    stages: Annotated[InputStages, _sound] | None = None
    others: "tuple[Verdict, ...]" = ()
    fix: Evidence = ""
    saves_seconds: Seconds = 0.0
    unseen_ranks: int = 0
    account: Annotated[Account, _stepped] | None = None
    note: Evidence = ""

    @property
    def share(self) -> float:
        """The cost as a part of the step that contains it; 0 without one.

        Windows of different verdicts may contain steps of different lengths, so that only shares compare.
        """
        return self.cost_seconds_per_step / self.step_seconds if self.step_seconds else 0.0

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        where = "" if self.rank is None else f" · rank {self.rank} on {self.node}"
        window = f" (last {self.window_seconds:.0f} s)" if self.window_seconds >= 1 else ""
        return f"{self.cause.value}{where} · {self.evidence}{window}"


def of_step(seconds: float, step_seconds: float) -> str:
    """Return a part of the step in words, such as "40 ms of each 100 ms step"."""
    return f"{duration(seconds)} of each {duration(step_seconds)} step"


_LINE: Final = re.compile(r", most of it in \S+ at [^;·]*?:\d+")
"""The line of a script in the evidence of waits for the device."""
_HIDDEN: Final = "its stacks are shown to its own user only"


def without_lines(text: str) -> str:
    """Return evidence without the lines of the script, for users other than the run's."""
    return _LINE.sub("", text)


def public_evidence(cause: str, evidence: str) -> str:
    """Return a verdict's evidence as users other than the run's may see it: without lines and stacks."""
    return _HIDDEN if cause == Cause.HANG.value else without_lines(evidence)


def public_summary(verdict: Verdict) -> str:
    """Return a verdict in one line as users other than the run's may see it."""
    shown = public_evidence(verdict.cause.value, verdict.evidence)
    return without_lines(replace(verdict, evidence=shown).summary)


def next_command(cause: Cause, run: str) -> str:
    """Return the command that shows more about a cause."""
    return _NEXT[cause].format(run=shlex.quote(run)) if cause in _NEXT else capture_command(run)


def working_command(command: str, *, is_over: bool, has_cuda: bool) -> str:
    """Return a verdict's next command in the form that works now; empty if none does.

    Args:
        is_over: Whether the run has ended.
        has_cuda: Whether any of its ranks has CUDA memory; otherwise no snapshot of that can be made.
    """
    if is_over:
        return command_after_run(command)
    return command if has_cuda else command.replace("--kind memory", "--steps 5 --profile-memory")


def capture_command(run: str) -> str:
    """Return the command that captures the next steps of a run, which shows more than a verdict."""
    return f"torchperfd capture --run {shlex.quote(run)} --steps 5"


@dataclass(frozen=True, slots=True)
class RunFindings:
    """The newest findings on one run.

    Attributes:
        step_seconds: Its present mean step; 0 before it is known.
        normal_seconds: The step before the run became slower; None while it is not slower than usual.
        culprit: The rank that the first verdict names; None if it names none.
        late_seconds: For each straggler, its own work per step above the peers' median.
        peer_seconds: The peers' median own work per step.
        stall: The longest stall of any rank now.
    """

    step_seconds: float = 0.0
    normal_seconds: float | None = None
    culprit: int | None = None
    late_seconds: Mapping[int, float] = field(default_factory=dict)
    peer_seconds: float = 0.0
    stall: Stall | None = None
    stalled_ranks: tuple[int, ...] = ()
