"""Edits of a step's model: what a job would be without some of its time. Pure.

An edit takes a model and returns another one. The difference of their replays is what it would give back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.robust_statistics import median_of, medians_of, spaced_quantiles
from torchperfd_daemon.diagnosis.step_model import Float64, StepModel

Edit = Callable[[StepModel], StepModel]

DATA: Final = "data"


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of one kind in a rank's training, such as collections of one generation.

    Attributes:
        per_step: The mean number of pauses per step; often far below 1.
        seconds: The mean length of a pause.
    """

    per_step: float
    seconds: float

    @classmethod
    def of(cls, calls: int, ns: int, steps: int) -> "Pauses":
        """Return the pauses of so many steps; ``calls`` may be 0, ``steps`` may not."""
        return cls(calls / steps, ns / calls / 1e9 if calls else 0.0)


def both(*edits: Edit) -> Edit:
    """Return the edit that makes several ones, one after the other."""

    def edit(model: StepModel) -> StepModel:
        for each in edits:
            model = each(model)
        return model

    return edit


def own_work(model: StepModel) -> Float64:
    """Return what each rank's thread does without its waits, in seconds; shape (ranks, steps)."""
    total: Float64 = model.make + model.handover + model.host.sum(axis=0)
    return total


def phase_work(model: StepModel, phase: str) -> Float64:
    """Return the time of one phase of the host, 0 if there is none; shape (ranks, steps)."""
    if phase == DATA:
        made: Float64 = model.make + model.handover
        return made
    if phase in model.phases:
        spent: Float64 = model.host[model.phases.index(phase)]
        return spent
    return np.zeros_like(model.make)


def with_own(model: StepModel, own: Float64) -> StepModel:
    """Return the model with other own work; all phases change in proportion."""
    before = own_work(model)
    share = np.divide(np.maximum(own, 0.0), before, out=np.ones_like(before), where=before > 0)
    return replace(
        model, make=model.make * share, handover=model.handover * share, host=model.host * share[None]
    )


def with_phase(model: StepModel, phase: str, spent: Float64) -> StepModel:
    """Return the model with other times of one phase."""
    spent = np.maximum(spent, 0.0)
    if phase == DATA:
        return replace(model, make=spent, handover=np.zeros_like(spent))
    host = model.host.copy()
    host[model.phases.index(phase)] = spent
    return replace(model, host=host)


def less_host(seconds: Mapping[int, float], phase: str = "", *, peaks: bool = False) -> Edit:
    """Return the edit that takes time from the host.

    Args:
        seconds: By the rank's place in the model, the mean per step.
        phase: From which phase; from all own work in proportion if it is empty, or no phase of the model.
        peaks: Take it from the longest steps first, as for pauses that some steps have, and not from all
            alike.
    """

    def edit(model: StepModel) -> StepModel:
        is_known = phase == DATA or phase in model.phases
        spent = (phase_work(model, phase) if is_known else own_work(model)).copy()
        for rank, less in seconds.items():
            spent[rank] = without_peaks(spent[rank], less) if peaks else _less_alike(spent[rank], less)
        return with_phase(model, phase, spent) if is_known else with_own(model, spent)

    return edit


def less_device(seconds: Mapping[int, float], idle: Mapping[int, float]) -> Edit:
    """Return the edit that takes time from the device's work; the arguments are by rank's place, per step.

    The host's phases have that time, too, since it waits for its device in them; unless the device idles for
    longer, because the host keeps it waiting.
    """

    def edit(model: StepModel) -> StepModel:
        device = model.device.copy()
        waited = {}
        for rank, less in seconds.items():
            work = float(device[:, rank].sum(axis=0).mean())
            device[:, rank] *= max(0.0, 1 - less / work) if work > 0 else 1.0
            if less > idle.get(rank, 0.0):
                waited[rank] = less
        return less_host(waited)(replace(model, device=device))

    return edit


def less_exchange(seconds: float) -> Edit:
    """Return the edit that shortens the exchange by a mean time per step."""
    return lambda model: replace(model, exchange=_less_alike(model.exchange, seconds))


def without_syncs(model: StepModel) -> StepModel:
    """Return the model of a host that never waits for its device."""
    return replace(model, syncs=np.zeros_like(model.syncs))


