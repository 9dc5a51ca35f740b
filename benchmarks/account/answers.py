"""What the model answers about a job: the cost of a fault that is known, and the faults that it finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from benchmarks.account.jobs import Float64, OracleJob, Truth

from torchperfd_daemon.diagnosis.edits import Edit, both, own_work, phase_work, with_phase, without_syncs
from torchperfd_daemon.diagnosis.step_model import StepModel, replay

MIN_SHARE: Final = 0.05
"""Of the step: faults that cost less need not be found."""
_BESIDE: Final = "checkpoint"
_HALF: Final = 0.5
_UNLIKE: Final = 2.0
_MIN_UNEVEN: Final = 0.005
"""Work is uneven where it varies by this multiple of what the steadiest phase does."""
_CERTAIN: Final = 5.0
"""So many standard errors make a rank late."""
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
    """Return the faults that a job's model shows, of those that cost :data:`MIN_SHARE` of its step."""
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
        checkpoints = phase_work(model, _BESIDE)
        self._add("checkpoint", checkpoints, lambda m, _: with_phase(m, _BESIDE, np.zeros_like(m.make)))
        served = _served(model, job)
        self._add("contention", job.queued, lambda m, places: _less(m, job.queued, places))
        collected = job.collected * served
        phase = _phase_of(model, collected)
        self._add("gc", collected, lambda m, places: _less(m, collected, places, phase))
        more = np.maximum(0.0, model.make - job.make_seconds)
        self._add("slow_loader", more, lambda m, places: _made(m, places, job.make_seconds))
        self._add_syncs()
        if len(job.records) > 1:
            self._add_uneven()
        self._add_late("slow_device", lambda m: m.device.sum(axis=0), _device_as_peers)
        self._add_late("slow_host", own_work, _host_as_peers)
        return self._found

    def _note(self, kind: str, rank: int | None, edit: Edit, least: float = MIN_SHARE) -> None:
        cost = self._step - replay(edit(self._model)).mean
        left = replay(self._rest).mean - replay(edit(self._rest)).mean
        if min(cost, left) >= least * self._step:
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
        works = work(self._rest)
        means = works.mean(axis=1)
        if len(means) < 2 or not means.any():
            return
        worst = int(means.argmax())
        error = float(works.std(axis=1).max()) / works.shape[1] ** 0.5
        if means[worst] - float(np.median(np.delete(means, worst))) > _CERTAIN * error:
            self._note(kind, worst, lambda model: as_peers(model, worst))

    def _add_uneven(self) -> None:
        """Note the phase that varies from step to step by far more than the steadiest one does.

        What equal work would give back is less than what such a fault costs by the oracle, which counts all
        of the added work. In the first phase that launches, a host's waits for a full queue vary as well: the
        second one is looked at first.
        """
        model = self._rest
        for phase in ("backward", "forward"):
            compared = [_spread(phase_work(model, name)) for name in _compared(model, phase)]
            if _spread(phase_work(model, phase)) >= _UNLIKE * min(compared, default=0.0):
                even: Edit = partial(_even, phase=phase, seconds=np.zeros_like(model.make))
                self._note("uneven", None, even, _MIN_UNEVEN)
                return


def _phase_of(model: StepModel, seconds: Float64) -> str:
    """Return the phase that varies least without some time, which is then a part of it."""
    names = [name for name in ("forward", "backward") if bool((phase_work(model, name) >= seconds).all())]
    return min(names, key=lambda name: _spread(phase_work(model, name) - seconds), default="")


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
