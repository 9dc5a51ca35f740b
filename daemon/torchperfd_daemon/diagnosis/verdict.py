"""The verdict on a run: its cause, where, the evidence, the cost and the next command."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

INPUT_BOUND_SHARE: Final = 0.2
"""From this share of the step on, waiting for data is worth a person's time."""


class Cause(Enum):
    """Why a run is slow."""

    INPUT_BOUND = "input-bound"
    HOST_BOUND = "host-bound"
    SLOW_RANK = "slow rank"
    GARBAGE_COLLECTION = "garbage collection"
    CPU_CONTENTION = "CPU contention"
    CGROUP_THROTTLING = "CPU quota"
    SLOW_IO = "slow storage"
    GPU_THROTTLING = "GPU throttling"
    GPU_SHARED = "GPU shared"
    COLLECTIVE = "collective or network"
    CHECKPOINT = "checkpoint"
    RECOMPILATION = "recompilation"
    MEMORY_PRESSURE = "memory pressure"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What one rank does in an average training step; seconds."""

    rank: int
    node: str
    steps: int
    step_seconds: float
    phase_seconds: dict[str, float]

    def share(self, phase: str) -> float:
        """Return the phase's part of the step, 0 to 1."""
        return self.phase_seconds.get(phase, 0.0) / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer. ``rank`` is None when all ranks are alike; the cost is in seconds per step."""

    cause: Cause
    run: str
    node: str
    rank: int | None
    phase: str
    evidence: str
    cost_seconds_per_step: float
    next_command: str

    @property
    def summary(self) -> str:
        """The one line that people read."""
        where = "" if self.rank is None else f" · rank {self.rank} on {self.node}"
        return f"{self.cause.value}{where} · {self.evidence}"


def diagnose(run: str, ranks: Sequence[RankProfile]) -> Verdict:
    """Return the verdict on a run from its ranks' average training steps.

    A run is input-bound when its worst rank waits for data for :data:`INPUT_BOUND_SHARE` of the
    step; that rank is named unless every rank waits about as much.
    """
    seen = [rank for rank in ranks if rank.steps and rank.step_seconds > 0]
    if not seen:
        return Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")
    capture = f"torchperfd capture --run {shlex.quote(run)} --steps 5"
    worst = max(seen, key=lambda rank: rank.share("data"))
    if worst.share("data") >= INPUT_BOUND_SHARE:
        alike = all(rank.share("data") >= INPUT_BOUND_SHARE / 2 for rank in seen)
        waited = worst.phase_seconds["data"]
        return Verdict(
            Cause.INPUT_BOUND,
            run,
            worst.node,
            None if alike else worst.rank,
            "data",
            f"waiting for data takes {_ms(waited)} of each {_ms(worst.step_seconds)} step"
            f" ({worst.share('data'):.0%}); give the DataLoader more workers",
            waited,
            capture,
        )
    slowest = max(seen, key=lambda rank: rank.step_seconds)
    phase = max(slowest.phase_seconds, key=lambda name: slowest.phase_seconds[name], default="other")
    return Verdict(
        Cause.NONE,
        run,
        slowest.node,
        None,
        phase,
        f"nothing stands out: {phase} is {slowest.share(phase):.0%} of a {_ms(slowest.step_seconds)} step,"
        f" data {slowest.share('data'):.0%}",
        0.0,
        capture,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
