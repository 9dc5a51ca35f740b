"""A simulated training job, one rank per simulated GPU."""

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torchperfd.host_memory import HostMemory
from torchperfd_daemon.collectors.gpu_base import GpuReading
from torchperfd_daemon.store import (
    CudaMemory,
    GcTotal,
    KindTotal,
    PhaseTotal,
    Rank,
    RankIdentity,
    State,
    StepColumns,
    Store,
    Totals,
)

RUN: Final = "demo"
"""The simulated run."""

_GIB: Final = 1024**3
_MS: Final = 1_000_000
_SECOND: Final = 1_000_000_000

# What a rank does in a step, in milliseconds, at its GPU's full clock; the rest is waiting for others.
_ON_THE_GPU: Final = {"h2d": 4.0, "forward": 118.0, "loss": 6.0, "backward": 205.0, "optimizer": 22.0}
_ON_THE_HOST: Final = {"data": 9.0, "zero_grad": 2.0, "other": 7.0}
_REDUCE_MS: Final = 14.0
_SAMPLES_PER_STEP: Final = 8
_TOKENS_PER_SAMPLE: Final = 4096
_FLOPS_PER_STEP: Final = 1.6e14
_PEAK_FLOPS: Final = 989e12

# Out of each of these many steps, loaders starve in some, from half a minute after the start on.
_STARVED_EVERY: Final = 800
_STARVED_FROM: Final = 70
_STARVED_FOR: Final = 200
_STARVED_DATA_MS: Final = 240.0
_VALIDATE_EVERY: Final = 250
_VALIDATE_STEPS: Final = 20
_VALIDATE_STEP_NS: Final = 110 * _MS
_SAVE_EVERY: Final = 500
_SAVE_NS: Final = 2600 * _MS

# After a longer sleep than this, such as of a laptop, the ranks continue from now.
_MAX_BEHIND_NS: Final = 60 * _SECOND
_REPORT_INTERVAL_S: Final = 1.0


@dataclass(slots=True)
class _Progress:
    """One rank's sums since it began; nanoseconds."""

    record: Rank
    steps: int = 0
    ns: int = 0
    phase_ns: dict[str, int] = field(default_factory=dict)
    ready: int = 4

    def add(self, phases: dict[str, int]) -> int:
        """Add a step; return its duration."""
        duration = sum(phases.values())
        self.steps += 1
        self.ns += duration
        for name, ns in phases.items():
            self.phase_ns[name] = self.phase_ns.get(name, 0) + ns
        return duration


