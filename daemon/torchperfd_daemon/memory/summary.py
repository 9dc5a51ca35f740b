"""Sums a memory snapshot up: where the memory is, who holds it, and what would help. Sizes in bytes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.memory.advice import MemoryAdvice, advise
from torchperfd_daemon.memory.model import FailedAllocation, Segment, Snapshot
from torchperfd_daemon.memory.sums import SegmentSums, StackMemory, add_up, by_stack

MOST_STACKS: Final = 10
"""Stacks of a device that a summary keeps."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device of a snapshot.

    Attributes:
        classes: Sums of the size classes of torch's allocator that occur: ``small`` segments for requests of
            up to 1 MiB, ``large`` ones for all others.
        stacks: Those that hold most, at most `MOST_STACKS`.
        stack_count: The number of all.
        failure: The last allocation that failed.
    """

    device: int
    sums: SegmentSums
    classes: Mapping[str, SegmentSums]
    stacks: tuple[StackMemory, ...]
    stack_count: int
    failure: FailedAllocation | None
    advice: tuple[MemoryAdvice, ...]


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """One snapshot; attributes as in `Snapshot`."""

    path: Path
    file_size: int
    devices: tuple[DeviceMemory, ...]
    settings: Mapping[str, str]
    skipped: int

    @property
    def reserved(self) -> int:
        """Reserved bytes of all devices."""
        return sum(device.sums.reserved for device in self.devices)

    @property
    def allocated(self) -> int:
        """Allocated bytes of all devices."""
        return sum(device.sums.allocated for device in self.devices)

    @property
    def largest(self) -> StackMemory | None:
        """The stack that holds most; None if no memory is in use."""
        stacks = [device.stacks[0] for device in self.devices if device.stacks]
        return max(stacks, key=lambda stack: stack.size, default=None)


def summarise(snapshot: Snapshot) -> MemorySummary:
    """Return the summary of a snapshot."""
    by_device: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        by_device[segment.device].append(segment)
    # A device whose allocations all failed has no segments.
    last = {failure.device: failure for failure in snapshot.failures}
    return MemorySummary(
        path=snapshot.path,
        file_size=snapshot.file_size,
        devices=tuple(
            _device(device, by_device[device], last.get(device), snapshot.settings)
            for device in sorted({*by_device, *last})
        ),
        settings=snapshot.settings,
        skipped=snapshot.skipped,
    )


def _device(
    device: int,
    segments: Sequence[Segment],
    failure: FailedAllocation | None,
    settings: Mapping[str, str],
) -> DeviceMemory:
    sums = add_up(segments)
    stacks = by_stack(segments, sums.active)
    small, large = (add_up([each for each in segments if each.is_small is small]) for small in (True, False))
    return DeviceMemory(
        device=device,
        sums=sums,
        classes={name: each for name, each in (("small", small), ("large", large)) if each.segments},
        stacks=tuple(stacks[:MOST_STACKS]),
        stack_count=len(stacks),
        failure=failure,
        advice=tuple(advise(sums, stacks, failure, settings)),
    )
