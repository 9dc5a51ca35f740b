"""Fits the model of a step to what ranks recorded: takes the waits out of their times. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.step_model import ALONE, DEVICE, HOST, Float64, StepModel, replay

MIN_SHARE: Final = 0.005
"""Waits below this share of the step are none."""
_BEFORE: Final = ("h2d", "zero_grad", "forward", "loss", "backward")
_AFTER: Final = ("optimizer", "other", "validate", "checkpoint")
_NOT_LAUNCHING: Final = frozenset({"data", "collective_wait", "other", "checkpoint", "idle"})
_DEPTHS: Final = (1, 2, 4, 8)
# A device that idles for less of the step keeps the host waiting before it launches more.
_BOUND: Final = 0.02
_IDLE_COUNTS: Final = 0.05
_LAUNCH_COUNTS: Final = 0.02
# The phases in which a host that waits for its device stands: where nothing else says it, the loss is read.
_END: Final = "optimizer"
_READS: Final = "other"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank recorded over some steps, in seconds; each array has one number for each step.

    Attributes:
        host: Exclusive host time by phase, which sums to the step.
        device: Exclusive device time by phase, waits for other ranks included; empty without device times.
        sync: The part of the host's phases that waits for the device.
    """

    rank: int
    host: Mapping[str, Float64]
    device: Mapping[str, Float64] = field(default_factory=dict)
    sync: Float64 | None = None

    @property
    def steps(self) -> Float64:
        """The length of each step."""
        total: Float64 = np.sum([*self.host.values()], axis=0)
        return total


@dataclass(frozen=True, slots=True)
class Batches:
    """How a loader makes batches, in seconds; each array has shape (ranks, steps).

    Attributes:
        make: What a batch takes to make.
        handover: What taking a finished one over from a worker takes.
        workers: How many make batches; 0 if the training thread does.
    """

    make: Float64
    handover: Float64
    workers: int


def fit(
    records: Sequence[RankRecord],
    warm: int = 0,
    *,
    least_wait: float = MIN_SHARE,
    steady: bool = False,
    batches: Batches | None = None,
) -> StepModel:
    """Return the model of which the replay gives the recorded steps.

    Args:
        records: Of the same steps of each rank; at least one.
        warm: The first steps, which count for nothing.
        least_wait: The share of the step from which waits show that ranks wait for each other.
        steady: Whether all steps are equal, so that what is queued on devices does not matter.
        batches: How batches are made ahead of their use; by default, their phase is what making them takes.
    """
    return _Fit(records, warm, least_wait, steady=steady).model(batches)


