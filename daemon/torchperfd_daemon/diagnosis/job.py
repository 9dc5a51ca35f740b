"""One run's ranks over a window of steps: their evidence, and the model of their step. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork
from torchperfd_daemon.diagnosis.edits import Edit, own_work, phase_work
from torchperfd_daemon.diagnosis.evidence import RankEvidence, by_means, wait_for_each_other
from torchperfd_daemon.diagnosis.step_model import ALONE, Float64, Replayed, StepModel, replay
from torchperfd_daemon.diagnosis.step_records import RankRecord, fit

_WAIT: Final = "collective_wait"
# Steps on devices are known by their means: so many equal ones, of which the first fill the pipeline.
_MEAN_STEPS: Final = 8
_WARM: Final = 4
_MIN_STEPS: Final = 12
_MAX_STEPS: Final = 256
_MAX_TIMES: Final = 1 << 16
# How often, and until when, devices' work is shortened for steps that the model makes too long.
_CORRECTIONS: Final = 3
_EXACT: Final = 0.005
# As little as sums of floating-point numbers differ by: nothing to explain.
_ROUNDING: Final = 1e-9
# Phases in which the host launches work, where the device's own times are not known.
_LAUNCHING: Final = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Job:
    """A run's ranks, and the model of their step.

    Attributes:
        ranks: The evidence of those with a step, at least one; the model has them in the same order.
        has_steps: Whether the model is of single steps, and not of their means.
    """

    ranks: tuple[RankEvidence, ...]
    model: StepModel
    has_steps: bool

    @classmethod
    def of(cls, ranks: Sequence[RankEvidence], works: Mapping[int, RankWork] | None = None) -> "Job":
        """Return the job of these ranks.

        Args:
            ranks: Those with a step; at least one.
            works: Their single steps, by rank; means are used where some are missing.
        """
        on_device = any(_knows_device(rank) for rank in ranks)
        count = 0 if not works or by_means(ranks) else _common_steps(ranks, works)
        equal = _MEAN_STEPS if on_device else 1
        records = [_record(rank, (works or {}).get(rank.rank), count, equal) for rank in ranks]
        job = cls(tuple(ranks), fit(records, _WARM if on_device else 0), count > 0)
        return _calibrated(job) if on_device else job

    @cached_property
    def replayed(self) -> Replayed:
        """The steps that the model yields."""
        return replay(self.model)

    @property
    def step_seconds(self) -> float:
        """The run's mean step: the median of its ranks'."""
        return statistics.median(rank.step_seconds for rank in self.ranks)

    @cached_property
    def together(self) -> bool:
        """Whether ranks wait for each other, and the waits show who is late."""
        return self.model.barrier != ALONE and wait_for_each_other(self.ranks)

    def gain(self, edit: Edit) -> float:
        """Return by how much an edit shortens the mean step, in seconds, at least 0.

        Of ranks that do not wait for each other, that of the rank which gains most.
        """
        edited = replay(edit(self.model))
        if self.model.barrier == ALONE:
            return max(0.0, float((self.replayed.means - edited.means).max()))
        return max(0.0, self.replayed.mean - edited.mean)

    def edited(self, edit: Edit) -> "Job":
        """Return the job after an edit, with the evidence as it was."""
        return Job(self.ranks, edit(self.model), self.has_steps)

    def left(self, place: int, phase: str) -> float:
        """Return the mean time of a phase on the host of the rank at a place, in seconds."""
        if phase not in self._left:
            self._left[phase] = phase_work(self.model, phase).mean(axis=1).tolist()
        return self._left[phase][place]

    @cached_property
    def _left(self) -> dict[str, list[float]]:
        return {}

    @cached_property
    def own(self) -> Float64:
        """Each rank's mean own work, in seconds; shape (ranks,)."""
        mean: Float64 = own_work(self.model).mean(axis=1)
        return mean

    @cached_property
    def stages(self) -> dict[int | None, list[int]]:
        """The places of ranks that do the same work: those of each pipeline stage."""
        stages: dict[int | None, list[int]] = {}
        for place, rank in enumerate(self.ranks):
            stages.setdefault(rank.stage, []).append(place)
        return stages

    @property
    def groups(self) -> list[list[int]]:
        return [*self.stages.values()]


