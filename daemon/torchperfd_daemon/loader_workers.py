"""How many DataLoader workers a training loop should have, and what they would save. Pure.

One rule for all that advise: the live verdict, the analyser, the doctor, ``bench`` and ``tune``. With c the
rest of a step, d what making its batch takes, h what the training thread needs to take a batch over from a
worker and s what sending costs the worker, a step with w workers takes

    max(c + h, (d + s) / w, CPU time of all of it / CPUs)

and without workers c + d. Workers are advised only where that is shorter by more than the model can be off.
"""

import math
import operator
from dataclasses import replace
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd.model.loader_facts import (
    CROWDED,
    MAX_WORKERS,
    MOSTLY_IDLE,
    UNMEASURED_COST,
    LoaderAdvice,
    LoaderFacts,
    WorkerCost,
)

MIN_GAIN: Final = 0.05
"""A saving of a smaller share of the step is within the model's error."""

# So much of a worker's CPU may be in use by the training process, by a measurement that is not exact.
_SPARE_CPUS: Final = 0.25
# A loader computes, and does not wait, where this share of a draw is CPU time.
_COMPUTES: Final = 0.5
# Lower limit for how often a thread gets a CPU.
_MAX_QUEUED: Final = 0.99
# Starts of workers explain a wait for data from this share of it on.
_MOST_OF_WAIT: Final = 0.5
# Processes that share CPUs lose time to each other's caches and to their scheduling.
_CONTENTION: Final = 1.15
# Batches are rarely less than one tensor of samples and one of labels.
_USUAL_TENSORS: Final = 2
# What a draw from tensors in memory takes, without copying, if they are indexed sample by sample, and if as
# whole batches: for any batch, and for each tensor, sample, and tensor of a sample. In µs of one machine, but
# only the ratio of the two counts: on a machine with slower Python both take longer.
_BY_SAMPLE: Final = (15.0, 3.0, 0.4, 0.9)
_WHOLE_BATCH: Final = (12.0, 6.0, 0.0, 0.19)
# What each byte adds to them: reading memory at random differs less between machines.
_STACKED_BYTE_S: Final = 0.1e-9
_FETCHED_BYTE_S: Final = 0.2e-9
# Of a draw at least this share has to go for whole batches to be worth another sampler.
_MIN_FETCH_GAIN: Final = 0.5


def most_computing_workers(cpus: float) -> int:
    """Return how many workers that compute fit on so many CPUs beside one training thread."""
    return max(0, int(cpus) - 1)


def advise_loader(
    facts: LoaderFacts,
    step_seconds: float,
    data_seconds: float,
    cost: WorkerCost = UNMEASURED_COST,
    *,
    on_device: bool = False,
) -> LoaderAdvice | None:
    """Return the change of a loader that saves most; None where nothing is sure to save anything.

    Args:
        step_seconds: The mean training step, when nothing records it.
        data_seconds: What of it the loop waits for its loader.
        cost: What moving a batch between processes costs on this machine.
        on_device: The model is on an accelerator, so that pinned memory is of use.
    """
    model = _model_of(facts, step_seconds, data_seconds, cost)
    if model is None:
        return None
    # Starts and a slow worker make the loop wait, however many workers there are.
    found = [model.persistent_workers(on_device=on_device)]
    if found == [None] and facts.slow_worker is None:
        found = [model.whole_batches(), model.more_workers(on_device=on_device), model.no_workers()]
    best = min((each for each in found if each), key=lambda each: each.step_seconds, default=None)
    if best is None:
        return None
    step, saves = best.step_seconds * model.batches, best.saves_seconds * model.batches
    return replace(best, step_seconds=step, saves_seconds=saves)


def predict_step(
    facts: LoaderFacts,
    step_seconds: float,
    data_seconds: float,
    workers: int,
    cost: WorkerCost = UNMEASURED_COST,
) -> float | None:
    """Return what a step takes with a number of workers, by the model that the advice comes from; seconds.

    None where that is unknown: of impossible figures, and without workers of a loop that has some.

    Args:
        step_seconds: As for :func:`advise_loader`, like the data seconds.
    """
    model = _model_of(facts, step_seconds, data_seconds, cost)
    if model is None:
        return None
    if workers == facts.workers:
        return step_seconds
    return model.batches * model.step_with(workers) if workers else None


def step_with(
    advice: LoaderAdvice | None,
    facts: LoaderFacts,
    step_seconds: float,
    data_seconds: float,
    cost: WorkerCost = UNMEASURED_COST,
) -> float:
    """Return what a step takes by these figures once some advice is followed, which others may have led to.

    Args:
        advice: None to change nothing.
        step_seconds: As for :func:`advise_loader`, like the data seconds.
    """
    model = _model_of(facts, step_seconds, data_seconds, cost)
    if advice is None or model is None:
        return step_seconds
    if advice.rule == "persistent-workers":
        found = model.persistent_workers(on_device=False)
    elif advice.rule == "whole-batches":
        found = model.whole_batches()
    elif advice.workers:
        is_set = advice.workers == facts.workers
        return step_seconds if is_set else model.batches * model.step_with(advice.workers)
    else:
        found = model.no_workers()
    return step_seconds if found is None else model.batches * found.step_seconds


