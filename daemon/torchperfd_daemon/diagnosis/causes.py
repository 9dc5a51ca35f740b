"""From a run's evidence to its causes, each with what it costs, the costliest first."""

import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

LEAST_SHARE: Final = 0.05
"""A cause that takes less of the step is not told."""
EXPLAINED: Final = 0.5
"""A slowdown of which less than this share has a cause is unknown."""

_IDLE_DEVICE: Final = 0.5

# Mechanisms that measure their own time. Their order is that of blame where two claim the same time: a
# rank that is throttled also waits for the processor, and a loader that waits for the disk starves the loop.
_MEASURED: Final[tuple[tuple[Cause, str, str, Callable[[RankEvidence], float]], ...]] = (
    (
        Cause.CGROUP_THROTTLING,
        "",
        "held back by the control group's CPU quota",
        lambda each: each.throttled_seconds,
    ),
    (
        Cause.CPU_CONTENTION,
        "",
        "ready to run without a processor",
        lambda each: each.queued_seconds - each.throttled_seconds,
    ),
    (Cause.MEMORY_PRESSURE, "", "stalled for memory", lambda each: each.reclaim_seconds),
    (Cause.GARBAGE_COLLECTION, "", "in Python's garbage collector", lambda each: each.collected_seconds),
    (Cause.RECOMPILATION, "", "compiling graphs again", lambda each: each.compiled_seconds),
    (Cause.CHECKPOINT, "checkpoint", "writing checkpoints", lambda each: each.checkpoint_seconds),
    (
        Cause.GPU_THROTTLING,
        "",
        "lost to a device clock lowered by power or heat",
        lambda each: _work(each) * each.device_throttled * each.device_slowdown,
    ),
    (
        Cause.GPU_SHARED,
        "",
        "lost to other processes on the device",
        lambda each: _work(each) * each.device_shared,
    ),
    (Cause.SLOW_IO, "data", "stalled for disk or network storage", lambda each: each.disk_seconds),
)

_NEXT: Final[Mapping[Cause, str]] = {
    Cause.CGROUP_THROTTLING: "torchperfd doctor",
    Cause.CPU_CONTENTION: "torchperfd doctor",
    Cause.GPU_THROTTLING: "torchperfd doctor",
    Cause.GPU_SHARED: "torchperfd doctor",
    Cause.MEMORY_PRESSURE: "torchperfd capture --run {run} --kind memory",
}
_CAPTURE: Final = "torchperfd capture --run {run} --steps 5"


