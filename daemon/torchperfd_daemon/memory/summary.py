"""Summarises a memory snapshot by device, with advice on what would make the memory suffice."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.model.formatting import size
from torchperfd_daemon.memory.model import FailedAllocation, Peak, Segment, Snapshot
from torchperfd_daemon.memory.sums import SegmentSums, StackMemory, add_up, by_place, holders
from torchperfd_daemon.object_store import AnyPath

_FRAGMENTED_SHARE: Final = 0.25
_MOST_SHARE: Final = 0.5


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
    if most is not None and most.place.has_line and most.share > _MOST_SHARE:
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
    return sums.split_share >= _FRAGMENTED_SHARE and sums.largest_free < failure.size <= usable


MAX_STACKS: Final = 10
"""Places that a summary keeps of a device, at the peak and at the end."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The moment at which a device's allocator held most memory; sizes and events as in `Peak`.

    Attributes:
        places: Those that held most then, at most `MAX_STACKS`.
        stack_count: The number of all.
    """

    size: int
    before: int
    event: int
    events: int
    time_us: int | None
    is_end: bool
    stacks: tuple[StackMemory, ...]
    stack_count: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device of a snapshot.

    Attributes:
        classes: Sums of the size classes of torch's allocator that occur: ``small`` segments for requests of
            up to 1 MiB, ``large`` ones for all others.
        places: Those that hold most at the end, at most `MAX_STACKS`.
        stack_count: The number of all.
        peak: None if allocations were not recorded.
        failure: The last allocation that failed.
    """

    device: int
    sums: SegmentSums
    classes: Mapping[str, SegmentSums]
    stacks: tuple[StackMemory, ...]
    stack_count: int
    peak: PeakMemory | None
    failure: FailedAllocation | None
    advice: tuple[MemoryAdvice, ...]


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """One snapshot; attributes as in `Snapshot`."""

    path: AnyPath
    file_size: int
    devices: tuple[DeviceMemory, ...]
    settings: Mapping[str, str]
    skipped: int

    @property
    def reserved(self) -> int:
        return sum(device.sums.reserved for device in self.devices)

    @property
    def allocated(self) -> int:
        return sum(device.sums.allocated for device in self.devices)

    @property
    def peak(self) -> int | None:
        """Bytes that were held at the peak of each device, together; None if one of them is unknown."""
        peaks = [device.peak.size for device in self.devices if device.peak is not None]
        return sum(peaks) if len(peaks) == len(self.devices) else None

    @property
    def largest(self) -> StackMemory | None:
        """The place that holds most at a device's peak, or at the end; None if no memory is in use."""
        firsts = [
            places[0]
            for device in self.devices
            if (places := device.stacks if device.peak is None else device.peak.stacks)
        ]
        return max(firsts, key=lambda each: each.size, default=None)


def summarise(snapshot: Snapshot) -> MemorySummary:
    by_device: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        by_device[segment.device].append(segment)
    # A device whose allocations all failed has no segments.
    last = {failure.device: failure for failure in snapshot.failures}
    return MemorySummary(
        path=snapshot.path,
        file_size=snapshot.file_size,
        devices=tuple(
            _device(
                device, by_device[device], snapshot.peaks.get(device), last.get(device), snapshot.settings
            )
            for device in sorted({*by_device, *last, *snapshot.peaks})
        ),
        settings=snapshot.settings,
        skipped=snapshot.skipped,
    )


def _device(
    device: int,
    segments: Sequence[Segment],
    peak: Peak | None,
    failure: FailedAllocation | None,
    settings: Mapping[str, str],
) -> DeviceMemory:
    sums = add_up(segments)
    held = holders(segments)
    has_stacks = any(each.stack for each in (*held, *(() if peak is None else peak.holders)))
    places = by_place(held, has_stacks=has_stacks)
    highest = None if peak is None else _peak(peak, has_stacks=has_stacks)
    peak_places = () if highest is None else highest.stacks
    small, large = (add_up([each for each in segments if each.is_small is small]) for small in (True, False))
    return DeviceMemory(
        device=device,
        sums=sums,
        classes={name: each for name, each in (("small", small), ("large", large)) if each.segments},
        stacks=tuple(places[:MAX_STACKS]),
        stack_count=len(places),
        peak=highest,
        failure=failure,
        advice=tuple(advise(sums, places, peak_places, failure, settings)),
    )


def _peak(peak: Peak, *, has_stacks: bool) -> PeakMemory:
    places = by_place(peak.holders, has_stacks=has_stacks)
    return PeakMemory(
        size=peak.size,
        before=peak.before,
        event=peak.event,
        events=peak.events,
        time_us=peak.time_us,
        is_end=peak.is_end,
        stacks=tuple(places[:MAX_STACKS]),
        stack_count=len(places),
    )
