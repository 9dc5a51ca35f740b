"""What the model answers about a job: the cost of a fault that is known, and the faults that it finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from benchmarks.account.jobs import Float64, OracleJob, Truth

from torchperfd_daemon.diagnosis.edits import Edit, both, own_work, phase_work, with_phase, without_syncs
from torchperfd_daemon.diagnosis.step_model import StepModel, replay

LEAST_SHARE: Final = 0.05
"""Of the step: faults that cost less need not be found."""
_BESIDE: Final = "checkpoint"
_HALF: Final = 0.5
_UNLIKE: Final = 3.0
"""Work is uneven where it varies by this multiple of what the steadiest phase does."""
_END: Final = "optimizer"


@dataclass(frozen=True)
class Found:
    """A fault that was found; the rank is None for all."""

    kind: str
    rank: int | None
    cost_seconds: float


def without(truth: Truth, job: OracleJob) -> Edit:
    """Return the edit that removes a known fault from a job's model, with the queueing that it causes."""
    places = [*range(len(job.records))] if truth.rank is None else [truth.rank]
    seconds = truth.injected / 1e3

    def edit(model: StepModel) -> StepModel:
        served = _served(model, job)
        if truth.kind == "slow_host":
            return _less(model, seconds * served, places, truth.phase)
        if truth.kind == "gc":
            return _less(model, job.collected * served, places, truth.phase)
        if truth.kind == "contention":
            return _less(model, job.queued, places)
        if truth.kind == "checkpoint":
            return with_phase(model, _BESIDE, np.zeros_like(model.make))
        if truth.kind == "slow_loader":
            make = model.make.copy()
            make[places] = np.maximum(0.0, make[places] - seconds)
            return replace(model, make=make)
        if truth.kind == "slow_device":
            device = model.device.copy()
            device[model.phases.index(truth.phase), places] /= truth.injected
            return model.with_device(device)
        if truth.kind == "sync":
            syncs = model.syncs.copy()
            syncs[model.phases.index(truth.phase)] = False
            return replace(model, syncs=syncs)
        return _even(model, truth.phase, seconds * served)

    return edit


def _served(model: StepModel, job: OracleJob) -> Float64:
    """Return by how much queueing lengthens the work of each rank in each step; 1 without any."""
    own = _runnable(model)
    share: Float64 = own / np.maximum(own - job.queued, 1e-12)
    return share


def _runnable(model: StepModel) -> Float64:
    total: Float64 = model.host.sum(axis=0) - phase_work(model, _BESIDE)
    return total


def _less(model: StepModel, seconds: Float64, places: Sequence[int], phase: str = "") -> StepModel:
    """Return the model with less time in one phase of some ranks, or in all but checkpoints."""
    host = model.host.copy()
    numbers = [
        number for number, name in enumerate(model.phases) if name == phase or (not phase and name != _BESIDE)
    ]
    total = host[numbers].sum(axis=0)
    share = 1 - np.divide(seconds, total, out=np.zeros_like(total), where=total > 0)
    for place in places:
        host[numbers, place] *= np.clip(share[place], 0.0, 1.0)
    return model.with_host(host)


def _even(model: StepModel, phase: str, seconds: Float64) -> StepModel:
    """Return the model without added work that varies: the phase then varies as the steadiest one does."""
    spent = phase_work(model, phase) - seconds
    usual = min((_spread(phase_work(model, name)) for name in _compared(model, phase)), default=0.0)
    mean, deviation = max(0.0, float(spent.mean())), float(spent.std())
    share = min(1.0, usual * mean / deviation) if deviation > 0 else 0.0
    return with_phase(model, phase, mean + (spent - spent.mean()) * share)


def _compared(model: StepModel, phase: str) -> list[str]:
    names = ("forward", "loss", "backward", "optimizer")
    return [name for name in names if name != phase and phase_work(model, name).any()]


def _spread(times: Float64) -> float:
    """Return how much times differ from the mean of their rank, as a share of the mean."""
    mean = float(times.mean())
    return float((times - times.mean(axis=1, keepdims=True)).std()) / mean if mean > 0 else 0.0


