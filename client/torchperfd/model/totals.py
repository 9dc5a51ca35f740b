"""What a rank measures since attach, declared once: the wire, the store and the report follow.

The client's totals and the daemon's are made of these. Each adds its steps by phase, which the client keeps
by slot and the daemon by name.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Final

from torchperfd.model.host_memory import HostMemory
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.messages import (
    AtMost,
    Count,
    Known,
    Name,
    Nanoseconds,
    Quantity,
    Reason,
    UnixNanoseconds,
    Wire,
)
from torchperfd.model.process import UNBOUND, Coordinate, CpuBinding, HookState
from torchperfd.model.source_lines import SyncWait, TimedLine

MAX_THREADS: Final = 2**16
MAX_PHASES: Final = 32


@dataclass(slots=True)
class PhaseTotals:
    """Totals of one phase.

    Attributes:
        ns: Exclusive host time.
        squares: Sum over calls of squared nanoseconds.
        device_ns: Time on the device, of the calls that were timed there.
        device_calls: How many those were; 0 without a device.
    """

    calls: Count = 0
    ns: Nanoseconds = 0
    squares: Annotated[Quantity, Wire("sum_squares_ns2")] = 0.0
    device_ns: Nanoseconds = 0
    device_calls: Count = 0

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
        return deviation(self.calls, self.ns, self.squares) if self.calls else 0.0

    @property
    def device_mean_seconds(self) -> float | None:
        """Mean time of a call on the device; None where none was timed there."""
        return self.device_ns / self.device_calls / 1e9 if self.device_calls else None

    def count(self, ns: int) -> None:
        """Add one call of so many nanoseconds."""
        self.calls += 1
        self.ns += ns
        self.squares += float(ns) * ns

    def plus(self, other: "PhaseTotals") -> "PhaseTotals":
        return PhaseTotals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

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
class StepTotals:
    """Totals of all steps of one kind, apart from their phases; unknown values are 0.

    Attributes:
        samples: What they trained or validated on, where the batches show it.
        squares: Sum over steps of squared nanoseconds; 0 where it was not kept.
        micro_batches: Batches that went backward in them; more than ``steps`` where gradients
            accumulate. Kept for training only.
        skipped: Optimizer steps that were called off: refused by a ``GradScaler``, or their
            gradients zeroed unused. Kept for training only.
        tokens: What they trained or validated on, where the script reports it.
    """

    steps: Count = 0
    ns: Annotated[Nanoseconds, Wire("step_ns")] = 0
    samples: Count = 0
    squares: Annotated[Quantity, Wire("sum_squares_ns2")] = field(default=0.0, kw_only=True)
    micro_batches: Count = field(default=0, kw_only=True)
    skipped: Count = field(default=0, kw_only=True)
    tokens: Count = field(default=0, kw_only=True)


@dataclass(slots=True)
class GcTotals:
    """Collections of one generation of Python's garbage collector, from the first step to the newest."""

    calls: Count = 0
    ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """What the caching allocator of the rank's device holds, in bytes.

    Attributes:
        allocated_bytes: By tensors.
        reserved_bytes: From the device, for tensors of now and later.
        peak_bytes: Most that tensors ever had.
        device_uuid: Of the device with most of it, without ``GPU-`` or ``MIG-``; empty if unknown.
    """

    allocated_bytes: Count
    reserved_bytes: Count
    peak_bytes: Count
    device_uuid: Name = ""


def _threads(value: int) -> int | None:
    return value if 1 <= value <= MAX_THREADS else None


def _cpus(value: float) -> float | None:
    return value if 0 < value <= MAX_THREADS else None


def _binding(found: CpuBinding) -> CpuBinding:
    return found if 0 < found.allowed < found.share <= MAX_THREADS else UNBOUND


def _sound(found: LoaderFacts) -> LoaderFacts | None:
    return found if found.is_sound() else None


def _places(found: tuple[Coordinate, ...]) -> tuple[Coordinate, ...]:
    return tuple(each for each in found if each.rank < each.size)


@dataclass(slots=True, kw_only=True)
class Placed:
    """A rank's place in each dimension of its job; empty without named process groups."""

    coordinates: Annotated[tuple[Coordinate, ...], AtMost(16), _places] = ()