class _Fit:
    """The records as arrays of shape (ranks, steps)."""

    def __init__(self, records: Sequence[RankRecord], warm: int, least_wait: float, *, steady: bool) -> None:
        self._records = records
        self._warm = warm
        self._steady = steady
        names = {name for record in records for name in record.host}
        own = sorted(names - {*_BEFORE, *_AFTER, "data", "collective_wait"})
        self._before = tuple(name for name in (*own, *_BEFORE) if name in names)
        self._after = tuple(name for name in _AFTER if name in names or name in (_END, _READS))
        self._shape = len(records), len(records[0].steps)
        self._steps = np.array([record.steps for record in records])
        self._none = np.zeros(self._shape[1])
        self._sync = np.array([self._none if record.sync is None else record.sync for record in records])
        self._host_wait = self._host("collective_wait")
        self._device_wait = self._device("collective_wait")
        on_device = float(self._device_wait.mean()) > float(self._host_wait.mean())
        waits = self._device_wait if on_device else self._host_wait
        together = len(records) > 1 and bool((waits.mean(axis=1) > least_wait * self._steps.mean()).any())
        self.barrier = (DEVICE if on_device else HOST) if together else ALONE
        self._waits = waits
        busy = np.sum([self._device(name) for name in names - _NOT_LAUNCHING], axis=0)
        self._idle = self._steps - busy - (waits if self.barrier == DEVICE else 0.0)

    def model(self, batches: Batches | None) -> StepModel:
        """Return the model: of the places where hosts may wait for their devices, those that fit best."""
        phases = (*self._before, *self._after)
        host = np.array([self._host(name) for name in phases])
        if self.barrier == ALONE:
            # What a rank waits for in collectives of which no other rank is seen is its own time.
            host[len(self._before)] += self._host_wait
        work = np.array(
            [np.zeros(self._shape) if name in _NOT_LAUNCHING else self._device(name) for name in phases]
        )
        batches = batches or Batches(self._host("data"), np.zeros(self._shape), 0)
        model = StepModel(
            before=self._before,
            after=self._after,
            host=host,
            device=work,
            syncs=np.zeros(len(phases), dtype=bool),
            make=batches.make,
            handover=batches.handover,
            workers=batches.workers,
            exchange=self._waits.min(axis=0) if self.barrier != ALONE else self._none,
            barrier=self.barrier,
            warm=self._warm,
        )
        if not work.any():
            return model
        synced = float(self._sync.mean()) >= MIN_SHARE * float(self._steps.mean())
        if synced:
            return min(self._with_syncs(model), key=lambda each: self._error(each) + self._unlike(each))
        return min(self._with_depths(model), key=self._error)

    def _error(self, model: StepModel) -> float:
        """Return by how much a replay differs from what was recorded, in seconds per step."""
        replayed, later = replay(model), slice(self._warm, None)
        pairs = (
            (1.0, replayed.steps, self._steps),
            (1.0, replayed.synced, self._sync),
            # Gaps within a phase are in its time where the device records them, and not in this one.
            (_IDLE_COUNTS, replayed.idle, self._idle),
        )
        return sum(
            weight * float(np.abs(now[:, later].mean(axis=1) - then[:, later].mean(axis=1)).max())
            for weight, now, then in pairs
        )

    def _unlike(self, model: StepModel) -> float:
        """Return by how much launching takes longer in one phase than in others, for as much work.

        Of places for waits that explain as much, those with the least of it are chosen.
        """
        launching = self._launching(model.device)
        beyond = [
            model.host[each] - self._launch(each, launching, model.host, model.device) for each in launching
        ]
        # All ranks run the same script: what one of them spends in a phase is no wait of all.
        return _LAUNCH_COUNTS * sum(float(np.median(np.abs(each.mean(axis=1)))) for each in beyond)

    def _host(self, name: str) -> Float64:
        return np.array([record.host.get(name, self._none) for record in self._records])

    def _device(self, name: str) -> Float64:
        return np.array([record.device.get(name, self._none) for record in self._records])

    def _with_syncs(self, model: StepModel) -> Iterator[StepModel]:
        """Yield the model with the host's waits at the end, in one of the phases that launch, or in both."""
        phases = model.phases
        end = phases.index(_END)
        reads = phases.index(_READS)
        launching = self._launching(model.device)
        # Means of steps do not show where the waits are: they are taken to be where the loss is read.
        for early in (None,) if self._steady else (None, *launching):
            for at_end in (True, False):
                waits = self._sync.copy()
                host, syncs = model.host.copy(), model.syncs.copy()
                if early is not None:
                    beyond = host[early] - self._launch(early, launching, host, model.device)
                    first = np.clip(beyond, 0.0, waits) if at_end else waits
                    host[early] -= first
                    syncs[early] = True
                    waits = waits - first
                if at_end:
                    within = np.minimum(waits, host[reads])
                    host[reads] -= within
                    host *= 1 - np.minimum(1.0, (waits - within) / np.maximum(host.sum(axis=0), 1e-12))
                    syncs[end] = True
                if early is not None or at_end:
                    yield replace(model, host=np.maximum(0.0, host), syncs=syncs)

    def _launching(self, work: Float64) -> list[int]:
        return [number for number in range(len(self._before)) if work[number].any()]

    def _launch(self, number: int, launching: Sequence[int], host: Float64, work: Float64) -> Float64:
        """Return what a phase's launches should take: as much for its work as in the other phases."""
        rates = [
            host[each].mean(axis=1, keepdims=True) / np.maximum(work[each].mean(axis=1, keepdims=True), 1e-12)
            for each in launching
            if each != number
        ]
        least: Float64 = np.min(rates, axis=0) * work[number] if rates else host[number]
        return least

    def _with_depths(self, model: StepModel) -> Iterator[StepModel]:
        """Yield the model with devices that may be behind the host by different numbers of steps.

        Where devices do not idle, the host's wait before its first launch is taken out of that phase.
        """
        bound = self._idle.mean(axis=1) <= _BOUND * self._steps.mean(axis=1)
        launching = self._launching(model.device)
        if launching and bound.any():
            first, host = launching[0], model.host.copy()
            launch = self._launch(first, launching, host, model.device)
            host[first][bound] = np.minimum(host[first], launch)[bound]
            model = replace(model, host=host)
        for depth in _DEPTHS[1:2] if self._steady else _DEPTHS:
            yield replace(model, depth=depth)
