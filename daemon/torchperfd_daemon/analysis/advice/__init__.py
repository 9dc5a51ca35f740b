"""Advice: changes to a training script, with the predicted saving and the exact setting.

Each rule reads an `AdviceContext`, the steps of one trace, and yields findings. `advise` runs all rules and
keeps the findings that save enough. docs/advice.md describes each rule.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from torchperfd_daemon.analysis.advice import communication, launching, loading, memory, precision, updating
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.item import Advice, Finding, Per, gather, weigh
from torchperfd_daemon.analysis.advice.report import advice_to_dict, render_advice
from torchperfd_daemon.analysis.breakdown import Breakdown
from torchperfd_daemon.analysis.idle import Idle
from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.steps import Step, TimedBy
from torchperfd_daemon.analysis.trace import Trace
from torchperfd_daemon.loader_workers import UNMEASURED_COST, WorkerCost

__all__ = ["Advice", "advice_to_dict", "advise", "gather", "render_advice"]

_RULES: Final[tuple[Callable[[AdviceContext], Iterator[Finding]], ...]] = (
    loading.loader_workers,
    loading.pin_memory,
    updating.fused_optimizer,
    updating.zero_grad,
    precision.float64,
    precision.mixed_precision,
    launching.small_operators,
    launching.host_bound,
    launching.host_compute,
    launching.needless_synchronisation,
    communication.gradient_exchange,
    communication.backend,
    communication.data_parallel,
    memory.memory_near_full,
)
# These find work that a loop repeats, which a recording without steps does not show.
_OF_LOOPS: Final = (loading.loader_workers, launching.small_operators)
# These save time of the host.
_ON_HOST: Final = frozenset({"loader-workers", "whole-batches", "data-parallel"})


_WITHIN: Final = {
    "loader-workers": "data",
    "whole-batches": "data",
    "fused-optimizer": "optimizer",
}
"""Rules that save time of one phase: no more than it takes when nothing is recorded."""


def advise(
    trace: Trace,
    steps: Sequence[Step],
    breakdowns: Sequence[Breakdown],
    idle: Idle | None,
    links: Links,
    worker_cost: Callable[[], WorkerCost] = lambda: UNMEASURED_COST,
    *,
    timed_by: TimedBy = "host",
    is_whole: bool = False,
) -> tuple[Advice, ...]:
    """Return the advice for one rank, most time saved first.

    Args:
        steps: Its steps; at least one.
        idle: Why the device idled; None without a device.
        links: The launches of its device events.
        worker_cost: Returns the cost of a loader's worker on the machine.
        timed_by: Whose times the steps are.
        is_whole: The one step is the whole recording, since nothing marks steps in it.
    """
    context = AdviceContext(
        trace,
        list(steps),
        list(breakdowns),
        idle,
        links,
        worker_cost,
        timed_by=timed_by,
        is_whole=is_whole,
    )
    rules = [rule for rule in _RULES if not (is_whole and rule in _OF_LOOPS)]
    found = [finding for rule in rules for finding in rule(context)]
    if context.on_device:
        # Beside a busy device the host's time costs nothing.
        found = [replace(each, of_idle=each.of_idle or each.rule in _ON_HOST) for each in found]
    found = [
        finding if finding.waits else replace(finding, saves_ns=finding.saves_ns / context.inflation)
        for finding in found
    ]
    unrecorded = trace.unrecorded_phase_ns
    found = [
        replace(
            finding, saves_ns=min(finding.saves_ns, unrecorded.get(_WITHIN.get(finding.rule, ""), math.inf))
        )
        for finding in found
    ]
    per: Per = "recording" if is_whole else "step"
    return weigh(found, context.step_ns / context.inflation, context.idle_ns, per)
