"""The account: what drained steps add up to, per kind of step and phase. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.process import UNBOUND, Coordinate, CpuBinding, HookState, HostMemory
from torchperfd.model.source_lines import SyncWait, TimedLine
from torchperfd.steps.phases import PHASE_SLOTS, TRAIN, VALIDATE, StepBatch


@dataclass(slots=True)
class PhaseTotals:
    """Totals of one phase.

    Attributes:
        calls: How often the phase was entered.
        ns: Exclusive host time.
        squares: Sum over calls of squared nanoseconds.
        device_ns: Time on the device, of the calls that were timed there.
        device_calls: How many those were; 0 without a device.
    """

    calls: int = 0
    ns: int = 0
    squares: float = 0.0
    device_ns: int = 0
    device_calls: int = 0

    @property
    def seconds(self) -> float:
        """Exclusive host time in seconds."""
        return self.ns / 1e9

    @property
    def mean_seconds(self) -> float:
        """Mean exclusive time of a call."""
        return self.ns / self.calls / 1e9 if self.calls else 0.0

    @property
    def std_seconds(self) -> float:
        """Population standard deviation of a call's exclusive time."""
        return _deviation(self.calls, self.ns, self.squares) if self.calls else 0.0

    @property
    def device_mean_seconds(self) -> float | None:
        """Mean time of a call on the device; None where none was timed there."""
        return self.device_ns / self.device_calls / 1e9 if self.device_calls else None

    def minus(self, part: "PhaseTotals") -> "PhaseTotals":
        """Return what remains without ``part``, which is contained in this."""
        return PhaseTotals(
            calls=self.calls - part.calls,
            ns=self.ns - part.ns,
            squares=max(0.0, self.squares - part.squares),
            device_ns=self.device_ns - part.device_ns,
            device_calls=self.device_calls - part.device_calls,
        )


@dataclass(slots=True)
class KindTotals:
    """Totals of all steps of one kind.

    Attributes:
        steps: How many.
        ns: Their time.
        samples: What they trained or validated on, where the batches show it.
        phases: Totals by phase slot; their time sums to ``ns``.
        squares: Sum over steps of squared nanoseconds; 0 where it was not kept.
        micro_batches: Batches that went backward in them; more than ``steps`` where gradients
            accumulate. Kept for training only.
        skipped: Optimizer steps that were called off: refused by a ``GradScaler``, or their
            gradients zeroed unused. Kept for training only.
        tokens: What they trained or validated on, where the script reports it.
    """

    steps: int = 0
    ns: int = 0
    samples: int = 0
    phases: list[PhaseTotals] = field(default_factory=lambda: [PhaseTotals() for _ in range(PHASE_SLOTS)])
    squares: float = 0.0
    micro_batches: int = 0
    skipped: int = 0
    tokens: int = 0

    @property
    def mean_seconds(self) -> float:
        """Mean time of a step; 0 before the first."""
        return self.ns / self.steps / 1e9 if self.steps else 0.0

    @property
    def std_seconds(self) -> float | None:
        """Population standard deviation of a step's time; None where it was not kept."""
        if not self.steps or (self.ns and not self.squares):
            return None
        return _deviation(self.steps, self.ns, self.squares)

    def copy(self) -> "KindTotals":
        """Return these totals as they are now."""
        phases = [PhaseTotals(p.calls, p.ns, p.squares, p.device_ns, p.device_calls) for p in self.phases]
        return replace(self, phases=phases)

    def minus(self, part: "KindTotals") -> "KindTotals":
        """Return what remains without ``part``, which is contained in this."""
        return KindTotals(
            steps=self.steps - part.steps,
            ns=self.ns - part.ns,
            samples=self.samples - part.samples,
            phases=[own.minus(other) for own, other in zip(self.phases, part.phases, strict=True)],
            squares=max(0.0, self.squares - part.squares),
            micro_batches=self.micro_batches - part.micro_batches,
            skipped=self.skipped - part.skipped,
            tokens=self.tokens - part.tokens,
        )

    def add(self, batch: StepBatch) -> None:
        """Add steps of this kind."""
        self.steps += batch.count
        self.ns += batch.total_ns
        self.squares += batch.squares
        self.samples += batch.total_samples
        for slot, columns in batch.phases.items():
            phase = self.phases[slot]
            phase.calls += columns.total_calls
            phase.ns += columns.total_ns
            phase.squares += columns.squares


@dataclass(slots=True)
class GcTotals:
    """Collections of one generation of Python's garbage collector."""

    calls: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """What the caching allocator of the rank's device holds, in bytes.

    Attributes:
        allocated: By tensors.
        reserved: From the device, for tensors of now and later.
        peak: Most that tensors ever had.
        device_uuid: Of the device with most of it, as torch writes it; empty if unknown.
    """

    allocated: int
    reserved: int
    peak: int
    device_uuid: str = ""


