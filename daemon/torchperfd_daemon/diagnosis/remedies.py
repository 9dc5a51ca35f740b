"""Remedies for a cause, in words, if their savings can be predicted."""

import math
from collections.abc import Callable

from torchperfd.durations import duration
from torchperfd_daemon.loader_workers import (
    UNMEASURED_COST,
    LoaderFacts,
    WorkerCost,
    advise_loader,
    is_cheap,
)

ReadWorkerCost = Callable[[], WorkerCost]
"""Returns the cost of a loader's worker on this machine. Called only if advice depends on it."""


def unmeasured() -> WorkerCost:
    """Return the default cost, for a machine without a measurement."""
    return UNMEASURED_COST


def loader_remedy(
    facts: LoaderFacts | None,
    step_seconds: float,
    data_seconds: float,
    cost: ReadWorkerCost = unmeasured,
    *,
    most_seconds: float = math.inf,
    on_device: bool = False,
) -> str:
    """Return a remedy for a wait for the loader, to append to the evidence; empty if none is known.

    Args:
        data_seconds: The part of the step in which it waits for the loader.
        cost: Returns the cost of a worker on this machine.
        most_seconds: The cost of the wait in the evidence; the promised saving is at most this.
        on_device: Whether the model is on an accelerator.
    """
    if facts is None:
        return ""
    here = cost()
    advice = advise_loader(facts, step_seconds, data_seconds, here, on_device=on_device)
    if advice is not None:
        remark = f" ({advice.assumes})" if advice.assumes else ""
        return f"; {advice.setting} saves about {duration(min(advice.saves_seconds, most_seconds))}{remark}"
    if is_cheap(facts, data_seconds, here):
        return "; worker processes would cost more than they save, since batches are cheap to make"
    return ""
