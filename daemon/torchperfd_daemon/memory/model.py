"""What a memory snapshot holds: segments, blocks, stacks, and the recorded history. Sizes in bytes.

The history is replayed to find the moment with most memory held. torch keeps the newest events in a ring.
What was allocated before the first of them shows in releases without an allocation, and in blocks of the end
state without one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from torchperfd_daemon.object_store import AnyPath


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

    path: AnyPath
    file_size: int
    segments: tuple[Segment, ...]
    failures: tuple[FailedAllocation, ...] = ()
    peaks: Mapping[int, Peak] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0


ALLOCATED: Final = "alloc"
RELEASE_REQUESTED: Final = "free_requested"
RELEASED: Final = frozenset({"free", "free_completed"})
"""Until torch 2.0 a release is one event."""
_BEFORE_ALL: Final = -1


class Event(NamedTuple):
    """One event of the recorded history that allocates or releases; sizes in bytes.

    Attributes:
        frames: The frames in the file, unread.
    """

    action: str
    address: int
    size: int
    time_us: int | None
    frames: object


@dataclass(slots=True)
class _Allocation:
    """Memory between its allocation and its release; both are numbers of events, None if it was kept."""

    begin: int
    size: int
    address: int
    time_us: int | None = None
    frames: object = None
    requested: int | None = None
    end: int | None = None


class History:
    """The allocations of one device.

    Args:
        events: In the order in which they happened.
        stack_of: Returns the stack of an event's frames.
    """

    def __init__(self, events: Iterable[Event], stack_of: Callable[[object], Stack]) -> None:
        self._stack_of = stack_of
        self._allocations: list[_Allocation] = []
        self._live: dict[int, _Allocation] = {}
        self._pairs = self._differing = 0
        self.events = 0
        for number, event in enumerate(events):
            self.events += 1
            self._replay(number, event)

    def _replay(self, number: int, event: Event) -> None:
        held = self._live.get(event.address)
        if event.action == ALLOCATED:
            if held is not None:
                # Its release is missing in the file, or only its completion.
                held.end = number if held.requested is None else held.requested
            self._hold(_Allocation(number, event.size, event.address, event.time_us, event.frames))
            return
        if held is None:
            held = self._hold(_Allocation(_BEFORE_ALL, event.size, event.address, None, event.frames))
        elif held.begin != _BEFORE_ALL and held.requested is None and not self._differing:
            self._pairs += 1
            self._differing += event.frames != held.frames
        if event.action == RELEASE_REQUESTED:
            held.requested = number
        else:
            held.end = number
            del self._live[event.address]

    def _hold(self, allocation: _Allocation) -> _Allocation:
        self._allocations.append(allocation)
        self._live[allocation.address] = allocation
        return allocation

    def allocated(self, block: Block) -> bool:
        """Return whether a block of the end state was allocated by a recorded event."""
        held = self._live.get(block.address) if block.address is not None else None
        return held is not None and held.begin != _BEFORE_ALL

    def peak(self, blocks: Sequence[Block]) -> Peak | None:
        """Return the moment with most memory held; None without events.

        Args:
            blocks: The blocks of the device at the end, free ones included.
        """
        if not self.events:
            return None
        in_use = [block for block in blocks if block.state is not State.FREE]
        at_end = {block.address: block for block in reversed(in_use) if block.address is not None}
        allocated_here = set[int]()
        spans = list[_Span]()
        for each in self._allocations:
            end, size = each.end, each.size
            if end is None and (block := at_end.get(each.address)) is not None:
                allocated_here.add(id(block))
                size = block.size
            elif end is None:
                # Its completion is missing in the file.
                end = each.requested
            spans.append(_Span(each.begin, end, size, each))
        spans += [
            _Span(_BEFORE_ALL, None, block.size, block) for block in in_use if id(block) not in allocated_here
        ]
        return self._highest(spans)

    def _highest(self, spans: Sequence["_Span"]) -> Peak:
        changes = defaultdict[int, int](int)
        changes[_BEFORE_ALL] = 0
        for span in spans:
            changes[span.begin] += span.size
            if span.end is not None:
                changes[span.end] -= span.size
        moments = sorted(changes)
        held = list(accumulate(changes[moment] for moment in moments))
        # The latest of equal ones: then the end state, which the file describes in full, is the peak.
        highest = max(range(len(held)), key=lambda number: (held[number], number))
        moment = moments[highest]
        reached = next((span.what for span in spans if span.begin == moment), None)
        return Peak(
            size=held[highest],
            before=held[0],
            event=moment + 1,
            events=self.events,
            time_us=reached.time_us if isinstance(reached, _Allocation) else None,
            is_end=highest == len(held) - 1,
            holders=tuple(
                self._holder(span)
                for span in spans
                if span.begin <= moment and (span.end is None or span.end > moment)
            ),
        )

    def _holder(self, span: "_Span") -> Holder:
        what = span.what
        if isinstance(what, Block):
            return Holder(span.size, what.stack, is_earlier=not what.stack)
        # The stack of a release is that of the allocation, unless torch recorded those of releases as well.
        is_known = what.begin != _BEFORE_ALL or (self._pairs > 0 and not self._differing)
        stack = self._stack_of(what.frames) if is_known else ()
        return Holder(span.size, stack, is_earlier=what.begin == _BEFORE_ALL and not stack)


class _Span(NamedTuple):
    """The events between which memory is held; ``end`` is None if it is held at the end."""

    begin: int
    end: int | None
    size: int
    what: _Allocation | Block
