"""The model of a training step: a small max-plus graph, replayed from the times that ranks recorded. Pure.

A step uses five resources: the loader's workers, the thread that trains, its device's stream, and the barrier
with the other ranks; what other threads of the process take from the training thread is in its times. Each
starts its next piece of work when it is free and what that work needs is there:

- a batch is taken when it is made, and made when its worker is free and the prefetch limit allows it;
- the host runs its phases one after the other, and launches the device's work meanwhile; when as many steps
  are queued as the device may be behind, the host waits;
- the device begins a phase's work when it is launched and the stream is free, and does not end it before the
  host has launched all of it;
- a collective ends on all ranks when the last rank has come to it and the exchange is done.

A :class:`StepModel` has the recorded times without these waits. :func:`replay` yields the steps. Daydream
(Zhu et al., USENIX ATC 2020) replays the kernels of one trace, Lin et al. (OSDI 2025) whole jobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.robust_statistics import Float64 as Float64

# Collectives hold the training thread, as with gloo, or the device's stream, as with NCCL, or no rank waits.
HOST: Final = "host"
DEVICE: Final = "device"
ALONE: Final = ""


@dataclass(frozen=True, slots=True)
class StepModel:
    """The times of a job's ranks over the same steps, in seconds, without their waits.

    Attributes:
        before: Phases of the host ahead of the collectives, in their order.
        after: Those behind them.
        host: Exclusive host time without waits; shape (phases, ranks, steps), ``before`` ahead of ``after``.
        device: The device's work that these phases launch; same shape, zeros without a device.
        syncs: Whether the host waits at the end of a phase until its device is done; shape (phases,).
        make: What the loader takes for a batch; shape (ranks, steps).
        handover: What taking a finished batch from a worker takes; shape (ranks, steps).
        workers: How many make batches; 0 if the training thread makes them.
        exchange: The collectives after the last rank has arrived; shape (steps,).
        barrier: :data:`HOST`, :data:`DEVICE` or :data:`ALONE`.
        depth: How many steps the device may be behind the host.
        warm: The first steps, which count for nothing: what is queued at their start is unknown.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    host: Float64
    device: Float64
    syncs: npt.NDArray[np.bool_]
    make: Float64
    handover: Float64
    workers: int
    exchange: Float64
    barrier: str
    depth: int = 2
    warm: int = 0

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases of the host, in their order."""
        return (*self.before, *self.after)

    @property
    def has_device(self) -> bool:
        """Whether any rank launches work on a device."""
        return bool(self.device.any())

    def with_host(self, host: Float64) -> "StepModel":
        """Return the model with other times of the host, at least 0."""
        return replace(self, host=np.maximum(host, 0.0))

    def with_device(self, device: Float64) -> "StepModel":
        """Return the model with other work of the device, at least 0."""
        return replace(self, device=np.maximum(device, 0.0))


@dataclass(frozen=True, slots=True)
class Replayed:
    """The steps that follow from a model.

    Attributes:
        steps: From the end of one step to that of the next; like all that follow, shape (ranks, steps).
        data: The host's wait for the loader.
        waits: For the other ranks, on the resource that the barrier holds.
        idle: The device's time without work.
        synced: The host's waits for its device.
        streams: From the end of the device's work of one step to that of the next.
        warm: How many of the first steps count for nothing.
    """

    steps: Float64
    data: Float64
    waits: Float64
    idle: Float64
    synced: Float64
    streams: Float64
    warm: int

    @property
    def means(self) -> Float64:
        """The mean step of each rank, in seconds; shape (ranks,).

        A host that is faster than its device runs ahead of it at first: the slower one of both counts.
        """
        host, device = (each[:, self.warm :].mean(axis=1) for each in (self.steps, self.streams))
        longer: Float64 = np.maximum(host, device)
        return longer

    @property
    def mean(self) -> float:
        """The mean step of the slowest rank, in seconds."""
        return float(self.means.max())


def replay(model: StepModel) -> Replayed:
    """Return the steps that follow from a model, from an empty pipeline on."""
    if not model.has_device and not model.workers:
        return _replay_on_host(model)
    return _Pipeline(model).run()


def _replay_on_host(model: StepModel) -> Replayed:
    """Return the steps of ranks whose only resources are the training thread and the barrier."""
    ahead = model.make + model.host[: len(model.before)].sum(axis=0)
    behind = model.host[len(model.before) :].sum(axis=0)
    if model.barrier == ALONE:
        waits = np.zeros_like(ahead)
    else:
        # Since the last barrier: what followed it, and what precedes this one. The last step stands for the
        # one before the first.
        since = ahead + np.roll(behind, 1, axis=1)
        waits = since.max(axis=0) - since + model.exchange
    none = np.zeros_like(ahead)
    return Replayed(ahead + waits + behind, model.make, waits, none, none, none, model.warm)


class _Pipeline:
    """The state of all ranks while steps are replayed; each array has one number for each rank."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        ranks, steps = model.make.shape
        ahead = len(model.before)
        self._ahead = [*_pieces(model, 0, ahead)]
        self._behind = [*_pieces(model, ahead, len(model.phases))]
        self._host = np.zeros(ranks)
        self._stream = np.zeros(ranks)
        self._free = np.zeros((max(1, model.workers), ranks))
        self._taken: list[Float64] = []
        self._ends: list[Float64] = []
        self._out = np.zeros((6, ranks, steps))
        self._none = np.zeros(ranks)
        self._has_device = model.has_device

    def run(self) -> Replayed:
        """Return the replayed steps."""
        model, (steps, data, waits, idle, synced, streams) = self._model, self._out
        for step in range(model.make.shape[1]):
            start, stream = self._host, self._stream
            stall = self._stall()
            self._take_batch(step)
            data[:, step] = self._host - start
            for number, piece in enumerate(self._ahead):
                self._run(piece, step, stall if number == 0 else 0.0)
            waits[:, step] = self._meet(step)
            for piece in self._behind:
                self._run(piece, step, 0.0)
            self._ends.append(self._stream)
            steps[:, step] = self._host - start
            streams[:, step] = self._stream - stream
        idle[:] = streams - model.device.sum(axis=0) - (waits if model.barrier == DEVICE else 0.0)
        return Replayed(steps, data, waits, np.maximum(idle, 0.0), synced, streams, model.warm)

    def _stall(self) -> Float64:
        """Return for how long the host cannot launch, because the device is too many steps behind."""
        depth = self._model.depth
        if not self._has_device or len(self._ends) <= depth:
            return self._none
        return np.maximum(0.0, self._ends[-1 - depth] - self._host)

    def _take_batch(self, step: int) -> None:
        model = self._model
        if not model.workers:
            self._host = self._host + model.make[:, step]
            return
        worker, ahead = step % model.workers, 2 * model.workers
        begin = self._free[worker]
        if step >= ahead:
            begin = np.maximum(begin, self._taken[step - ahead])
        ready = self._free[worker] = begin + model.make[:, step]
        self._host = np.maximum(self._host, ready) + model.handover[:, step]
        self._taken.append(self._host)

    def _run(self, piece: "_Piece", step: int, stall: "Float64 | float") -> None:
        """Run phases on the host, which first cannot launch for a while, and what they launch."""
        begin = self._host + stall
        if piece.ends is not None:
            free = np.maximum(self._stream + piece.device[step], self._host + piece.soonest[step])
            self._stream = np.maximum(free, begin + piece.ends[step])
        self._host = ends = begin + piece.host[step]
        if piece.syncs:
            self._host = np.maximum(ends, self._stream)
            self._out[4][:, step] += self._host - ends

    def _meet(self, step: int) -> Float64:
        """Have all ranks come to the collectives; return how long each waits."""
        model = self._model
        if model.barrier == ALONE:
            return self._none
        mine = self._stream if model.barrier == DEVICE else self._host
        together = np.full_like(mine, mine.max() + model.exchange[step])
        if model.barrier == DEVICE:
            self._stream = together
        else:
            self._host = together
        return together - mine


