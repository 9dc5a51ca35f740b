"""Derives from the sums of a device what would make its memory suffice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.sizes import size
from torchperfd_daemon.memory.model import FailedAllocation
from torchperfd_daemon.memory.sums import SegmentSums, StackMemory

_FRAGMENTED: Final = 0.25
_MOST_OF_IT: Final = 0.5


@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """One change.

    Attributes:
        rule: A name for programs: ``fragmentation`` or ``one-stack``.
        text: One line: what to do, and the evidence.
    """

    rule: str
    text: str


def advise(
    sums: SegmentSums,
    at_end: Sequence[StackMemory],
    at_peak: Sequence[StackMemory],
    failure: FailedAllocation | None,
    settings: Mapping[str, str],
) -> Iterator[MemoryAdvice]:
    """Yield the advice on one device.

    Args:
        at_end: The places that hold memory at the end, most first.
        at_peak: Those at the peak, most first; empty if it is unknown.
        settings: The allocator's settings that are not torch's defaults.
    """
    if failure is not None and _is_for_fragments(sums, failure) and "expandable_segments" not in settings:
        yield MemoryAdvice(
            "fragmentation",
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: an allocation of "
            f"{size(failure.size)} failed, {size(sums.free)} are free in pieces of at most "
            f"{size(sums.largest_free)}, {sums.split_share:.0%} of the reserved memory is split",
        )
    # The peak decides whether the memory suffices. Without a line there is nothing to look at.
    most = next(iter(at_peak or at_end), None)
    if most is not None and most.place.has_line and most.share > _MOST_OF_IT:
        of = "at the peak" if at_peak else "in use"
        yield MemoryAdvice(
            "one-stack",
            f"look at {most.place.text}: it holds {most.share:.0%} of the memory {of}, "
            f"{size(most.size)} in {most.blocks:,} {'block' if most.blocks == 1 else 'blocks'}",
        )


def _is_for_fragments(sums: SegmentSums, failure: FailedAllocation) -> bool:
    """Return whether an allocation failed only because no single free piece was large enough."""
    # A private pool's memory serves no other pool.
    usable = sums.free - sums.private_free
    return sums.split_share >= _FRAGMENTED and sums.largest_free < failure.size <= usable
