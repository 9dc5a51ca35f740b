"""Adds up segments and their blocks. Sizes in bytes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchperfd_daemon.memory.model import Block, Holder, Segment, Stack, State
from torchperfd_daemon.memory.words import EARLIER, NO_PYTHON, NOT_RECORDED, Place, place


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """Sums over segments: of a device, or those of one size class on it.

    Attributes:
        blocks: Blocks in use.
        reserved: What the allocator took from the device.
        allocated: What tensors hold.
        active: The same, and what was freed but is still used by another stream.
        requested: What the script asked for; less than ``active`` by rounding.
        split_free: Free memory in segments that are partly in use, which the allocator cannot give back to
            the device. As in torch's ``inactive_split_bytes``, expandable segments do not count: they can.
        largest_free: The largest request that fits without more memory of the device.
        private: The part of ``reserved`` in pools of CUDA graphs and the like, which only they can use.
        private_free: The part of ``free`` in such pools.
    """

    segments: int
    blocks: int
    reserved: int
    allocated: int
    active: int
    requested: int
    split_free: int
    largest_free: int
    private: int
    private_free: int

    @property
    def free(self) -> int:
        """What the allocator has reserved and does not use."""
        return self.reserved - self.active

    @property
    def rounding(self) -> int:
        """What is used up by rounding requests."""
        return self.active - self.requested

    @property
    def split_share(self) -> float:
        """The share of ``split_free`` in ``reserved``: fragmentation."""
        return self.split_free / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class StackMemory:
    """The memory that one place in the code holds at one moment.

    Attributes:
        stack: The stack with most of it.
        share: Of all memory that is held at that moment.
    """

    place: Place
    stack: Stack
    blocks: int
    size: int
    share: float


def add_up(segments: Sequence[Segment]) -> SegmentSums:
    """Return the sums over segments."""
    blocks = [block for segment in segments for block in segment.blocks]
    return SegmentSums(
        segments=len(segments),
        blocks=sum(block.state is not State.FREE for block in blocks),
        reserved=sum(segment.size for segment in segments),
        allocated=sum(block.size for block in blocks if block.state is State.ALLOCATED),
        active=sum(map(_active, segments)),
        requested=sum(block.requested for block in blocks if block.state is not State.FREE),
        split_free=sum(
            segment.size - _active(segment)
            for segment in segments
            if _active(segment) and not segment.is_expandable
        ),
        largest_free=max((run for segment in segments for run in _free_runs(segment.blocks)), default=0),
        private=sum(segment.size for segment in segments if segment.is_private),
        private_free=sum(segment.size - _active(segment) for segment in segments if segment.is_private),
    )


def _active(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state is not State.FREE)


def _free_runs(blocks: Iterable[Block]) -> Iterator[int]:
    """Yield the length of each stretch of free blocks that touch each other."""
    run = 0
    for block in blocks:
        run = run + block.size if block.state is State.FREE else 0
        yield run


def holders(segments: Iterable[Segment]) -> list[Holder]:
    """Return what holds memory at the end."""
    return [
        Holder(block.size, block.stack, block.is_earlier)
        for segment in segments
        for block in segment.blocks
        if block.state is not State.FREE
    ]


def by_place(holders: Iterable[Holder], *, has_stacks: bool) -> list[StackMemory]:
    """Return the memory held by place, most first.

    Args:
        has_stacks: Whether stacks were recorded. What has none then was allocated by a thread without Python.
    """
    stacks = Counter[tuple[Stack, bool]]()
    counts = Counter[tuple[Stack, bool]]()
    for size, stack, is_earlier in holders:
        stacks[stack, is_earlier] += size
        counts[stack, is_earlier] += 1
    places = defaultdict[Place, list[tuple[Stack, bool]]](list)
    for stack, is_earlier in (each for each, _ in stacks.most_common()):
        without = EARLIER if is_earlier else NO_PYTHON if has_stacks else NOT_RECORDED
        places[place(stack, without)].append((stack, is_earlier))
    total = sum(stacks.values())
    found = [
        StackMemory(
            place=where,
            stack=those[0][0],
            blocks=sum(counts[each] for each in those),
            size=(size := sum(stacks[each] for each in those)),
            share=size / total if total else 0.0,
        )
        for where, those in places.items()
    ]
    return sorted(found, key=lambda each: -each.size)