@dataclass(slots=True, kw_only=True)
class StatusTotals(Placed):
    """What the short status of a rank has of its totals.

    Attributes:
        loader: How the training loader is used; None before a sample, and without a loader.
        threads: How many threads an operation on the CPU may use; None before a draw or a step showed it.
        host_memory: Memory of the process on the host; None if unknown.
    """

    loader: Annotated[LoaderFacts, _sound] | None = None
    threads: Annotated[int, _threads] | None = None
    host_memory: HostMemory | None = None


@dataclass(slots=True, kw_only=True)
class ProcessTotals(StatusTotals):
    """Everything since attach, apart from the steps.

    Attributes:
        began_ns: When the first step began, Unix nanoseconds; 0 where it was not kept.
        ended_ns: When the newest step ended.
        checkpoint: Saves between steps, in the time of no step; None from a client that does not report them.
            Saves within a step are its phase.
        gc: Pauses of the garbage collector from the first step's start to the newest one's end, by
            generation; empty where unknown.
        compiled: Compilations by torch.compile, wherever they fell.
        background_saves: Saves that another thread has begun, and the time for which one was under way.
        loader_ready: Batches that waited in the loader's workers at the newest draw; None without workers.
        epoch: Training passes, each with what belongs to it, that have ended.
        train_pass: Passes over a loader in training that have ended.
        validate_pass: Passes over a loader in validation that have ended.
        cuda: Memory of the device; None without CUDA.
        flops_per_step: Floating-point operations of a training step; None where not counted.
        peak_flops: What the device can do of them in a second; None where unknown.
        overhead: What the client costs, as a part of the time of training; None where not measured.
        degradation_level: Tiers of detail that were given up to keep within the overhead allowed.
        hooks: Which hooks are on; empty where that is not known.
        sync_waits: The lines that wait longest for the device, the longest first; empty without a device.
        cpus: How many CPUs the process may use; None if unknown.
        binding: To how many CPUs the process is bound, if these are fewer than its share.
        switches: Debugging switches that are on, as they are written.
        epoch_starts: Waits for the first batches of training passes beyond the usual wait; without the first
            pass.
        collect_calls: The lines whose calls of ``gc.collect()`` within training took longest.
        script_collectives: The lines whose own collectives took longest.
        graph_limit: A function that torch.compile has given up on, such as ``forward() at model.py:12``;
            empty for none.
        device_work: Of training steps timed whole on the device: what it took without waits for other ranks.
    """

    began_ns: UnixNanoseconds = 0
    ended_ns: UnixNanoseconds = 0
    checkpoint: PhaseTotals | None = None
    gc: Annotated[tuple[GcTotals, ...], AtMost(4)] = ()
    compiled: PhaseTotals = field(default_factory=PhaseTotals)
    background_saves: PhaseTotals = field(default_factory=PhaseTotals)
    loader_ready: int | None = None
    epoch: PhaseTotals = field(default_factory=PhaseTotals)
    train_pass: PhaseTotals = field(default_factory=PhaseTotals)
    validate_pass: PhaseTotals = field(default_factory=PhaseTotals)
    cuda: CudaMemory | None = None
    flops_per_step: Known | None = None
    peak_flops: Known | None = None
    overhead: Annotated[Known | None, Wire("overhead_ratio")] = None
    degradation_level: Annotated[int, Wire("shed_tiers")] = 0
    hooks: Annotated[tuple[HookState, ...], AtMost(64)] = ()
    sync_waits: Annotated[tuple[SyncWait, ...], AtMost(8)] = ()
    cpus: Annotated[float, _cpus] | None = None
    binding: Annotated[CpuBinding, _binding] = UNBOUND
    switches: Annotated[tuple[Name, ...], AtMost(8)] = ()
    epoch_starts: PhaseTotals = field(default_factory=PhaseTotals)
    collect_calls: Annotated[tuple[TimedLine, ...], AtMost(8)] = ()
    script_collectives: Annotated[tuple[TimedLine, ...], AtMost(8)] = ()
    graph_limit: Reason = ""
    device_work: PhaseTotals = field(default_factory=PhaseTotals)

    @property
    def sync_wait_ns(self) -> int:
        """The time for which training steps have waited for the device in these lines."""
        return sum(wait.ns for wait in self.sync_waits)


def deviation(count: int, ns: int, squares: float) -> float:
    """Return the population standard deviation of times in seconds, from their sums in nanoseconds."""
    mean = ns / count
    return math.sqrt(max(0.0, squares / count - mean * mean)) / 1e9
