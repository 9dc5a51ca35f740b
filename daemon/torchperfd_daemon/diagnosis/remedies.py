"""Remedies of which the savings can be predicted: those for a wait for the loader."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchperfd_daemon.loader_workers import (
    UNMEASURED_COST,
    LoaderFacts,
    WorkerCost,
    advise_loader,
    is_cheap,
)

ReadWorkerCost = Callable[[], WorkerCost]
"""Returns the cost of a loader's worker on this machine. Called only if advice depends on it."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that shortens the step.

    Attributes:
        fix: What to do, the code to write first; empty if none is known.
        saves_seconds: Its predicted saving per step; 0 without a prediction.
    """

    fix: str = ""
    saves_seconds: float = 0.0


def unmeasured() -> WorkerCost:
    """Return the default cost, for a machine without a measurement."""
    return UNMEASURED_COST


def stage_words(facts: LoaderFacts | None) -> str:
    """Return what the stages of making a batch take, to append to the evidence; empty if unknown."""
    words = facts.stages.words if facts is not None and facts.stages is not None else ""
    return f"; {words}" if words else ""


def loader_remedy(
    facts: LoaderFacts | None,
    step_seconds: float,
    data_seconds: float,
    cost: ReadWorkerCost = unmeasured,
    *,
    most_seconds: float = math.inf,
    on_device: bool = False,
) -> Remedy:
    """Return the remedy for a wait for the loader; an empty one if none is known.

    Args:
        data_seconds: The part of the step in which it waits for the loader.
        cost: Returns the cost of a worker on this machine.
        most_seconds: The cost of the wait in the evidence; the promised saving is at most this.
        on_device: Whether the model is on an accelerator.
    """
    if facts is None:
        return Remedy()
    here = cost()
    advice = advise_loader(facts, step_seconds, data_seconds, here, on_device=on_device)
    if advice is not None:
        remark = f" ({advice.assumes})" if advice.assumes else ""
        return Remedy(f"{advice.setting}{remark}", min(advice.saves_seconds, most_seconds))
    if is_cheap(facts, data_seconds, here):
        return Remedy(
            "fewer, larger batches: these are cheap to make, and worker processes would cost more than they"
            " save"
        )
    return Remedy()