@dataclass(slots=True)
class Totals:
    """Everything since attach.

    Attributes:
        train: All training steps, the first one included.
        validate: All validation steps.
        warmup: The first training step alone: what is initialised lazily is paid there.
        began_ns: When the first step began, Unix nanoseconds; 0 where it was not kept.
        ended_ns: When the newest step ended.
        checkpoint: Saves between steps, in the time of no step. Those within one are its phase.
        gc: Pauses of the garbage collector from the first step's start to the newest one's end, by
            generation; empty where unknown.
        compiled: Compilations by torch.compile, wherever they fell.
        background_saves: Saves that another thread has begun, and the time for which one was under way.
        ready: Batches that waited in the loader's workers at the newest draw; None without workers.
        epoch: Training passes, each with what belongs to it, that have ended.
        train_pass: Passes over a loader in training that have ended.
        validate_pass: Passes over a loader in validation that have ended.
        cuda: Memory of the device; None without CUDA.
        host_memory: Memory of the process on the host; None if unknown.
        flops_per_step: Floating-point operations of a training step; None where not counted.
        peak_flops: What the device can do of them in a second; None where unknown.
        overhead: What the client costs, as a part of the time of training; None where not measured.
        loader: How the training loader is used; None before a sample, and without a loader.
        degradation_level: Tiers of detail that were given up to keep within the overhead allowed.
        hooks: Which hooks are on; empty where that is not known.
        coordinates: The rank's place in each dimension of its job; empty without named process groups.
        sync_waits: The lines that wait longest for the device, the longest first; empty without a device.
        threads: How many threads an operation on the CPU may use; None before a draw or a step showed it.
        cpus: How many CPUs the process may use; None if unknown.
        binding: To how many CPUs the process is bound, if these are fewer than its share.
        switches: Debugging switches that are on, as they are written.
        epoch_starts: Waits for the first batches of training passes beyond the usual wait; without the first
            pass.
        collect_calls: The lines whose calls of ``gc.collect()`` within training took longest.
        script_collectives: The lines whose own collectives took longest.
        graph_limit: A function that torch.compile has given up on, with its place; empty for none.
        device_lag: How far the device was behind the host, by samples.
        device_work: Of training steps timed whole on the device: what it took without waits for other ranks.
    """

    train: KindTotals = field(default_factory=KindTotals)
    validate: KindTotals = field(default_factory=KindTotals)
    warmup: KindTotals = field(default_factory=KindTotals)
    began_ns: int = 0
    ended_ns: int = 0
    checkpoint: PhaseTotals = field(default_factory=PhaseTotals)
    gc: tuple[GcTotals, ...] = field(default_factory=lambda: tuple(GcTotals() for _ in range(3)))
    compiled: PhaseTotals = field(default_factory=PhaseTotals)
    background_saves: PhaseTotals = field(default_factory=PhaseTotals)
    ready: int | None = None
    epoch: PhaseTotals = field(default_factory=PhaseTotals)
    train_pass: PhaseTotals = field(default_factory=PhaseTotals)
    validate_pass: PhaseTotals = field(default_factory=PhaseTotals)
    cuda: CudaMemory | None = None
    host_memory: HostMemory | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    overhead: float | None = None
    degradation_level: int = 0
    loader: LoaderFacts | None = None
    hooks: tuple[HookState, ...] = ()
    coordinates: tuple[Coordinate, ...] = ()
    sync_waits: tuple[SyncWait, ...] = ()
    threads: int | None = None
    cpus: float | None = None
    binding: CpuBinding = UNBOUND
    switches: tuple[str, ...] = ()
    epoch_starts: PhaseTotals = field(default_factory=PhaseTotals)
    collect_calls: tuple[TimedLine, ...] = ()
    script_collectives: tuple[TimedLine, ...] = ()
    graph_limit: str = ""
    device_lag: PhaseTotals = field(default_factory=PhaseTotals)
    device_work: PhaseTotals = field(default_factory=PhaseTotals)

    def add(self, drained: Iterable[StepBatch]) -> None:
        """Add drained steps, in the order of time."""
        for batch in drained:
            self.began_ns = self.began_ns or batch.start[0]
            self.ended_ns = batch.start[-1] + batch.duration[-1]
            if (batch.kind[0], batch.index[0]) == (TRAIN, 0):
                self.warmup.add(batch)
            self.of(batch.kind[0]).add(batch)

    def copy(self) -> "Totals":
        """Return a copy that shares nothing that may change."""
        return replace(
            self,
            train=self.train.copy(),
            validate=self.validate.copy(),
            warmup=self.warmup.copy(),
            checkpoint=replace(self.checkpoint),
            gc=tuple(replace(generation) for generation in self.gc),
            compiled=replace(self.compiled),
            background_saves=replace(self.background_saves),
            epoch=replace(self.epoch),
            train_pass=replace(self.train_pass),
            validate_pass=replace(self.validate_pass),
            epoch_starts=replace(self.epoch_starts),
            device_lag=replace(self.device_lag),
            device_work=replace(self.device_work),
        )

    @property
    def sync_wait_ns(self) -> int:
        """The time for which training steps have waited for the device in these lines."""
        return sum(wait.ns for wait in self.sync_waits)

    def steady(self) -> KindTotals:
        """Return the training steps after the first."""
        return self.train.minus(self.warmup)

    def flops_utilization(self, steps: KindTotals) -> float | None:
        """Return the part of the device's peak that training steps made use of (MFU); None where unknown."""
        if not self.flops_per_step or not self.peak_flops or steps.steps <= 0 or steps.ns <= 0:
            return None
        return self.flops_per_step * steps.steps / (steps.ns / 1e9) / self.peak_flops

    def of(self, kind: int) -> KindTotals:
        """Return the totals of ``TRAIN`` or ``VALIDATE`` steps."""
        if kind == TRAIN:
            return self.train
        if kind == VALIDATE:
            return self.validate
        raise ValueError(f"no such kind of step: {kind}")


def _deviation(count: int, ns: int, squares: float) -> float:
    mean = ns / count
    return math.sqrt(max(0.0, squares / count - mean * mean)) / 1e9
