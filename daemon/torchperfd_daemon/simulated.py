"""What ``serve --demo`` shows: GPUs, ranks and owners that do not exist.

They let you try dashboards and commands on a machine without any GPU.
"""

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torchperfd.model.host_memory import HostMemory
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import GpuCollector, GpuReading
from torchperfd_daemon.ownership import Owner
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Rank, Store

_GIB: Final = 1024**3
_GPU_STEP_SECONDS: Final = 0.4
# Out of each of these spans, GPU 5 is too hot for the last part, so that there is something to see.
_HOT_EVERY_SECONDS: Final = 120.0
_HOT_FOR_SECONDS: Final = 30.0
_HOT_GPU: Final = 5
# Out of each of these spans, the loaders starve from half a minute on, until the GPU gets hot.
_STARVED_EVERY_SECONDS: Final = 360.0
_STARVED_FROM_SECONDS: Final = 28.0
_STARVED_FOR_SECONDS: Final = 60.0
# Of a GPU's load, while it waits for its host to load data.
_STARVED_LOAD: Final = 0.6
_IDLE_WATTS: Final = 90.0
_BUSY_WATTS: Final = 600.0


class SimulatedGpuCollector(GpuCollector):
    """GPUs under a training job that never ends: waves of load, and one GPU that gets hot at times.

    Everything follows from the clock, so that two samples at the same moment are equal.
    """

    name = "simulated"

    def __init__(self, count: int = 8, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._count = count
        self._clock = clock
        self._began = clock()

    def read(self) -> list[GpuReading]:
        seconds = self._clock() - self._began
        return [_gpu_reading(index, seconds) for index in range(self._count)]


def _gpu_reading(index: int, seconds: float) -> GpuReading:
    hot, hot_seconds = _heat(seconds) if index == _HOT_GPU else (False, 0.0)
    starved, starved_seconds = _starvation(seconds)
    # A slow swell, a little different on each GPU: batches are not all alike.
    load = (0.88 + 0.08 * math.sin(seconds / 17 + index)) * (_STARVED_LOAD if starved else 1.0)
    speed = 0.7 if hot else 1.0
    slowed_seconds = 0.3 * hot_seconds + (1 - _STARVED_LOAD) * starved_seconds
    steps = (seconds - slowed_seconds) / _GPU_STEP_SECONDS
    watts = _IDLE_WATTS + (_BUSY_WATTS - _IDLE_WATTS) * load * speed
    # The integral of the swell, so that energy and power agree.
    swell = 0.88 * seconds - 0.08 * 17 * (math.cos(seconds / 17 + index) - math.cos(index))
    joules = _IDLE_WATTS * seconds + (_BUSY_WATTS - _IDLE_WATTS) * (swell - 0.88 * slowed_seconds)

    reading = GpuReading(str(index), f"GPU-51a7ed00-0000-4000-8000-{index:012d}")
    reading.put("gpu_up", 1)
    reading.put("gpu_info", 1, "Simulated H100", "0.0", f"00000000:{0x1B + index:02X}:00.0")
    reading.put("gpu_utilization_ratio", min(1.0, load + 0.05))
    reading.put("gpu_sm_active_ratio", load * 0.9)
    reading.put("gpu_sm_occupancy_ratio", load * 0.4)
    reading.put("gpu_tensor_active_ratio", load * 0.45 * speed)
    reading.put("gpu_dram_active_ratio", load * 0.6)
    reading.put("gpu_memory_used_bytes", 61 * _GIB)
    reading.put("gpu_memory_total_bytes", 80 * _GIB)
    reading.put("gpu_power_watts", watts)
    reading.put("gpu_energy_joules", joules)
    reading.put("gpu_temperature_celsius", round(48 + 18 * load) + 20 * hot, "gpu")
    reading.put("gpu_temperature_celsius", round(56 + 20 * load) + 18 * hot, "memory")
    reading.put("gpu_clock_hertz", 1.98e9 * speed, "graphics")
    reading.put("gpu_clock_hertz", 1.98e9 * speed, "sm")
    reading.put("gpu_clock_hertz", 2.619e9, "memory")
    reading.put("gpu_clock_hertz", 1.545e9, "video")
    reading.put("gpu_throttle_seconds", hot_seconds, "hw_thermal_slowdown")
    reading.put("gpu_throttle_seconds", 0, "hw_power_brake_slowdown")
    reading.put("gpu_throttle_seconds", seconds * 0.02, "sw_power_cap")
    reading.put("gpu_pcie_bytes", steps * 40e6, "receive")
    reading.put("gpu_pcie_bytes", steps * 2e6, "transmit")
    reading.put("gpu_nvlink_bytes", steps * 6e9, "receive")
    reading.put("gpu_nvlink_bytes", steps * 6e9, "transmit")
    for kind in ("corrected", "uncorrected"):
        for scope in ("volatile", "aggregate"):
            reading.put("gpu_ecc_errors", 0, kind, scope)
    reading.put("gpu_row_remap_pending", 0)
    reading.put("gpu_row_remap_failure", 0)
    return reading


def _heat(seconds: float) -> tuple[bool, float]:
    """Return whether the hot GPU is hot after some seconds, and for how long it has been so far."""
    return _recurring(seconds, _HOT_EVERY_SECONDS, _HOT_EVERY_SECONDS - _HOT_FOR_SECONDS, _HOT_FOR_SECONDS)


def _starvation(seconds: float) -> tuple[bool, float]:
    """Return whether the loaders starve after some seconds, and for how long they have so far."""
    return _recurring(seconds, _STARVED_EVERY_SECONDS, _STARVED_FROM_SECONDS, _STARVED_FOR_SECONDS)


def _recurring(seconds: float, every: float, begin: float, lasts: float) -> tuple[bool, float]:
    spans, within = divmod(seconds, every)
    return begin < within <= begin + lasts, spans * lasts + min(lasts, max(0.0, within - begin))


RUN: Final = "demo"
"""The simulated run."""

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
            progress.ready = 0 if self._is_starved() else 4
            progress.record.totals = self._totals(progress)

    def _is_starved(self) -> bool:
        return _starvation((self._end_ns - self._began_ns) / _SECOND)[0]

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
        data = _STARVED_DATA_MS if self._is_starved() else _ON_THE_HOST["data"]
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
        # Each GPU idles while its host does something else, which its own times have as well.
        phases = {
            name: PhaseTotals(steps, ns, device_ns=ns, device_calls=steps)
            for name, ns in progress.phase_ns.items()
        }
        train = KindTotal(steps=steps, ns=progress.ns, samples=samples, phases=phases)
        return Totals(
            train=replace(train, tokens=samples * _TOKENS_PER_SAMPLE, micro_batches=steps),
            validate=KindTotal(steps=validated, ns=validated * _VALIDATE_STEP_NS),
            recorded=steps + validated,
            checkpoint=PhaseTotals(saves, saves * _SAVE_NS),
            gc=(GcTotals(steps // 50, steps // 50 * _MS),),
            loader_ready=progress.ready,
            host_memory=HostMemory(6 * _GIB, 7 * _GIB, first_bytes=5 * _GIB),
            cuda=CudaMemory(allocated_bytes=52 * _GIB, reserved_bytes=61 * _GIB, peak_bytes=58 * _GIB),
            flops_per_step=_FLOPS_PER_STEP,
            peak_flops=_PEAK_FLOPS,
            overhead=0.0004,
            began_ns=self._began_ns,
            ended_ns=self._end_ns,
        )


_SLURM_JOB: Final = "4242"


class SimulatedOwners:
    """A collector that gives every simulated GPU to one Slurm job, the simulated run's.

    Args:
        gpus: Returns the newest reading of each GPU.
    """

    name = "ownership"

    def __init__(self, gpus: Callable[[], Sequence[GpuReading]]) -> None:
        self._gpus = gpus

    def of(self, identity: RankIdentity) -> Owner:
        if identity.run != RUN:
            return Owner(slurm_job_id=identity.slurm_job_id, pod_uid=identity.pod_uid)
        uuids = {reading.gpu: reading.uuid for reading in self._gpus()}
        return Owner(slurm_job_id=_SLURM_JOB, gpu_uuid=uuids.get(str(identity.local_rank), ""))

    def sample(self) -> Sequence[Family]:
        """Return the owners of the simulated GPUs."""
        family = Family(
            "gpu_allocation_info",
            "Who a GPU was given to, and by what.",
            "gauge",
            ("gpu", "gpu_uuid", "allocator", "allocation"),
        )
        for reading in self._gpus():
            family.add(1, reading.gpu, reading.uuid, "slurm", _SLURM_JOB)
        return [family]
