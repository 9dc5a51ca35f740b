"""Measures for loggers: the means of the steps between two readings of the totals. Pure.

A tracker makes one section of each part in front of a slash, and sorts by name: what people look at first is
in ``torchperfd/``, one section each has the phases, validation and memory.
"""

from typing import Final

from torchperfd.steps.phases import COLLECTIVE_WAIT, DATA, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals

FIRST: Final = "torchperfd"
PHASES: Final = "torchperfd_phases"
VALIDATION: Final = "torchperfd_validation"
MEMORY: Final = "torchperfd_memory"
SECTIONS: Final = (FIRST, PHASES, VALIDATION, MEMORY)


def measures(before: Totals, now: Totals, names: PhaseNames) -> dict[str, float]:
    """Return the numbers by name; none while no step has ended in between.

    The first training step is in none of them. Shares are parts of the step, so that a step's phases sum
    to 1. Memory is as of now.
    """
    train = now.train.minus(before.train if before.train.steps else now.warmup)
    validate = now.validate.minus(before.validate)
    found = {**_kind(FIRST, PHASES, train, names), **_kind(VALIDATION, VALIDATION, validate, names)}
    if found:
        found.update(_beside(before, now, train))
    return found


def _kind(section: str, phases: str, steps: KindTotals, names: PhaseNames) -> dict[str, float]:
    if steps.steps <= 0:
        return {}
    found = {f"{section}/step_ms": steps.mean_seconds * 1e3}
    for counted, count in (("samples", steps.samples), ("tokens", steps.tokens)):
        if count and steps.ns:
            found[f"{section}/{counted}_per_second"] = count / (steps.ns / 1e9)
    for slot in range(len(names)):
        phase = steps.phases[slot]
        if phase.calls and steps.ns:
            # A slash would be one more level, and some trackers keep levels as directories.
            name = names.name(slot).replace("/", "_")
            found[f"{phases}/{name}_share"] = phase.ns / steps.ns
    return found


def _beside(before: Totals, now: Totals, train: KindTotals) -> dict[str, float]:
    found: dict[str, float] = {}
    elapsed_ns = now.ended_ns - (before.ended_ns or now.began_ns)
    if train.steps > 0 and now.ended_ns and elapsed_ns >= train.ns:
        waits_ns = train.phases[DATA].ns + train.phases[COLLECTIVE_WAIT].ns
        found[f"{FIRST}/goodput"] = (train.ns - waits_ns) / elapsed_ns
    utilization = now.flops_utilization(train)
    if utilization is not None:
        found[f"{FIRST}/mfu"] = utilization
    if now.cuda is not None:
        found[f"{MEMORY}/allocated_bytes"] = now.cuda.allocated
        found[f"{MEMORY}/reserved_bytes"] = now.cuda.reserved
        found[f"{MEMORY}/peak_bytes"] = now.cuda.peak
    if now.overhead is not None:
        found[f"{FIRST}/overhead_ratio"] = now.overhead
    return found
