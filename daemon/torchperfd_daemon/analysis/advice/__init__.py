"""Advice: what to change in a training script, what that would save, and the exact setting.

Each rule looks at a `Scene`, one trace's steps, and says what it found; `advise` asks all of them and keeps
what is worth saying. docs/advice.md has a paragraph on each.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from torchperfd_daemon.analysis.advice import communication, launching, loading, memory, precision, updating
from torchperfd_daemon.analysis.advice.item import Advice, Finding, gather, weigh
from torchperfd_daemon.analysis.advice.report import advice_to_dict, render_advice
from torchperfd_daemon.analysis.advice.scene import Scene
from torchperfd_daemon.analysis.breakdown import Breakdown
from torchperfd_daemon.analysis.idle import Idle
from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.trace import Trace
from torchperfd_daemon.loader_workers import UNMEASURED_COST, WorkerCost

__all__ = ["Advice", "advice_to_dict", "advise", "gather", "render_advice"]

_RULES: Final[tuple[Callable[[Scene], Iterator[Finding]], ...]] = (
    loading.loader_workers,
    loading.pin_memory,
    updating.fused_optimizer,
    updating.zero_grad,
    precision.float64,
    precision.mixed_precision,
    launching.small_operators,
    launching.host_bound,
    launching.needless_synchronisation,
    communication.gradient_exchange,
    communication.backend,
    communication.data_parallel,
    memory.memory_near_full,
)


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
) -> tuple[Advice, ...]:
    """Return the advice for one rank, most time saved first; none for a trace without steps.

    Args:
        trace: The loaded trace.
        steps: Its steps.
        breakdowns: What the device did in each of them.
        idle: Why the device idled; None without a device.
        links: What launched its device events.
        worker_cost: Returns what a loader's worker costs on the machine.
    """
    if not steps:
        return ()
    scene = Scene(trace, list(steps), list(breakdowns), idle, links, worker_cost)
    found = [finding for rule in _RULES for finding in rule(scene)]
    found = [
        finding if finding.waits else replace(finding, saves_ns=finding.saves_ns / scene.inflation)
        for finding in found
    ]
    unrecorded = trace.unrecorded_phase_ns
    found = [
        replace(
            finding, saves_ns=min(finding.saves_ns, unrecorded.get(_WITHIN.get(finding.rule, ""), math.inf))
        )
        for finding in found
    ]
    return weigh(found, scene.step_ns / scene.inflation, scene.idle_ns)
