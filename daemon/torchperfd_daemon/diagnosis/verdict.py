"""The verdict on a run: its cause, where, the evidence, the cost and the next command."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from torchperfd.card import command_after_run
from torchperfd.durations import duration
from torchperfd.input_stages import InputStages
from torchperfd.slow_line import SlowLine
from torchperfd_daemon.diagnosis.remedies import ReadWorkerCost, loader_remedy, stage_words, unmeasured
from torchperfd_daemon.diagnosis.windows import could_have_found
from torchperfd_daemon.loader_workers import LoaderFacts

INPUT_BOUND_SHARE: Final = 0.2
"""Waiting for data is reported from this share of the step on."""
SCRIPT_CODE_SHARE: Final = 0.2
"""The script's own code between the phases is reported from this share of the step on."""
LEAST_STEPS: Final = 20
"""With fewer steps, no run is called healthy by its mean step..."""
LEAST_LONG_STEPS: Final = 8
"""...or with fewer than this, if they have taken ten seconds."""
_LONG_S: Final = 10.0


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


@dataclass(frozen=True, slots=True)
class RankProfile:
    """The mean training step of one rank, in seconds.

    Attributes:
        loader: None if unknown.
        hides_script_code: Whether the phase ``other`` may have more than the script's own code: waits for a
            device, or phases that are not recorded.
        has_ended: Whether it makes no more steps, in which a cause could still be found.
        world_size: How many ranks its job has, on all nodes.
    """

    rank: int
    node: str
    steps: int
    step_seconds: float
    phase_seconds: dict[str, float]
    loader: LoaderFacts | None = None
    hides_script_code: bool = False
    has_ended: bool = False
    world_size: int = 1

    def share(self, phase: str) -> float:
        """Return the phase's part of the step, 0 to 1."""
        return self.phase_seconds.get(phase, 0.0) / self.step_seconds if self.step_seconds else 0.0


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
        fix: What to change, for a remedy that depends on measurements; the usual ones are in ``fixes.py``.
        saves_seconds: The predicted saving of the fix per step; 0 without a prediction.
    """

    cause: Cause
    run: str
    node: str
    rank: int | None
    phase: str
    evidence: str
    cost_seconds_per_step: float
    next_command: str
    onset_step: int | None = None
    onset_unix_seconds: float = 0.0
    has_grown: bool = False
    stalled_seconds: float = 0.0
    window_seconds: float = 0.0
    step_seconds: float = 0.0
    line: SlowLine | None = None
    stages: InputStages | None = None
    others: "tuple[Verdict, ...]" = ()
    fix: str = ""
    saves_seconds: float = 0.0

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


def diagnose(run: str, ranks: Sequence[RankProfile], cost: ReadWorkerCost = unmeasured) -> Verdict:
    """Return the verdict on a run from its ranks' average training steps.

    A run is input-bound if its worst rank waits for data for :data:`INPUT_BOUND_SHARE` of the
    step. The rank is named unless every rank waits for at least half of that share. Script code is the cause
    if it takes :data:`SCRIPT_CODE_SHARE` of the step on most ranks, and no device may work meanwhile. With
    too few steps to find that the cause is unknown, and so it is while a run goes on and no other cause could
    have been published.

    Args:
        cost: Returns the cost of a loader's worker on this machine.
    """
    seen = [rank for rank in ranks if rank.steps and rank.step_seconds > 0]
    if not seen:
        return Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")
    capture = capture_command(run)
    found = [each for each in (_input_bound(run, seen, cost), _script_code(run, seen)) if each]
    if found:
        first, *others = sorted(found, key=lambda each: -each.share)
        return replace(first, others=tuple(others))
    slowest = max(seen, key=lambda rank: rank.step_seconds)
    if not slowest.phase_seconds:
        words = f"a step takes {duration(slowest.step_seconds)}, and its phases were not recorded"
        return Verdict(Cause.UNKNOWN, run, slowest.node, None, "", words, 0.0, capture)
    may_change = not slowest.has_ended and not could_have_found(slowest.steps, slowest.step_seconds)
    if may_change or not _are_enough(slowest):
        words = f"too early: {slowest.steps} {'step' if slowest.steps == 1 else 'steps'} so far"
        return Verdict(Cause.UNKNOWN, run, slowest.node, None, "", words, 0.0, capture)
    phase = max(slowest.phase_seconds, key=lambda name: slowest.phase_seconds[name])
    return Verdict(
        Cause.NONE,
        run,
        slowest.node,
        None,
        phase,
        f"nothing stands out: {phase} is {slowest.share(phase):.0%} of a {duration(slowest.step_seconds)}"
        f" step, data {slowest.share('data'):.0%}",
        0.0,
        capture,
    )


def _input_bound(run: str, seen: Sequence[RankProfile], cost: ReadWorkerCost) -> Verdict | None:
    worst = max(seen, key=lambda rank: rank.share("data"))
    if worst.share("data") < INPUT_BOUND_SHARE:
        return None
    alike = all(rank.share("data") >= INPUT_BOUND_SHARE / 2 for rank in seen)
    waited = worst.phase_seconds["data"]
    ranks = max(len(seen), worst.world_size)
    remedy = loader_remedy(worst.loader, worst.step_seconds, waited, cost, ranks=ranks)
    return Verdict(
        Cause.INPUT_BOUND,
        run,
        worst.node,
        None if alike else worst.rank,
        "data",
        f"waiting for data takes {duration(waited)} of each {duration(worst.step_seconds)} step"
        f" ({worst.share('data'):.0%}){stage_words(worst.loader)}",
        waited,
        capture_command(run),
        step_seconds=worst.step_seconds,
        stages=worst.loader.stages if worst.loader else None,
        fix=remedy.fix,
        saves_seconds=remedy.saves_seconds,
    )


def _script_code(run: str, seen: Sequence[RankProfile]) -> Verdict | None:
    """Return the verdict on code that most ranks have; that of a single rank makes it a slow rank."""
    typical = sorted(seen, key=lambda rank: rank.share("other"))[(len(seen) - 1) // 2]
    if any(rank.hides_script_code or not _are_enough(rank) for rank in seen):
        return None
    if typical.share("other") < SCRIPT_CODE_SHARE:
        return None
    spent = typical.phase_seconds["other"]
    return Verdict(
        Cause.SCRIPT_CODE,
        run,
        typical.node,
        None,
        "other",
        f"the script's own code between the phases takes {duration(spent)} of each"
        f" {duration(typical.step_seconds)} step ({typical.share('other'):.0%})",
        spent,
        capture_command(run),
        step_seconds=typical.step_seconds,
    )


def _are_enough(rank: RankProfile) -> bool:
    """Return whether a mean step says more than how a run starts."""
    long_enough = rank.steps * rank.step_seconds >= _LONG_S
    return rank.steps >= (LEAST_LONG_STEPS if long_enough else LEAST_STEPS)


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
