"""Adds up segments and their blocks. Sizes in bytes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchperfd_daemon.memory.model import Block, Segment, Stack, State


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
    """The blocks in use that were allocated from one stack.

    Attributes:
        share: Of the device's active memory.
    """

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


def by_stack(segments: Iterable[Segment], active: int) -> list[StackMemory]:
    """Return the memory in use by stack, most first."""
    sizes, counts = Counter[Stack](), Counter[Stack]()
    for segment in segments:
        for block in segment.blocks:
            if block.state is not State.FREE:
                sizes[block.stack] += block.size
                counts[block.stack] += 1
    return [
        StackMemory(stack, counts[stack], size, size / active if active else 0.0)
        for stack, size in sizes.most_common()
    ]