def making_seconds(facts: LoaderFacts, step_seconds: float, data_seconds: float) -> float:
    """Return what making the batches of a step takes its loader, without waiting for a CPU."""
    if facts.workers:
        busy = max(0.0, 1 - (facts.worker_queued or 0.0) - facts.idle)
        return facts.workers * step_seconds * busy
    return data_seconds * (1 - min(1.0, facts.queued or 0.0) * min(1.0, facts.draw_cpu or 0.0))


def is_cheap(facts: LoaderFacts, data_seconds: float, cost: WorkerCost = UNMEASURED_COST) -> bool:
    """Return whether making a batch costs the training process less than taking it over from a worker."""
    receiving = cost.receiving(facts.batch_tensors or _USUAL_TENSORS, facts.batch_bytes)
    return facts.workers == 0 and 0 < data_seconds / (facts.batches_per_step or 1.0) <= receiving


def _model_of(
    facts: LoaderFacts, step_seconds: float, data_seconds: float, cost: WorkerCost
) -> "_Model | None":
    """Return the model of a loop's step; None of impossible figures."""
    if not 0 < data_seconds <= step_seconds or not facts.is_sound():
        return None
    return _Model(facts, step_seconds, data_seconds, cost)


class _Model:
    """The part of a loop's step that takes one batch; seconds.

    Attributes:
        batches: How many of these parts the step has.
    """

    def __init__(
        self, facts: LoaderFacts, step_seconds: float, data_seconds: float, cost: WorkerCost
    ) -> None:
        self.batches = facts.batches_per_step or 1.0
        step, data = step_seconds / self.batches, data_seconds / self.batches
        self._facts = facts
        self._step = step
        tensors = facts.batch_tensors or _USUAL_TENSORS
        # Where other processes use the CPUs, a worker gets one as rarely as the training thread does.
        crowd = 1 / (1 - min(facts.queued or 0.0, _MAX_QUEUED))
        self._cpus = facts.cpus / crowd if facts.cpus else None
        self._receive = (
            crowd * cost.receiving(tensors, facts.batch_bytes)
            if facts.receive_seconds is None
            else facts.receive_seconds
        )
        self._send = crowd * cost.sending(tensors, facts.batch_bytes)
        self._rest = max(0.0, step - data)
        if facts.workers:
            # Workers are busy where the training thread waits for them. Their time without indices or without
            # a CPU is not part of making a batch.
            busy = max(0.0, 1 - (facts.worker_queued or 0.0) - facts.idle)
            self._make = max(0.0, facts.workers * step * busy - self._send)
            self._cpu = facts.worker_cpu_seconds
        else:
            self._make = data
            self._cpu = None if facts.draw_cpu is None else min(1.0, facts.draw_cpu) * data
        self._data = data

    @property
    def _share(self) -> float | None:
        """The share of making a batch that is CPU time."""
        return None if self._cpu is None or not self._make else min(1.0, self._cpu / self._make)

    def step_with(self, workers: int) -> float:
        """Return the step with so many workers; one or more."""
        taken_over = self._rest + self._receive
        cpus = self._cpus
        computed = 0.0
        if cpus:
            busy = self._facts.rest_cpus
            computed = self._rest * (1.0 if busy is None else busy) + self._receive / 2 + self._send
            computed += self._make if self._cpu is None else self._cpu
            computed *= _CONTENTION / cpus
        return max(taken_over, (self._make + self._send) / workers, computed)

    def _most(self) -> int:
        """Return the most workers that are of use: no more than have a CPU, unless they mostly wait."""
        cpus, share = self._cpus, self._share
        if not cpus:
            return MAX_WORKERS
        is_crowded = (self._facts.worker_queued or 0.0) >= CROWDED
        if share is None or share >= _COMPUTES or is_crowded:
            # Threads of one operator wait for each other: where they have all CPUs, a worker that takes one
            # of them holds up all.
            beside = int(cpus - (self._facts.rest_cpus or 1.0) + _SPARE_CPUS)
            return max(0, min(MAX_WORKERS, most_computing_workers(cpus), beside))
        return min(MAX_WORKERS, max(1, int(cpus / max(share, 1e-3))))

    def more_workers(self, *, on_device: bool) -> LoaderAdvice | None:
        """Return the advice to use workers, or more of them."""
        now, most = self._facts.workers, self._most()
        if most <= now or (now and self._data <= 2 * self._receive) or self._facts.idle >= MOSTLY_IDLE:
            return None
        least = max(self.step_with(most), self._rest + self._receive)
        # One more than keeps up on average, since batches do not come evenly.
        workers = min(max(math.ceil((self._make + self._send) / least) + 1, now + 1), most)
        step = self.step_with(workers)
        saves = self._step - step
        if saves < max(MIN_GAIN * self._step, self._receive):
            return None
        share, cpus = self._share, self._facts.cpus
        assumes = ""
        if not cpus:
            assumes = f"assumes {workers} free CPUs, or a loader that waits rather than computes"
        elif share is None:
            assumes = f"assumes that {workers} of the {cpus:g} CPUs are free"
        elif workers > cpus - 1:
            assumes = (
                f"more workers than CPUs ({cpus:g}), since the loader waits rather than computes:"
                f" {share:.0%} of making a batch is CPU time"
            )
        pinned = ", pin_memory=True" if on_device else ""
        return LoaderAdvice(
            "loader-workers",
            workers,
            step,
            saves,
            "use more worker processes"
            if now
            else "let worker processes make the batches while the model runs",
            f"DataLoader(..., num_workers={workers}, persistent_workers=True{pinned})",
            assumes,
        )

    def persistent_workers(self, *, on_device: bool) -> LoaderAdvice | None:
        """Return the advice to keep the workers between epochs, if most of the wait is for their starts."""
        facts = self._facts
        if not facts.respawns_workers or facts.start_seconds is None:
            return None
        # A kept worker still makes a first batch, as it makes any other.
        spent = facts.start_seconds - (facts.stages.making_seconds if facts.stages is not None else 0.0)
        saves = min(self._data, max(0.0, spent) * facts.starts_per_step / (facts.batches_per_step or 1.0))
        if saves < max(_MOST_OF_WAIT * self._data, MIN_GAIN * self._step):
            return None
        pinned = ", pin_memory=True" if on_device else ""
        return LoaderAdvice(
            "persistent-workers",
            facts.workers,
            self._step - saves,
            saves,
            "keep the workers from one epoch to the next",
            f"DataLoader(..., num_workers={facts.workers}, persistent_workers=True{pinned})",
            f"workers start anew every {1 / facts.starts_per_step:.3g} steps, and each first batch takes"
            f" {duration(facts.start_seconds)}",
        )

    def no_workers(self) -> LoaderAdvice | None:
        """Return the advice to make batches in the training process, where that costs less than a worker.

        Only of tensors in memory, as how long workers wait that read files is not in their CPU time, or of
        workers that mostly wait for work: then the stages show what a batch takes.
        """
        facts, stages = self._facts, self._facts.stages
        if facts.workers and facts.idle >= MOSTLY_IDLE and stages is not None:
            saves = self._data - 1.5 * stages.making_seconds
            return self._in_process(saves) if saves >= MIN_GAIN * self._step else None
        cpu, receive = self._cpu, facts.receive_seconds
        if not facts.workers or not facts.indexable or cpu is None or receive is None:
            return None
        # A worker's CPU time is all that a batch takes, except where it waits; half of it more to be sure.
        saves = self._data - max(1.5 * cpu, receive / 4)
        if self._data > 2 * receive or saves < max(MIN_GAIN * self._step, receive / 4):
            return None
        return self._in_process(saves)

    def _in_process(self, saves: float) -> LoaderAdvice:
        return LoaderAdvice(
            "loader-workers",
            0,
            self._step - saves,
            saves,
            "make batches in the training process: they cost less than taking them over from a worker",
            "DataLoader(..., num_workers=0)",
        )

    def whole_batches(self) -> LoaderAdvice | None:
        """Return the advice to index the tensors of a dataset once for each batch and not for each item."""
        facts = self._facts
        if facts.workers or not facts.indexable or not facts.batch_tensors or facts.batch_size < 2:
            return None
        tensors, samples = facts.batch_tensors, facts.batch_size
        counts = (1, tensors, samples, samples * tensors)
        by_sample, whole = (sum(map(operator.mul, costs, counts)) for costs in (_BY_SAMPLE, _WHOLE_BATCH))
        indexing = max(0.0, self._data - facts.batch_bytes * _STACKED_BYTE_S)
        saves = self._data - indexing * whole / by_sample - facts.batch_bytes * _FETCHED_BYTE_S
        if saves < max(_MIN_FETCH_GAIN * self._data, MIN_GAIN * self._step):
            return None
        order = "RandomSampler" if facts.shuffles else "SequentialSampler"
        return LoaderAdvice(
            "whole-batches",
            0,
            self._step - saves,
            saves,
            "index the dataset's tensors once for each batch and not for each item",
            f"DataLoader(dataset, batch_size=None, sampler=BatchSampler({order}(dataset),"
            f" {facts.batch_size}, drop_last=False))",
        )
