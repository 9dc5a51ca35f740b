"""Streams of a synchronous job's ranks, as the daemon gets them: phases with noise, a second at a time."""

from array import array
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd.model.process import Coordinate
from torchperfd.model.totals import GcTotals, PhaseTotals
from torchperfd_daemon.store.model import ArrivalColumns, KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Rank, Store

Float64 = npt.NDArray[np.float64]
Change = Callable[[int, int], Mapping[str, float]]
"""From rank and step to seconds that its phases take more."""

PHASES: Final = {
    "data": 0.002, "forward": 0.03, "loss": 0.001, "backward": 0.05, "optimizer": 0.008, "zero_grad": 0.001,
    "checkpoint": 0.0, "other": 0.003,
}  # fmt: skip
"""A healthy rank's own work: 95 ms."""
EXCHANGE_S: Final = 0.005

_LAUNCHING: Final = 0.2
"""Where work is on a device, the part of its time that the host takes to launch it."""
_LAUNCHED: Final = frozenset(("forward", "loss", "backward", "optimizer", "zero_grad"))
_TIMED_STEPS: Final = 4
"""Per report, of which there are device times: the client records events in some steps only."""

_BEGAN_S: Final = 1_700_000_000.0


class Job:
    """A job whose ranks all write into a store.

    Args:
        store: Where their steps go.
        ranks: How many.
        rng: Where noise comes from.
        spread: The relative standard deviation of a phase.
        run: Its name.
        recording: Step times of a real loop: what they differ by from their median, each phase does too, each
            rank from a place of its own; None for normal noise.
        stages: The pipeline stages that the ranks are split into, neighbouring ranks in one.
        on_device: Whether the work and the wait for other ranks are on devices, as with NCCL: the host
            launches work, and waits in ``other`` for what its step has come to.

    Attributes:
        saving: The ranks that save a checkpoint in the background now.
        switches: Debugging switches that are on.
    """

    def __init__(
        self,
        store: Store,
        ranks: int,
        rng: np.random.Generator,
        spread: float = 0.03,
        run: str = "streamed",
        recording: Float64 | None = None,
        *,
        stages: int = 1,
        on_device: bool = False,
    ) -> None:
        self._store = store
        self._stages = stages
        self._on_device = on_device
        self._rng = rng
        self._spread = spread
        self.step = 0
        self.seconds = 0.0
        """How long the job has run."""
        self.ranks = [
            store.join(RankIdentity(run, rank, ranks, pid=1000 + rank, node=f"node-{rank // 8}"))
            for rank in range(ranks)
        ]
        for rank in self.ranks:
            rank.state = State.TRAINING
        self._sums = [dict.fromkeys([*PHASES, "collective_wait"], 0) for _ in self.ranks]
        self._device_sums = [dict.fromkeys([*PHASES, "collective_wait"], 0) for _ in self.ranks]
        self._collected = [0] * ranks
        self._collections = [0] * ranks
        self.saving: set[int] = set()
        self.switches: tuple[str, ...] = ()
        self._saved = [0] * ranks
        self._recording = None if recording is None else recording / np.median(recording)
        self._places = None if recording is None else rng.integers(len(recording), size=ranks)

    @property
    def wall(self) -> float:
        """Unix seconds of the job's clock."""
        return _BEGAN_S + self.seconds

    def train(self, seconds: float, change: Change = lambda _rank, _step: {}) -> None:
        """Make the steps of so many seconds; ``gc`` in a change is a collection within the backward."""
        batches: list[list[dict[str, int]]] = [[] for _ in self.ranks]
        until = self.seconds + seconds
        ends: list[float] = []
        while True:
            works = [self._work(index, change) for index in range(len(self.ranks))]
            slowest = max(sum(work.values()) for work in works)
            if self.seconds + slowest + EXCHANGE_S > until and ends:
                break
            self.seconds += slowest + EXCHANGE_S
            ends.append(self.wall)
            self.step += 1
            for batch, work in zip(batches, works, strict=True):
                wait = slowest - sum(work.values()) + EXCHANGE_S
                batch.append(
                    {name: int(took * 1e9) for name, took in (work | {"collective_wait": wait}).items()}
                )
        for index, (rank, batch) in enumerate(zip(self.ranks, batches, strict=True)):
            self._report(index, rank, batch, ends, change)

    def _work(self, index: int, change: Change) -> dict[str, float]:
        noise = self._noise(index)
        work = {name: took * max(0.1, by) for (name, took), by in zip(PHASES.items(), noise, strict=True)}
        for name, more in change(index, self.step).items():
            work["backward" if name == "gc" else name] += more
        return work

    def _noise(self, index: int) -> Float64:
        """Return what each of a rank's phases is multiplied by."""
        if self._recording is None or self._places is None:
            return 1 + self._spread * self._rng.standard_normal(len(PHASES))
        place = int(self._places[index]) + self.step * len(PHASES)
        return self._recording[np.arange(place, place + len(PHASES)) % len(self._recording)]

    def _report(
        self, index: int, rank: Rank, batch: list[dict[str, int]], ends: list[float], change: Change
    ) -> None:
        sums, device_sums = self._sums[index], self._device_sums[index]
        first = self.step - len(batch)
        if self._on_device:
            for phases in batch[-_TIMED_STEPS:]:
                for name, ns in phases.items():
                    device_sums[name] += ns * len(batch) // min(_TIMED_STEPS, len(batch))
            batch = [_launched(phases) for phases in batch]
        for offset, phases in enumerate(batch):
            for name, ns in phases.items():
                sums[name] += ns
            collected = change(index, first + offset).get("gc", 0.0)
            self._collected[index] += int(collected * 1e9)
            self._collections[index] += collected > 0
            self._saved[index] += sum(phases.values()) if index in self.saving else 0
        end = array("q", [int(each * 1e9) for each in ends])
        steps = array("q", range(first, self.step))
        self._store.add_steps(
            rank,
            StepColumns(
                end,
                array("q", [sum(phases.values()) for phases in batch]),
                {name: array("q", [phases[name] for phases in batch]) for name in sums},
                ArrivalColumns(steps, end, end),
            ),
        )
        rank.totals = Totals(
            train=KindTotal(
                steps=self.step,
                ns=sum(sums.values()),
                phases={
                    name: PhaseTotals(
                        self.step,
                        ns,
                        device_ns=device_sums[name],
                        device_calls=self.step if self._on_device else 0,
                    )
                    for name, ns in sums.items()
                },
            ),
            coordinates=(Coordinate("pp", index * self._stages // len(self.ranks), self._stages),)
            if self._stages > 1
            else (),
            gc=(GcTotals(self._collections[index], self._collected[index]),),
            background_saves=PhaseTotals(1, self._saved[index]),
            switches=self.switches,
        )


def _launched(phases: Mapping[str, int]) -> dict[str, int]:
    """Return a step's phases on the host, from those on the device."""
    host = {name: int(ns * _LAUNCHING) if name in _LAUNCHED else ns for name, ns in phases.items()}
    host["collective_wait"] = int(phases["collective_wait"] * 0.01)
    host["other"] += sum(phases.values()) - sum(host.values())
    return host
