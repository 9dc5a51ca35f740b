"""Replays the recorded allocations and releases of a device, and finds the moment with most memory held.

torch keeps the newest events in a ring. What was allocated before the first of them shows in releases without
an allocation, and in blocks of the end state without one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from torchperfd_daemon.memory.model import Block, Holder, Peak, Stack, State

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
