"""A `MemorySummary` as a document for people, and as a versioned dictionary for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from torchperfd.document.blocks import Block, Document, Heading, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import size
from torchperfd_daemon.analysis.layout import printable, table
from torchperfd_daemon.memory.model import FailedAllocation
from torchperfd_daemon.memory.summary import DeviceMemory, MemorySummary, PeakMemory
from torchperfd_daemon.memory.sums import SegmentSums, StackMemory, place_text, user_frame

SCHEMA: Final = "torchperfd.memory/1"
_MIB: Final = 1 << 20
_MAX_NAMED: Final = 3


def to_dict(summary: MemorySummary, rank: int | None) -> dict[str, Any]:
    """Return one entry of ``ranks`` in the ``torchperfd.memory/1`` document; sizes in bytes."""
    return {
        "rank": rank,
        "path": str(summary.path),
        "bytes": summary.file_size,
        "skipped": summary.skipped,
        "reserved_bytes": summary.reserved,
        "allocated_bytes": summary.allocated,
        "peak_bytes": summary.peak,
        "allocator_settings": dict(summary.settings),
        "devices": [
            {
                "device": device.device,
                **_sums(device.sums),
                "classes": {name: _sums(sums) for name, sums in device.classes.items()},
                "peak": None if device.peak is None else _peak(device.peak),
                "stack_count": device.stack_count,
                "stacks": [_place(each) for each in device.stacks],
                "failed_allocation": None if device.failure is None else _failure(device.failure),
                "advice": [asdict(advice) for advice in device.advice],
            }
            for device in summary.devices
        ],
    }


def _sums(sums: SegmentSums) -> dict[str, Any]:
    return {
        "segments": sums.segments,
        "blocks": sums.blocks,
        "reserved_bytes": sums.reserved,
        "allocated_bytes": sums.allocated,
        "active_bytes": sums.active,
        "requested_bytes": sums.requested,
        "rounding_bytes": sums.rounding,
        "free_bytes": sums.free,
        "split_free_bytes": sums.split_free,
        "split_free_share": sums.split_share,
        "largest_free_bytes": sums.largest_free,
        "private_bytes": sums.private,
        "private_free_bytes": sums.private_free,
    }


def _peak(peak: PeakMemory) -> dict[str, Any]:
    return {
        "bytes": peak.size,
        "before_bytes": peak.before,
        "event": peak.event,
        "events": peak.events,
        "time_us": peak.time_us,
        "is_end": peak.is_end,
        "stack_count": peak.stack_count,
        "stacks": [_place(each) for each in peak.stacks],
    }


def _place(memory: StackMemory) -> dict[str, Any]:
    user = user_frame(memory.stack)
    return {
        "bytes": memory.size,
        "share": memory.share,
        "blocks": memory.blocks,
        "place": memory.place.text,
        "user_frame": None if user is None else user._asdict(),
        "frames": [frame._asdict() for frame in memory.stack],
    }


def _failure(failure: FailedAllocation) -> dict[str, Any]:
    user = user_frame(failure.stack)
    return {
        "bytes": failure.size,
        "device_free_bytes": failure.device_free,
        "time_us": failure.time_us,
        "user_frame": None if user is None else user._asdict(),
    }


def page_document(ranks: Sequence[tuple[int | None, MemorySummary]]) -> Document:
    """Return a line for each of several snapshots, then the page of the one that has reserved most.

    Args:
        ranks: The rank of each snapshot, None if unknown; at least one.
    """
    rank, fullest = max(ranks, key=lambda each: (each[1].reserved, each[1].allocated))
    compared = [[_ranks_table(ranks)]] if len(ranks) > 1 else []
    return Document([*compared, *_sections(fullest, rank)])


def _ranks_table(ranks: Sequence[tuple[int | None, MemorySummary]]) -> Table:
    known = [rank for rank, _ in ranks]
    rows = []
    for rank, summary in ranks:
        # Only their files distinguish two snapshots of one rank, and those of unknown rank.
        name = f"rank {rank}" if rank is not None and known.count(rank) == 1 else printable(summary.path.name)
        largest = summary.largest
        if largest is not None:
            name += f": {largest.place.text}"
        peak = "" if summary.peak is None else _mib(summary.peak)
        held = _mib(0 if largest is None else largest.size)
        rows.append((name, peak, _mib(summary.reserved), _mib(summary.allocated), held))
    headings = (
        "rank: where its largest part was allocated",
        "peak MiB",
        "reserved MiB",
        "allocated MiB",
        "largest MiB",
    )
    return table(headings, rows)


def _sections(summary: MemorySummary, rank: int | None) -> Iterator[list[Block]]:
    devices = summary.devices
    yield [Sentences([_headline(device) for device in devices])]
    lines = [
        f"device {device.device}: {advice.text}" if len(devices) > 1 else advice.text
        for device in devices
        for advice in device.advice
    ]
    if lines:
        numbered = [f"{number}. {line}" for number, line in enumerate(lines, 1)]
        yield [Heading("Advice", style="bold"), Sentences(numbered)]
    title = "" if rank is None else f"rank {rank}: "
    skipped = f", {summary.skipped:,} entries skipped" if summary.skipped else ""
    facts = [f"{summary.file_size:,} bytes{skipped}"]
    if summary.settings:
        settings = ", ".join(f"{name}={value}" for name, value in summary.settings.items())
        facts.append(f"allocator settings: {settings}")
    if not devices:
        facts.append("the allocator holds no memory")
    yield [Heading(f"{title}{summary.path}", style="bold", fold="never"), Sentences(facts, is_list=True)]
    for device in devices:
        yield from _device_sections(device)


def _device_sections(device: DeviceMemory) -> Iterator[list[Block]]:
    peak = device.peak
    if peak is not None and peak.stacks and not peak.is_end:
        places = _places_table(f"device {device.device} at the peak: held by", peak.stacks)
        yield [places, _hidden(peak.stack_count, peak.stacks, peak.size)]
    yield [Sentences(list(_facts(device)), is_list=True)]
    hidden = _hidden(device.stack_count, device.stacks, device.sums.active)
    if device.stacks:
        yield [_classes_table(device)]
        yield [_places_table(f"device {device.device} at the end: held by", device.stacks), hidden]
    else:
        yield [_classes_table(device), hidden]


def _headline(device: DeviceMemory) -> str:
    """Return the sentence with the peak of a device, and who held it."""
    name, peak = f"device {device.device}", device.peak
    left = f"{size(device.sums.active)} at the end"
    if peak is None:
        return f"{name}: {left}; the peak is unknown, since no history of allocations was recorded"
    held = ", ".join(
        f"{each.place.text} {size(each.size)} ({each.share:.1%})" for each in peak.stacks[:_MAX_NAMED]
    )
    ending = "reached at the end" if peak.is_end else left
    return f"{name}: peak {size(peak.size)}, {ending}" + (f"; held by {held}" if held else "")


def _hidden(count: int, shown: Sequence[StackMemory], whole: int) -> Sentences:
    """Return how many places are not shown, and what they hold."""
    hidden = count - len(shown)
    rest = size(whole - sum(each.size for each in shown))
    line = f"{hidden:,} more {'place' if hidden == 1 else 'places'}, with {rest}"
    return Sentences([line] if hidden else [])


def _facts(device: DeviceMemory) -> Iterator[str]:
    """Yield the lines about a device above its tables."""
    sums = device.sums

    def part(label: str, count: int, whole: int) -> str:
        return f"{label} {size(count)} ({count / max(whole, 1):.1%})"

    yield (
        f"device {device.device}: reserved {size(sums.reserved)} in {sums.segments:,} segments, "
        f"{part('allocated', sums.allocated, sums.reserved)}, {part('free', sums.free, sums.reserved)}"
    )
    if sums.active > sums.allocated:
        yield f"freed, but still used by another stream: {size(sums.active - sums.allocated)}"
    yield (
        f"fragmentation: {part('free in split segments', sums.split_free, sums.reserved)}, "
        f"largest free block {size(sums.largest_free)}"
    )
    yield (
        f"{sums.blocks:,} blocks in use, {size(sums.requested)} requested, "
        f"{part('lost by rounding', sums.rounding, sums.active)}"
    )
    if sums.private:
        yield f"in private pools, such as those of CUDA graphs: {size(sums.private)}"
    if device.peak is not None and device.peak.event:
        peak = device.peak
        yield (
            f"the peak was reached at event {peak.event:,} of {peak.events:,} recorded allocations and "
            f"releases; {size(peak.before)} were held before the first"
        )
    if device.failure is not None:
        failure = device.failure
        free = "" if failure.device_free is None else f", with {size(failure.device_free)} free on the device"
        yield f"last failed allocation: {size(failure.size)}{free}, at {place_text(failure.stack)}"


def _classes_table(device: DeviceMemory) -> Table:
    sizes = ("reserved MiB", "active MiB", "free MiB", "split MiB", "largest free MiB")
    rows = []
    for name, sums in device.classes.items():
        numbers = (sums.reserved, sums.active, sums.free, sums.split_free, sums.largest_free)
        rows.append((name, f"{sums.segments:,}", f"{sums.blocks:,}", *map(_mib, numbers)))
    return table(("segments", "count", "blocks", *sizes), rows)


def _places_table(heading: str, places: Sequence[StackMemory]) -> Table:
    rows = [(each.place.text, f"{each.blocks:,}", _mib(each.size), f"{each.share:.1%}") for each in places]
    return table((heading, "blocks", "MiB", "share"), rows)


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f}"