def rank_causes(run: str, ranks: Sequence[RankEvidence]) -> list[Verdict]:
    """Return the causes of a run's lost time, the costliest first.

    A synchronous run loses what its worst rank loses, so a cause costs the greatest time of any rank.
    Mechanisms that measure their own time come first, and what they claim is taken from the phases; what is
    left of these is the phases' own: data, a rank's excess over its peers, collectives. A rank is named
    unless the median of the others has half of it as well. If less than :data:`EXPLAINED` of a slowdown has a
    cause, the answer begins with ``UNKNOWN``, which costs the rest. Where nothing is lost it is ``NONE``.
    """
    seen = [rank for rank in ranks if rank.step_seconds > 0]
    if not seen:
        return [Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")]
    step = statistics.median(rank.step_seconds for rank in seen)
    left = {rank.rank: dict(rank.phase_seconds) for rank in seen}
    verdicts = []
    for cause, phase, words, measure in _MEASURED:
        lost = {rank.rank: max(0.0, measure(rank)) for rank in seen}
        for number, seconds in lost.items():
            _take(left[number], phase, seconds)
        verdicts.append(_verdict(run, seen, cause, phase, words, lost))
    waits = {rank.rank: left[rank.rank].get("data", 0.0) for rank in seen}
    verdicts.append(_verdict(run, seen, Cause.INPUT_BOUND, "data", "waiting for data", waits))
    verdicts += [_slow_rank(run, seen, left), _collective(run, seen), _host_bound(run, seen, left)]
    told = [each for each in verdicts if each.cost_seconds_per_step >= LEAST_SHARE * step]
    told.sort(key=lambda verdict: -verdict.cost_seconds_per_step)
    slower = max(rank.step_seconds - rank.before_seconds if rank.before_seconds else 0.0 for rank in seen)
    unexplained = slower - sum(each.cost_seconds_per_step for each in told)
    if slower >= LEAST_SHARE * step and unexplained > (1 - EXPLAINED) * slower:
        words = f"steps take {_ms(slower)} more than before, {_ms(unexplained)} of it without a known cause"
        told.insert(
            0, Verdict(Cause.UNKNOWN, run, "", None, "", words, unexplained, _next(Cause.UNKNOWN, run))
        )
    if not told:
        words = f"nothing takes {LEAST_SHARE:.0%} of a {_ms(step)} step without need"
        told = [Verdict(Cause.NONE, run, "", None, "", words, 0.0, _next(Cause.NONE, run))]
    return told


def _work(rank: RankEvidence) -> float:
    """Return how long a rank's device works in a step."""
    return rank.step_seconds * rank.device_busy if rank.device_busy is not None else 0.0


def _take(left: dict[str, float], phase: str, seconds: float) -> None:
    """Take time out of a phase, or out of all own work in proportion where the phase is not known."""
    phases = [phase] if phase in left else [name for name in left if name not in WAITING]
    total = sum(left[name] for name in phases)
    for name in phases:
        left[name] *= max(0.0, 1 - seconds / total) if total > 0 else 1.0


def _verdict(
    run: str, seen: Sequence[RankEvidence], cause: Cause, phase: str, words: str, lost: Mapping[int, float]
) -> Verdict:
    """Return the verdict on a cause from what each rank loses by it."""
    worst = max(seen, key=lambda rank: lost[rank.rank])
    cost = lost[worst.rank]
    others = [lost[rank.rank] for rank in seen if rank is not worst]
    alike = not others or statistics.median(others) >= cost / 2
    text = f"{_ms(cost)} of each {_ms(worst.step_seconds)} step {words}"
    return Verdict(
        cause, run, worst.node, None if alike else worst.rank, phase, text, cost, _next(cause, run)
    )


def _slow_rank(run: str, seen: Sequence[RankEvidence], left: Mapping[int, Mapping[str, float]]) -> Verdict:
    """Return the rank whose work is longest above its peers', data and measured mechanisms apart."""
    phases = {name for own in left.values() for name in own} - WAITING - {"data"}
    excess = {
        rank.rank: {
            name: left[rank.rank].get(name, 0.0)
            - statistics.median(
                [left[peer.rank].get(name, 0.0) for peer in seen if peer is not rank] or [math.inf]
            )
            for name in phases
        }
        for rank in seen
    }
    lost = {number: max(0.0, sum(own.values())) for number, own in excess.items()}
    worst = max(lost, key=lambda number: lost[number])
    phase = max(excess[worst], key=lambda name: excess[worst][name], default="")
    return _verdict(
        run, seen, Cause.SLOW_RANK, phase, f"more than its peers need, most of it in {phase}", lost
    )


def _collective(run: str, seen: Sequence[RankEvidence]) -> Verdict:
    """Return the time in collectives that even the rank that arrives last spends there."""
    waits = [rank.phase_seconds.get("collective_wait", 0.0) for rank in seen]
    cost = min(waits) if len(waits) > 1 else 0.0
    lost = dict.fromkeys((rank.rank for rank in seen), cost)
    return _verdict(
        run, seen, Cause.COLLECTIVE, "collective_wait", "in collectives after the last rank has arrived", lost
    )


def _host_bound(run: str, seen: Sequence[RankEvidence], left: Mapping[int, Mapping[str, float]]) -> Verdict:
    """Return the time that devices idle for while the host works, on nothing that is blamed already."""
    lost = {}
    for rank in seen:
        working = sum(seconds for name, seconds in left[rank.rank].items() if name not in WAITING | {"data"})
        idles = rank.device_busy is not None and rank.device_busy < _IDLE_DEVICE
        lost[rank.rank] = max(0.0, working - _work(rank)) if idles else 0.0
    return _verdict(run, seen, Cause.HOST_BOUND, "", "with the device idle while the host works", lost)


def _next(cause: Cause, run: str) -> str:
    return _NEXT.get(cause, _CAPTURE).format(run=shlex.quote(run))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