class SimulatedRanks:
    """A training job that never ends, one rank per simulated GPU.

    All ranks step together, each as fast as the clock of its GPU allows, so a hot GPU delays the others.
    The loaders starve at times, and there are validations and saves. Nothing is random.

    Args:
        gpus: Returns the newest reading of each GPU.
    """

    def __init__(
        self,
        store: Store,
        gpus: Callable[[], Sequence[GpuReading]],
        node: str,
        ranks: int = 8,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._gpus = gpus
        self._wall = wall
        self._began_ns = self._end_ns = int(wall() * _SECOND)
        self._step = 0
        self._ranks = [
            _Progress(
                store.join(
                    RankIdentity(
                        run=RUN,
                        rank=rank,
                        world_size=ranks,
                        local_rank=rank,
                        job_name="demo",
                        node=node,
                        script="demo.py",
                    )
                )
            )
            for rank in range(ranks)
        ]

    async def run(self) -> None:
        """Train until cancelled."""
        while True:
            self.advance()
            await asyncio.sleep(_REPORT_INTERVAL_S)

    def advance(self) -> None:
        """Make all steps that have ended by now."""
        now_ns = int(self._wall() * _SECOND)
        if now_ns - self._end_ns > _MAX_BEHIND_NS:
            self._end_ns = now_ns
        speeds = self._speeds()
        batches = [StepColumns(array("q"), array("q"), {}) for _ in self._ranks]
        while True:
            steps = self._next(speeds)
            duration = sum(steps[0].values())
            pause, state = self._after(self._step + 1)
            if self._end_ns + duration > now_ns:
                break
            self._step += 1
            self._end_ns += duration
            for progress, batch, phases in zip(self._ranks, batches, steps, strict=True):
                batch.end_unix_ns.append(self._end_ns)
                batch.duration_ns.append(progress.add(phases))
                for name, ns in phases.items():
                    batch.phases.setdefault(name, array("q")).append(ns)
                progress.record.state = state
            self._end_ns += pause
        for progress, batch in zip(self._ranks, batches, strict=True):
            self._store.ingested_steps += len(batch.duration_ns)
            self._store.add_steps(progress.record, batch)
            progress.ready = 0 if _starved(self._step) else 4
            progress.record.totals = self._totals(progress)

    def _speeds(self) -> list[float]:
        """Return each GPU's clock as a part of the fastest one's."""
        clocks = {
            reading.gpu: reading.values.get(("gpu_clock_hertz", ("sm",)), 0.0) for reading in self._gpus()
        }
        fastest = max(clocks.values(), default=0.0)
        return [
            clocks.get(str(rank), fastest) / fastest if fastest else 1.0 for rank in range(len(self._ranks))
        ]

    def _next(self, speeds: list[float]) -> list[dict[str, int]]:
        """Return the phases of the next step of each rank; they sum to the same for all."""
        data = _STARVED_DATA_MS if _starved(self._step) else _ON_THE_HOST["data"]
        steps = []
        for rank, speed in enumerate(speeds):
            # Batches are not all alike.
            size = 1 + 0.03 * math.sin(self._step * 12.9898 + rank * 78.233)
            took_ms = {**_ON_THE_HOST, "data": data * size}
            took_ms |= {name: ms * size / speed for name, ms in _ON_THE_GPU.items()}
            steps.append({name: int(ms * _MS) for name, ms in took_ms.items()})
        slowest = max(sum(phases.values()) for phases in steps)
        for phases in steps:
            phases["collective_wait"] = slowest - sum(phases.values()) + int(_REDUCE_MS * _MS)
        return steps

    def _after(self, step: int) -> tuple[int, State]:
        """Return how long the ranks do something else after a step, and what."""
        if step % _SAVE_EVERY == 0:
            return _SAVE_NS, State.CHECKPOINTING
        if step % _VALIDATE_EVERY == 0:
            return _VALIDATE_STEPS * _VALIDATE_STEP_NS, State.VALIDATING
        return 0, State.TRAINING

    def _totals(self, progress: _Progress) -> Totals:
        steps = progress.steps
        saves = steps // _SAVE_EVERY
        validated = (steps // _VALIDATE_EVERY - saves) * _VALIDATE_STEPS
        samples = steps * _SAMPLES_PER_STEP
        phases = {
            name: PhaseTotal(steps, ns, device_ns=ns, device_calls=steps)
            if name in _ON_THE_GPU
            else PhaseTotal(steps, ns)
            for name, ns in progress.phase_ns.items()
        }
        train = KindTotal(steps=steps, ns=progress.ns, samples=samples, phases=phases)
        return Totals(
            train=replace(train, tokens=samples * _TOKENS_PER_SAMPLE, micro_batches=steps),
            validate=KindTotal(steps=validated, ns=validated * _VALIDATE_STEP_NS),
            recorded=steps + validated,
            checkpoint=PhaseTotal(saves, saves * _SAVE_NS),
            gc=(GcTotal(steps // 50, steps // 50 * _MS),),
            loader_ready=progress.ready,
            host_memory=HostMemory(6 * _GIB, 7 * _GIB),
            cuda=CudaMemory(allocated=52 * _GIB, reserved=61 * _GIB, peak=58 * _GIB),
            flops_per_step=_FLOPS_PER_STEP,
            peak_flops=_PEAK_FLOPS,
            overhead=0.0004,
            began_ns=self._began_ns,
            ended_ns=self._end_ns,
        )


def _starved(step: int) -> bool:
    return _STARVED_FROM <= step % _STARVED_EVERY < _STARVED_FROM + _STARVED_FOR
