"""Fits the model of a step to what ranks recorded: takes the waits out of their times. Pure.

Of hosts single steps are recorded, of devices only means of many: those are given as several equal steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.step_model import ALONE, DEVICE, HOST, Float64, StepModel

MIN_SHARE: Final = 0.005
"""Waits below this share of the step are none."""
_BEFORE: Final = ("h2d", "zero_grad", "forward", "loss", "backward")
_AFTER: Final = ("optimizer", "other", "validate", "checkpoint")
_NOT_LAUNCHING: Final = frozenset({"data", "collective_wait", "other", "checkpoint", "idle"})
# A device that idles for less of the step keeps the host waiting before it launches more.
_BOUND: Final = 0.02
# The phases in which a host that waits for its device stands: where nothing else says it, the loss is read.
END: Final = "optimizer"
READS: Final = "other"


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


def fit(records: Sequence[RankRecord], warm: int = 0, *, least_wait: float = MIN_SHARE) -> StepModel:
    """Return the model of which the replay gives the recorded steps.

    Args:
        records: Of the same steps of each rank; at least one. With devices, all steps are equal.
        warm: The first steps, which count for nothing.
        least_wait: The share of the step from which waits show that ranks wait for each other.
    """
    found = Fit(records, warm, least_wait)
    model = found.without_waits()
    if not model.has_device:
        return model
    # Equal steps do not show where the waits are: they are taken to be where the loss is read.
    return found.synced_at_end(model, found.sync) if found.is_synced else found.without_stalls(model)


class Fit:
    """The records as arrays of shape (ranks, steps).

    Attributes:
        steps: The length of each step.
        sync: The part of the host's phases that waits for the device.
        idle: The device's time without work.
    """

    def __init__(self, records: Sequence[RankRecord], warm: int = 0, least_wait: float = MIN_SHARE) -> None:
        self._records = records
        self._warm = warm
        names = dict.fromkeys(name for record in records for name in record.host).keys()
        own = sorted(names - {*_BEFORE, *_AFTER, "data", "collective_wait"})
        self._before = tuple(name for name in (*own, *_BEFORE) if name in names)
        self._after = tuple(name for name in _AFTER if name in names or name in (END, READS))
        self._shape = len(records), len(records[0].steps)
        self._none = np.zeros(self._shape[1])
        self._host_times = {name: self._host(name) for name in names}
        self.steps: Float64 = np.sum([*self._host_times.values()], axis=0)
        self.sync = np.array([self._none if record.sync is None else record.sync for record in records])
        self._host_wait = self._host_times.get("collective_wait", np.zeros(self._shape))
        device_wait = self._device("collective_wait")
        on_device = float(device_wait.mean()) > float(self._host_wait.mean())
        self._waits = device_wait if on_device else self._host_wait
        longest = self._waits.mean(axis=1) > least_wait * self.steps.mean()
        together = len(records) > 1 and bool(longest.any())
        self._barrier = (DEVICE if on_device else HOST) if together else ALONE
        busy = np.sum([self._device(name) for name in names - _NOT_LAUNCHING], axis=0)
        self.idle = self.steps - busy - (self._waits if self._barrier == DEVICE else 0.0)

    def without_waits(self) -> StepModel:
        """Return the model of hosts that never wait for their devices."""
        phases = (*self._before, *self._after)
        nothing = np.zeros(self._shape)
        host = np.array([self._host_times.get(name, nothing) for name in phases])
        if self._barrier == ALONE:
            # What a rank waits for in collectives of which no other rank is seen is its own time.
            host[len(self._before)] += self._host_wait
        work = [nothing if name in _NOT_LAUNCHING else self._device(name) for name in phases]
        return StepModel(
            before=self._before,
            after=self._after,
            host=host,
            device=np.array(work),
            syncs=np.zeros(len(phases), dtype=bool),
            make=self._host_times.get("data", nothing),
            handover=np.zeros(self._shape),
            workers=0,
            exchange=self._waits.min(axis=0) if self._barrier != ALONE else self._none,
            barrier=self._barrier,
            warm=self._warm,
        )

    @property
    def is_synced(self) -> bool:
        """Whether hosts wait for their devices in each step."""
        return float(self.sync.mean()) >= MIN_SHARE * float(self.steps.mean())

    def synced_at_end(self, model: StepModel, waits: Float64) -> StepModel:
        """Return the model with these waits of the host at the end of the step, where the loss is read."""
        end, reads = model.phases.index(END), model.phases.index(READS)
        host, syncs = model.host.copy(), model.syncs.copy()
        within = np.minimum(waits, host[reads])
        host[reads] -= within
        host *= 1 - np.minimum(1.0, (waits - within) / np.maximum(host.sum(axis=0), 1e-12))
        syncs[end] = True
        return replace(model, host=np.maximum(0.0, host), syncs=syncs)

    def without_stalls(self, model: StepModel) -> StepModel:
        """Return the model of hosts that wait before their first launch while devices do not idle.

        That wait follows from the model, and is taken out of the phase.
        """
        bound = self.idle.mean(axis=1) <= _BOUND * self.steps.mean(axis=1)
        phases = launching(model)
        if not phases or not bound.any():
            return model
        host = model.host.copy()
        host[phases[0]][bound] = np.minimum(host[phases[0]], launch(phases[0], model))[bound]
        return replace(model, host=host)

    def _host(self, name: str) -> Float64:
        return np.array([record.host.get(name, self._none) for record in self._records])

    def _device(self, name: str) -> Float64:
        return np.array([record.device.get(name, self._none) for record in self._records])


def launching(model: StepModel) -> list[int]:
    """Return the phases ahead of the collectives that launch work, by their places."""
    return [number for number in range(len(model.before)) if model.device[number].any()]


def launch(number: int, model: StepModel) -> Float64:
    """Return what a phase's launches should take: as much for its work as in the other phases."""
    host, work = model.host, model.device
    rates = [
        host[each].mean(axis=1, keepdims=True) / np.maximum(work[each].mean(axis=1, keepdims=True), 1e-12)
        for each in launching(model)
        if each != number
    ]
    least: Float64 = np.min(rates, axis=0) * work[number] if rates else host[number]
    return least
