"""The verdict on the mean steps of a run's ranks, for a run of which no other one is published. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torchperfd.durations import duration
from torchperfd.process_settings import UNBOUND, CpuBinding
from torchperfd_daemon.diagnosis.cause_table import SCRIPT_WORDS, script_code_phase
from torchperfd_daemon.diagnosis.claims import limit_claim
from torchperfd_daemon.diagnosis.remedies import UNMEASURED, LoaderCounsel, loader_remedy, stage_words
from torchperfd_daemon.diagnosis.verdict import (
    INPUT_BOUND_SHARE,
    SCRIPT_CODE_SHARE,
    Cause,
    Verdict,
    capture_command,
)
from torchperfd_daemon.diagnosis.waits import longest_wait
from torchperfd_daemon.diagnosis.windows import could_have_found
from torchperfd_daemon.loader_workers import LoaderFacts

LEAST_STEPS: Final = 20
"""With fewer steps, no run is called healthy by its mean step..."""
LEAST_LONG_STEPS: Final = 8
"""...or with fewer than this, if they have taken ten seconds."""
_LONG_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RankProfile:
    """The mean training step of one rank, in seconds.

    Attributes:
        loader: None if unknown.
        hides_script_code: Whether the phase ``other`` may have more than the script's own code: waits for a
            device, or phases that are not recorded.
        has_ended: Whether it makes no more steps, in which a cause could still be found.
        world_size: How many ranks its job has, on all nodes.
        binding: To how many CPUs it is bound, if these are fewer than its share.
        device_phase_seconds: Parts of the step on its device, by phase; empty without device times.
        forward_unseen: Whether the model is trained, and its forward is in no phase but ``other``.
        blocked_seconds: Kept from running by other threads of the process (:mod:`~.blocked`).
        queued_seconds: Runnable without a processor (run-queue delay).
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
    device_phase_seconds: dict[str, float] = field(default_factory=dict)
    forward_unseen: bool = False
    blocked_seconds: float = 0.0
    queued_seconds: float = 0.0
    binding: CpuBinding = UNBOUND

    @property
    def wait_seconds(self) -> float:
        """The wait for other ranks, of the host or of the device."""
        return longest_wait(self.phase_seconds, self.device_phase_seconds)

    @property
    def device_busy(self) -> float | None:
        """Not known of a mean step."""
        return None

    def share(self, phase: str) -> float:
        """Return the phase's part of the step, 0 to 1."""
        return self.phase_seconds.get(phase, 0.0) / self.step_seconds if self.step_seconds else 0.0


def diagnose(
    run: str,
    ranks: Sequence[RankProfile],
    cost: LoaderCounsel = UNMEASURED,
    p95_of: Callable[[int], float] = lambda _: 0.0,
) -> Verdict:
    """Return the verdict on a run from its ranks' average training steps.

    A run is input-bound if its worst rank waits for data for :data:`INPUT_BOUND_SHARE` of the
    step. The rank is named unless every rank waits for at least half of that share. Script code is the cause
    if it takes :data:`SCRIPT_CODE_SHARE` of the step on most ranks, and no device may work meanwhile. With
    too few steps to find that the cause is unknown, and so it is while a run goes on and no other cause could
    have been published. Without a cause, :func:`~.claims.limit_claim` decides whether the job is healthy.

    Args:
        ranks: All ranks of the job that are known here; those without a step say nothing.
        cost: Returns the cost of a loader's worker on this machine.
        p95_of: Returns the 95th percentile of a rank's newest steps in seconds; 0 if unknown.
    """
    seen = [rank for rank in ranks if rank.steps and rank.step_seconds > 0]
    if not seen:
        return Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")
    capture = capture_command(run)
    unseen = max(rank.world_size for rank in ranks) - len({rank.rank for rank in seen})
    found = [each for each in (_input_bound(run, seen, cost), _script_code(run, seen)) if each]
    if found:
        first, *others = sorted(found, key=lambda each: -each.share)
        return limit_claim(replace(first, others=tuple(others)), seen, unseen)
    slowest = max(seen, key=lambda rank: rank.step_seconds)
    if not slowest.phase_seconds:
        words = f"a step takes {duration(slowest.step_seconds)}, and its phases were not recorded"
        return Verdict(Cause.UNKNOWN, run, slowest.node, None, "", words, 0.0, capture)
    may_change = not slowest.has_ended and not could_have_found(slowest.steps, slowest.step_seconds)
    if may_change or not _are_enough(slowest):
        words = f"too early: {slowest.steps} {'step' if slowest.steps == 1 else 'steps'}"
        if slowest.has_ended:
            words += f" after the first; a verdict needs {LEAST_STEPS}"
        else:
            words += " so far"
        return Verdict(Cause.UNKNOWN, run, slowest.node, None, "", words, 0.0, capture)
    phase = max(slowest.phase_seconds, key=lambda name: slowest.phase_seconds[name])
    words = (
        f"nothing stands out: {phase} is {slowest.share(phase):.0%} of a {duration(slowest.step_seconds)}"
        f" step, data {slowest.share('data'):.0%}"
    )
    healthy = Verdict(Cause.NONE, run, slowest.node, None, phase, words, 0.0, capture)
    return limit_claim(healthy, seen, unseen, p95_seconds=p95_of(slowest.rank))


def _input_bound(run: str, seen: Sequence[RankProfile], cost: LoaderCounsel) -> Verdict | None:
    worst = max(seen, key=lambda rank: rank.share("data"))
    if worst.share("data") < INPUT_BOUND_SHARE:
        return None
    alike = all(rank.share("data") >= INPUT_BOUND_SHARE / 2 for rank in seen)
    waited = worst.phase_seconds["data"]
    ranks = max(len(seen), worst.world_size)
    remedy = loader_remedy(worst.loader, worst.step_seconds, waited, cost, ranks=ranks, binding=worst.binding)
    return Verdict(
        remedy.cause or Cause.INPUT_BOUND,
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
    if any(rank.hides_script_code or not _are_enough(rank) for rank in seen):
        return None
    phase = script_code_phase([(rank.phase_seconds, rank.step_seconds) for rank in seen])
    typical = sorted(seen, key=lambda rank: rank.share(phase))[(len(seen) - 1) // 2]
    if typical.share(phase) < SCRIPT_CODE_SHARE:
        return None
    spent = typical.phase_seconds[phase]
    return Verdict(
        Cause.SCRIPT_CODE,
        run,
        typical.node,
        None,
        phase,
        f"{SCRIPT_WORDS[phase]} takes {duration(spent)} of each {duration(typical.step_seconds)} step"
        f" ({typical.share(phase):.0%})",
        spent,
        capture_command(run),
        step_seconds=typical.step_seconds,
    )


def _are_enough(rank: RankProfile) -> bool:
    """Return whether a mean step says more than how a run starts."""
    long_enough = rank.steps * rank.step_seconds >= _LONG_S
    return rank.steps >= (LEAST_LONG_STEPS if long_enough else LEAST_STEPS)