def _common_steps(ranks: Sequence[RankEvidence], works: Mapping[int, RankWork]) -> int:
    """Return how many of the newest steps all ranks have; 0 if these are too few to say more than means."""
    lengths = [
        min((len(column) for column in works[rank.rank].phase_seconds.values()), default=0)
        if rank.rank in works and not works[rank.rank].are_means
        else 0
        for rank in ranks
    ]
    common = min(lengths)
    # Of many ranks fewer steps say as much, and cost less.
    most = max(_MIN_STEPS, min(_MAX_STEPS, _MAX_TIMES // len(ranks)))
    return min(common, most) if common >= _MIN_STEPS else 0


def _record(rank: RankEvidence, work: RankWork | None, count: int, equal: int) -> RankRecord:
    """Return what a rank recorded in its newest steps; if ``count`` is 0, ``equal`` steps like their mean.

    Single steps are scaled to the evidence, which may be of a longer window.
    """
    host = _host_means(rank)
    if work is None or not count:
        device = _device_means(rank)
        waited = np.full(equal, _waits_for_device(rank)) if device else None
        return RankRecord(rank.rank, _equal_steps(host, equal), _equal_steps(device, equal), waited)
    columns = {}
    for name, mean in host.items():
        column = work.phase_seconds.get(name, np.zeros(count))[-count:]
        recorded = float(column.mean()) if len(column) == count else 0.0
        columns[name] = column * (mean / recorded) if recorded > 0 else np.full(count, mean)
    return RankRecord(rank.rank, columns)


def _equal_steps(means: Mapping[str, float], count: int) -> dict[str, Float64]:
    """Return so many steps like the mean one."""
    return dict(zip(means, np.outer([*means.values()], np.ones(count)), strict=True))


def _host_means(rank: RankEvidence) -> dict[str, float]:
    """Return the mean host phases, which sum to the step.

    Where the device waits for other ranks and its utilization is not known, the host's phases have that wait,
    too: while it waits for its device, or else anywhere.
    """
    host = dict(rank.phase_seconds) or {"forward": rank.step_seconds}
    hidden = rank.wait_seconds - sum(host.get(name, 0.0) for name in WAITING)
    if _knows_device(rank) or hidden <= 0:
        return host
    own = {name: seconds for name, seconds in host.items() if name not in WAITING}
    first = min(hidden, rank.sync_seconds, own.get("other", 0.0))
    own["other"] = own.get("other", 0.0) - first
    total = sum(own.values())
    share = max(0.0, 1 - (hidden - first) / total) if total > 0 else 1.0
    return {**{name: share * seconds for name, seconds in own.items()}, _WAIT: rank.wait_seconds}


def _knows_device(rank: RankEvidence) -> bool:
    """Return whether it is known for how long a rank's device works."""
    return rank.device_busy is not None or bool(rank.device_phase_seconds)


def _waits_for_device(rank: RankEvidence) -> float:
    """Return for how long the host waits for its device, at least as samples of its stack show.

    The host's time in ``other`` beyond the device's is one in which the device works through what was
    launched before: what the host does meanwhile costs nothing, as if it waited.
    """
    if not rank.device_phase_seconds:
        return rank.sync_seconds
    beyond = rank.phase_seconds.get("other", 0.0) - rank.device_phase_seconds.get("other", 0.0)
    return max(rank.sync_seconds, beyond)


def _device_means(rank: RankEvidence) -> dict[str, float]:
    """Return the device's mean work by phase, with its wait for other ranks; empty where it is not known.

    Without the driver's reading, the device is taken to work in all of the phases that launch something.
    """
    if not _knows_device(rank):
        return {}
    timed = rank.device_phase_seconds or rank.phase_seconds
    computed = {name: seconds for name, seconds in timed.items() if name in _LAUNCHING and seconds > 0}
    whole = sum(computed.values())
    work = whole if rank.device_busy is None else rank.work_seconds
    waits = sum(rank.device_phase_seconds.get(name, 0.0) for name in WAITING)
    # What the driver calls busy includes the kernels that wait for other ranks.
    work = max(0.0, min(work, rank.step_seconds - waits))
    shares = {name: seconds / whole for name, seconds in computed.items()} or {"forward": 1.0}
    return {**{name: work * share for name, share in shares.items()}, _WAIT: waits}


def _calibrated(job: Job) -> Job:
    """Return the job with the model that yields the measured step.

    Time that it cannot explain is the host's own, behind its waits. If its steps are too long, devices work
    for less than they seem to: their times contain gaps.
    """
    step = job.step_seconds
    for _ in range(_CORRECTIONS):
        missing = step - job.replayed.mean
        if missing >= -_EXACT * step:
            break
        device = job.model.device
        work = max(1e-12, float(device.sum(axis=0).mean()))
        job = replace(job, model=job.model.with_device(device * max(0.0, 1 + missing / work)))
    else:
        missing = step - job.replayed.mean
    if missing <= _ROUNDING * step:
        return job
    host = job.model.host.copy()
    host[job.model.phases.index("other")] += missing
    return replace(job, model=job.model.with_host(host))
