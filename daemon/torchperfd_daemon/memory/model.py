"""What a memory snapshot holds: segments, blocks, and the stacks that allocated them. Sizes in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeAlias


class Frame(NamedTuple):
    """One call of a stack; empty text and line 0 are unknown."""

    filename: str
    line: int
    name: str


Stack: TypeAlias = tuple[Frame, ...]
"""Frames from the innermost outwards; empty if none was recorded."""


class State(Enum):
    """The use of a block."""

    ALLOCATED = "allocated"
    AWAITING_FREE = "awaiting free"
    """Freed by the script, and still used by another stream."""
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        requested: What the script asked for; ``size`` is that, rounded up by the allocator.
        address: None if unknown.
        is_earlier: It has no stack since it was allocated before recording began.
    """

    size: int
    requested: int
    state: State
    stack: Stack = ()
    address: int | None = None
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous memory that the allocator took from the device.

    Attributes:
        is_small: It serves requests of up to 1 MiB.
        is_private: It belongs to a pool of its own, such as that of a CUDA graph.
        blocks: In the order of their addresses.
    """

    device: int
    size: int
    is_small: bool
    is_expandable: bool = False
    is_private: bool = False
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """An allocation that ended in an out-of-memory error.

    Attributes:
        device_free: Bytes that were free on the device, outside of the allocator; None if unknown.
        time_us: Microseconds since 1970; None if unknown.
    """

    device: int
    size: int
    device_free: int | None = None
    time_us: int | None = None
    stack: Stack = ()


class Holder(NamedTuple):
    """Memory that is held at one moment.

    Attributes:
        is_earlier: It has no stack since it was allocated before recording began.
    """

    size: int
    stack: Stack
    is_earlier: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which the allocator held most memory, freed memory in use by other streams included.

    Attributes:
        size: Bytes. Of what was freed since, the size that was asked for counts; only the end state has the
            size after rounding.
        before: Bytes that were held before the first recorded event.
        event: The number of the event that reached it, from 1; 0 if all was held before.
        events: The number of allocations and releases recorded.
        time_us: Microseconds since 1970; None if unknown.
        is_end: Whether it is the end state.
    """

    size: int
    before: int
    event: int
    events: int
    time_us: int | None
    is_end: bool
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One file.

    Attributes:
        failures: Allocations that failed, oldest first on each device.
        peaks: By device, if its allocations were recorded.
        settings: The allocator's settings that differ from torch's defaults.
        skipped: Segments, blocks and events that could not be read.
    """

    path: Path
    file_size: int
    segments: tuple[Segment, ...]
    failures: tuple[FailedAllocation, ...] = ()
    peaks: Mapping[int, Peak] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0
