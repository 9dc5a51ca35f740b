"""Makes the account of a step from a job and the causes that were found in it. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd_daemon.diagnosis.cause_walk import Walk
from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.edits import DATA, phase_work
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.step_model import Float64
from torchperfd_daemon.diagnosis.verdict import Cause

# Their time is a wait of ranks for each other, which the account has by its three kinds.
_OF_WAITS: Final = frozenset(
    {Cause.SLOW_RANK, Cause.UNEVEN_WORK, Cause.PIPELINE_IMBALANCE, Cause.COLLECTIVE, Cause.HOST_BOUND}
)
_PHASES: Final = {DATA: PartKind.DATA, "other": PartKind.UNNAMED, "checkpoint": PartKind.LOSS}
# Of the step: what sums of numbers are off by.
_NEGLIGIBLE: Final = 1e-9
_KINDS: Final = {Cause.INPUT_BOUND: PartKind.DATA, Cause.INTERPRETER_LOCK: PartKind.LOCK}


def account_of(walk: Walk) -> Account:
    """Return the account of a job's mean step.

    For ranks that wait for each other, with own the step less that wait, of each rank in each step:

    - a late rank: the largest mean of own, less the mean of all means;
    - uneven work: the mean of the largest own of each step, less the largest mean;
    - the exchange: what is left of the step.

    The rest of the step is the mean of own, by what it is spent on. On devices that is their time, and what
    the host waits for meanwhile is hidden.
    """
    job = walk.job
    step = job.step_seconds
    if all(rank.device_phase_seconds for rank in job.ranks):
        own, hidden = _device_parts(job)
    else:
        own, hidden = _host_parts(walk), []
    waits = _waits(job, step, sum(part.seconds for part in own))
    parts = _summing_to([*own, *waits], step)
    return Account(
        step, job.replayed.mean, tuple(sorted(parts, key=lambda part: -part.seconds)), tuple(hidden)
    )


def _waits(job: Job, step: float, own_seconds: float) -> list[Part]:
    """Return the waits of ranks for each other by their kinds."""
    if not job.together:
        alone = max(0.0, step - own_seconds)
        return [Part(PartKind.EXCHANGE, "", alone)] if alone else []
    own = _own(job)
    means = own.mean(axis=1)
    place = int(means.argmax())
    late = float(means[place] - means.mean())
    uneven = max(0.0, float(own.max(axis=0).mean() - means[place]))
    exchange = max(0.0, step - own_seconds - late - uneven)
    rank = job.ranks[place].rank
    found = [
        Part(PartKind.LATE_RANK, "", late, rank),
        Part(PartKind.UNEVEN_WORK, "", uneven),
        Part(PartKind.EXCHANGE, "", exchange),
    ]
    return [part for part in found if part.seconds > 0]


def _own(job: Job) -> Float64:
    """Return the own work of each rank in each step, from barrier to barrier; shape (ranks, steps)."""
    if not job.has_steps:
        return np.array([[rank.own_seconds] for rank in job.ranks])
    ahead, model = len(job.model.before), job.model
    behind = np.roll(model.host[ahead:].sum(axis=0), 1, axis=1)
    own: Float64 = model.make + model.host[:ahead].sum(axis=0) + behind
    return own


def _host_parts(walk: Walk) -> list[Part]:
    """Return the mean own work by phase on the host, with the time of each cause that was found apart."""
    job = walk.job
    places = [*range(len(job.ranks))]
    if not job.together:
        places = [int(np.argmax([rank.step_seconds for rank in job.ranks]))]
    phases = dict.fromkeys((DATA, *job.model.phases))
    left = {phase: _mean(job, phase, places) for phase in phases}
    parts = []
    for finding in walk.found:
        if finding.cause in _OF_WAITS or (
            job.together and finding.rank is not None and not finding.cost_seconds
        ):
            continue
        job = job.edited(finding.edit)
        after = {phase: _mean(job, phase, places) for phase in phases}
        taken = sum(max(0.0, left[phase] - after[phase]) for phase in phases)
        left = {phase: min(left[phase], after[phase]) for phase in phases}
        if taken > 0:
            kind = _KINDS.get(finding.cause, PartKind.LOSS)
            parts.append(Part(kind, finding.cause.value if kind is PartKind.LOSS else "", taken))
    return [*parts, *_phase_parts(left)]


def _phase_parts(left: dict[str, float]) -> Iterator[Part]:
    """Yield the parts of the phases that no cause has."""
    for phase, seconds in left.items():
        if seconds > 0:
            kind = _PHASES.get(phase, PartKind.COMPUTING)
            yield Part(kind, "" if kind is PartKind.DATA else phase, seconds)


def _mean(job: Job, phase: str, places: Sequence[int]) -> float:
    return float(phase_work(job.model, phase)[list(places), job.model.warm :].mean())


def _device_parts(job: Job) -> tuple[list[Part], list[Part]]:
    """Return the device's own time by phase, and what the host waits for while the device works."""
    left: dict[str, float] = {}
    for rank in job.ranks:
        for name, seconds in rank.device_phase_seconds.items():
            if name not in WAITING:
                left[name] = left.get(name, 0.0) + seconds / len(job.ranks)
    waited = sum(rank.phase_seconds.get(DATA, 0.0) for rank in job.ranks) / len(job.ranks)
    behind = waited - left.get(DATA, 0.0)
    hidden = [Part(PartKind.DATA, "", behind)] if behind > _NEGLIGIBLE * job.step_seconds else []
    return [*_phase_parts(left)], hidden


def _summing_to(parts: Sequence[Part], step: float) -> list[Part]:
    """Return parts that sum to the step: what is missing is unnamed, and what is too much is of all alike."""
    total = sum(part.seconds for part in parts)
    if total <= 0:
        return [Part(PartKind.UNNAMED, "", step)] if step > 0 else []
    if total < step:
        missing = step - total
        return [*parts, Part(PartKind.UNNAMED, "", missing)] if missing > _NEGLIGIBLE * step else [*parts]
    return [Part(part.kind, part.name, part.seconds * step / total, part.rank) for part in parts]