def equal_work(groups: Sequence[Sequence[int]], *, means: bool = False) -> Edit:
    """Return the edit by which ranks of a group share what their work differs by from step to step.

    Each rank keeps its mean, and the group its work of each step.

    Args:
        groups: Places of ranks that do the same work, such as those of one pipeline stage.
        means: Whether to share the differences of their means, too.
    """

    def edit(model: StepModel) -> StepModel:
        own = own_work(model).copy()
        for group in groups:
            work = own[list(group)]
            shared = work.mean(axis=0, keepdims=True)
            kept = 0.0 if means else work.mean(axis=1, keepdims=True) - work.mean()
            own[list(group)] = shared + kept
        return with_own(model, own)

    return edit


def as_peers(ranks: Mapping[int, Sequence[int]]) -> Edit:
    """Return the edit by which ranks work as long as their peers.

    The rank's j-th longest step takes the median of the peers' j-th longest steps, unless it is shorter
    already. A rank that is late in some steps then loses these excesses, one that is always late becomes
    faster in all steps, and noise remains.

    Args:
        ranks: By the place of each rank, the places of its peers; without peers nothing changes.
    """

    def edit(model: StepModel) -> StepModel:
        before = own_work(model)
        own = before.copy()
        for rank, peers in ranks.items():
            if peers:
                usual = medians_of(np.sort(before[[*peers]], axis=1))
                own[rank] = at_most(before[rank], usual)
        return with_own(model, own)

    return edit


def as_before(past: StepModel) -> Edit:
    """Return the edit by which own work and the exchange take no longer than in other steps of the ranks."""

    def edit(model: StepModel) -> StepModel:
        now, then = own_work(model), own_work(past)
        own = np.array([quantiles_of(mine, theirs) for mine, theirs in zip(now, then, strict=True)])
        return replace(with_own(model, own), exchange=quantiles_of(model.exchange, past.exchange))

    return edit


def quantiles_of(now: Float64, past: Float64) -> Float64:
    """Return times by step with the distribution of the past: the same quantile, unless that is longer."""
    return at_most(now, spaced_quantiles(past, len(now)))


def at_most(times: Float64, usual: Float64) -> Float64:
    """Limit the j-th shortest time to the j-th value of ``usual``, which is sorted ascending."""
    order = np.argsort(times, kind="stable")
    limited = np.empty_like(times)
    limited[order] = np.minimum(times[order], usual)
    return limited


def without_peaks(times: Float64, less: float) -> Float64:
    """Return times whose mean is smaller by so much, taken from the longest ones: they get a common limit."""
    mean = float(times.mean())
    if less >= mean:
        return np.zeros_like(times)
    if less <= 0:
        return times
    ascending = np.sort(times)
    # With a limit at the j-th shortest time, those below it count whole.
    below = np.concatenate([[0.0], np.cumsum(ascending)[:-1]])
    left = len(times) - np.arange(len(times))
    kept = (below + ascending * left) / len(times)
    place = min(len(times) - 1, int(np.searchsorted(kept, mean - less)))
    limit = ((mean - less) * len(times) - below[place]) / left[place]
    capped: Float64 = np.minimum(times, limit)
    return capped


def without_pauses(own: Float64, pauses: Sequence[Pauses]) -> Float64:
    """Return own work without pauses, of which only the number and mean length are known.

    If there is at least one per step, each step loses its share. Rarer pauses are removed from the longest
    steps, which lose at most their excess over the median.
    """
    left: Float64 = own.copy()
    for each in pauses:
        if each.per_step >= 1:
            left = np.maximum(0.0, left - each.per_step * each.seconds)
            continue
        count = round(each.per_step * len(left))
        longest = np.argsort(left, kind="stable")[len(left) - count :]
        excess = np.maximum(0.0, left[longest] - median_of(left))
        left[longest] -= np.minimum(each.seconds, excess)
    return left


def _less_alike(times: Float64, less: float) -> Float64:
    """Return times whose mean is smaller by so much, all in proportion; at least 0."""
    mean = float(times.mean())
    share = max(0.0, 1 - less / mean) if mean > 0 else 1.0
    shorter: Float64 = times * share
    return shorter
