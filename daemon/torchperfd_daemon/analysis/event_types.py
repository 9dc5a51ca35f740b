"""The types into which a trace's text is decoded: events, their arguments, and the header.

`Event` is for a sound Kineto trace and decodes fastest. The others hold additional data: times for which a
double is too coarse, and the data from which the kind of an event without a category is inferred.
"""

import math
from decimal import Decimal
from typing import Annotated, Final, TypeVar

import msgspec

from torchperfd_daemon.loader_workers import LoaderFacts

_Decoded = TypeVar("_Decoded")

# A start below this many µs, written with three decimals, is exact to the ns as a double.
EXACT_BELOW_US: Final = float(1 << 43)
NOTHING: Final = msgspec.Raw(b"")


_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Args(msgspec.Struct, gc=False):
    """The arguments the analyser reads; lists of the inputs stay JSON text, `NOTHING` when absent."""

    external_id: int | str | None = msgspec.field(name="External id", default=0)
    legacy_external_id: int | str | None = msgspec.field(name="external id", default=0)
    correlation: int | str | None = -1
    process_group: int | str | None = msgspec.field(name="Process Group Name", default=None)
    collective: int | str | None = msgspec.field(name="Collective name", default=None)
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=NOTHING)
    input_elements: int | str | None = msgspec.field(name="In msg nelems", default=-1)
    output_elements: int | str | None = msgspec.field(name="Out msg nelems", default=-1)
    dtype: int | str | None = None
    group_sequence: int | str | None = msgspec.field(name="Seq", default=-1)
    sequence: int | None = msgspec.field(name="Sequence number", default=-1)
    finished: bool | int | str | None = True
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    types: msgspec.Raw = msgspec.field(name="Input type", default=NOTHING)
    allocated: _Int64 = msgspec.field(name="Bytes", default=0)
    device_type: _Int32 = msgspec.field(name="Device Type", default=0)
    reserved: _Int64 = msgspec.field(name="Total Reserved", default=0)


class ForeignArgs(Args, gc=False):
    """The arguments that show where an event without a category ran, and the names in metadata events.

    The names are those of torch_npu and of Kineto's metadata events.
    """

    stream: int | str | None = None
    task_type: str | None = msgspec.field(name="Task Type", default=None)
    connection: int | str | None = msgspec.field(name="connection_id", default=None)
    label: str | None = msgspec.field(name="name", default=None)
    labels: str | None = None


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` in microseconds, negative when absent."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = -1.0
    dur: float = -1.0
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """An event of a clock that a double is too coarse for, or that writes numbers as strings."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Decimal = Decimal(-1)
    dur: float = -1.0
    args: Args | None = None


class ForeignEvent(ExactEvent, gc=False):
    """An event of a trace whose events lack categories."""

    args: ForeignArgs | None = None


AnyEvent = Event | ExactEvent


class Distributed(msgspec.Struct):
    """The rank that wrote the trace, in a distributed run."""

    rank: int | None = None
    world_size: int | None = None


class Device(msgspec.Struct):
    """One accelerator; 0 for what the trace does not contain.

    Attributes:
        memory: In bytes.
        generation: The first number of its CUDA compute capability.
    """

    name: str = ""
    memory: int = msgspec.field(name="totalGlobalMem", default=0)
    generation: int = msgspec.field(name="computeMajor", default=0)


class Capture(msgspec.Struct):
    """Data from torchperfd's client at the time of the capture: the unrecorded steps and their loader."""

    unrecorded_step_ns: int = 0
    unrecorded_phase_ns: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    loader: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def phases(self) -> dict[str, float]:
        """Return the phases; none if the file has another type there."""
        found = _decoded(self.unrecorded_phase_ns, dict[str, float]) or {}
        return {name: ns for name, ns in found.items() if 0 <= ns < math.inf}

    def loader_facts(self) -> LoaderFacts | None:
        """Return the data on the loader; None if the file has none, or another type there."""
        facts = _decoded(self.loader, LoaderFacts)
        return facts if facts is not None and facts.is_sound() else None


def _decoded(text: msgspec.Raw, kind: type[_Decoded]) -> _Decoded | None:
    """Return a part of the header; None if it is absent or of another type, which costs only this part."""
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Header(msgspec.Struct):
    """The fields of a trace besides its events.

    Attributes:
        base_ns: The origin of all times, in ns since 1970; 0 if they are absolute.
        distributed: Rank and world size; None for a run of one process.
        devices: The accelerators of the machine.
        capture: The data from torchperfd's client; None for a trace of another origin.
    """

    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[Device] = msgspec.field(name="deviceProperties", default_factory=list)
    capture: Capture | None = msgspec.field(name="torchperfd", default=None)
    warnings: list[str] = msgspec.field(name="WARNING", default_factory=list)
    errors: list[str] = msgspec.field(name="ERROR", default_factory=list)