def find(job: OracleJob, model: StepModel) -> list[Found]:
    """Return the faults that a job's model shows, of those that cost :data:`LEAST_SHARE` of its step."""
    return _Search(job, model).run()


class _Search:
    """Takes what is found out of the model, so that later kinds see only the rest."""

    def __init__(self, job: OracleJob, model: StepModel) -> None:
        self._job = job
        self._model = model
        self._step = replay(model).mean
        self._rest = model
        self._found: list[Found] = []

    def run(self) -> list[Found]:
        """Return what is found."""
        job, model = self._job, self._model
        everyone = range(len(job.records))
        checkpoints = phase_work(model, _BESIDE)
        self._add("checkpoint", checkpoints, lambda m, _: with_phase(m, _BESIDE, np.zeros_like(m.make)))
        served = _served(model, job)
        self._add("contention", job.queued, lambda m, places: _less(m, job.queued, places))
        self._add("gc", job.collected * served, lambda m, places: _less(m, job.collected * served, places))
        more = np.maximum(0.0, model.make - job.make_seconds)
        self._add("slow_loader", more, lambda m, places: _made(m, places, job.make_seconds))
        self._add_syncs()
        self._add_late("slow_device", lambda m: m.device.sum(axis=0), _device_as_peers)
        self._add_late("slow_host", own_work, _host_as_peers)
        if len(everyone) > 1:
            self._add_uneven()
        return self._found

    def _note(self, kind: str, rank: int | None, edit: Edit) -> None:
        cost = self._step - replay(edit(self._model)).mean
        left = replay(self._rest).mean - replay(edit(self._rest)).mean
        if min(cost, left) >= LEAST_SHARE * self._step:
            self._found.append(Found(kind, rank, cost))
        self._rest = edit(self._rest)

    def _add(self, kind: str, lost: Float64, remove: Callable[[StepModel, Sequence[int]], StepModel]) -> None:
        means = lost.mean(axis=1)
        if not means.any():
            return
        worst = int(means.argmax())
        others = np.delete(means, worst)
        alike = not len(others) or float(np.median(others)) >= _HALF * means[worst]
        places = [*range(len(means))] if alike else [worst]
        self._note(kind, None if alike else worst, lambda model: remove(model, places))

    def _add_syncs(self) -> None:
        early = [name for name, waits in zip(self._model.phases, self._model.syncs, strict=True) if waits]
        if set(early) - {_END}:
            keep = np.array([name == _END for name in self._model.phases]) & self._model.syncs
            self._note("sync", None, both(without_syncs, lambda model: replace(model, syncs=keep)))

    def _add_late(
        self, kind: str, work: Callable[[StepModel], Float64], as_peers: Callable[[StepModel, int], StepModel]
    ) -> None:
        means = work(self._rest).mean(axis=1)
        if len(means) < 2 or not means.any():
            return
        worst = int(means.argmax())
        if means[worst] - float(np.median(np.delete(means, worst))) > 0:
            self._note(kind, worst, lambda model: as_peers(model, worst))

    def _add_uneven(self) -> None:
        model = self._rest
        spreads = {name: _spread(phase_work(model, name)) for name in ("forward", "backward")}
        phase = max(spreads, key=lambda name: spreads[name])
        usual = min((_spread(phase_work(model, name)) for name in _compared(model, phase)), default=0.0)
        if spreads[phase] >= _UNLIKE * usual:
            self._note("uneven", None, lambda m: _even(m, phase, np.zeros_like(m.make)))


def _made(model: StepModel, places: Sequence[int], seconds: float) -> StepModel:
    make = model.make.copy()
    make[list(places)] = np.minimum(make[list(places)], seconds)
    return replace(model, make=make)


def _device_as_peers(model: StepModel, place: int) -> StepModel:
    device = model.device.copy()
    device[:, place] = np.minimum(device[:, place], np.median(np.delete(device, place, axis=1), axis=1))
    return model.with_device(device)


def _host_as_peers(model: StepModel, place: int) -> StepModel:
    host = model.host.copy()
    host[:, place] = np.minimum(host[:, place], np.median(np.delete(host, place, axis=1), axis=1))
    return model.with_host(host)