@dataclass(frozen=True, slots=True)
class _Piece:
    """Phases without a wait in between, as one: their sums, and when the device is done at the earliest.

    Attributes:
        host: What they take on the host; like all arrays here, shape (steps, ranks).
        device: What they launch.
        soonest: The end of that on a free device if the first of them launched it all, from its begin on.
        ends: The end of that, as the host launches it and ends its phases; None if they launch nothing.
        syncs: Whether the host waits for its device after them.
    """

    host: Float64
    device: Float64
    soonest: Float64
    ends: Float64 | None
    syncs: bool


def _pieces(model: StepModel, first: int, last: int) -> Iterator[_Piece]:
    """Yield the pieces of some phases, each up to the next wait of the host for its device."""
    while first < last:
        behind = next((each + 1 for each in range(first, last) if model.syncs[each]), last)
        yield _piece(model, slice(first, behind))
        first = behind


def _piece(model: StepModel, phases: slice) -> _Piece:
    host, device = model.host[phases], model.device[phases]
    ended, launched = host.cumsum(axis=0), device.cumsum(axis=0)
    ends = None
    if device.any():
        # A phase's work begins when the phase does, and does not end before it. What follows it queues.
        least = np.maximum(ended, ended - host + device)
        least[0] = ended[0]
        ends = np.where(device > 0, least + launched[-1] - launched, -np.inf).max(axis=0).T
    work = launched[-1].T
    soonest = np.where(work > 0, work, -np.inf)
    return _Piece(ended[-1].T, work, soonest, ends, bool(model.syncs[phases][-1]))
