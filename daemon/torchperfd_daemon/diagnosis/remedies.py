"""What to do about a cause, in words, where what that saves can be predicted."""

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
"""Returns what a loader's worker costs on the machine. Called only where advice depends on it."""


def unmeasured() -> WorkerCost:
    """Return the cost on a machine that nobody has measured."""
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
    """Return what to do about a wait for the loader, to follow the evidence; empty where that is not known.

    Args:
        facts: How the rank uses its loader.
        step_seconds: Its mean step.
        data_seconds: What of that it waits for the loader.
        cost: What a worker costs here.
        most_seconds: What the evidence says that the wait costs: no more than that is promised.
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
