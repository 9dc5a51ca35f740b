"""Renders an `Across` as tables and a verdict, and as a dictionary for programs."""

from typing import IO, Any, Final

from torchperfd_daemon.analysis.across import Across, RankWait
from torchperfd_daemon.analysis.layout import Table, console_for, ms, print_folded, printable
from torchperfd_daemon.text import ranks_phrase

# A smaller difference is within the precision of setting clocks by ends of collectives.
_CLOCKS_DIFFER_NS: Final = 1_000_000
_KINDS: Final = 5
_MAX_RANKS: Final = 16


def across_to_dict(across: Across) -> dict[str, Any]:
    """Return the part ``across`` of the ``torchperfd.analysis/1`` document; times in µs."""
    blamed = across.blamed
    return {
        "verdict": _verdict(across) if across.matched else None,
        "found": _found(across),
        "caveats": _caveats(across) if across.matched else [],
        "matched": across.matched,
        "matched_by": {
            "sequence": across.by_sequence,
            "order": across.by_order,
            "end": across.by_end,
        },
        "missing": list(across.missing),
        "steps": across.steps,
        "reference": across.reference,
        "slowest": None if blamed is None else blamed.rank,
        "ranks": [_rank(across, each) for each in across.ranks],
        "collectives": [
            {
                "name": each.kind.name,
                "group": each.kind.group or None,
                "ranks": list(each.ranks),
                "timed_by": each.kind.source,
                "calls": each.calls,
                "bytes": each.bytes,
                "transfer_us": each.transfer_ns / 1000,
                "wait_us": each.wait_ns / 1000,
                "bytes_per_second": each.bytes_per_second,
            }
            for each in across.kinds
        ],
    }


def _rank(across: Across, rank: RankWait) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "matched": rank.matched,
        "unmatched": rank.unmatched,
        "wait_us": rank.wait_ns / 1000,
        "last": rank.last,
        "cost_us": rank.cost_ns / 1000,
        "cost_per_step_us": rank.cost_ns / 1000 / across.steps if across.steps else None,
        "clock_us": None if rank.clock_ns is None else rank.clock_ns / 1000,
        "clock_residual_us": None if rank.clock_residual_ns is None else rank.clock_residual_ns / 1000,
    }


def render_across(across: Across, out: IO[str]) -> None:
    """Write the waits, the cost of each rank and the verdict, in the terminal's width or else uncut."""
    console = console_for(out)
    console.print("across ranks", style="bold")
    print_folded(console, _found(across))
    if not across.matched:
        return
    console.print()
    _ranks(across).print_on(console)
    if (hidden := len(across.ranks) - _MAX_RANKS) > 0:
        console.print(f"{hidden:,} more ranks, which cost the others less; --json has all")
    console.print()
    _kinds(across).print_on(console)
    hidden = len(across.kinds) - _KINDS
    if hidden > 0:
        console.print(f"{hidden:,} more kinds of collective; --json has all")
    console.print()
    for line in (*_caveats(across), _verdict(across)):
        print_folded(console, line)


def _found(across: Across) -> str:
    """Return the numbers of matched and unmatched collectives and the missing ranks, in words."""
    parts = [f"{across.matched:,} collectives found on several of {len(across.ranks):,} ranks"]
    unmatched = sum(rank.unmatched for rank in across.ranks)
    if unmatched:
        parts.append(f"{unmatched:,} on one only")
    if across.missing:
        parts.append(f"no trace of {ranks_phrase(sorted(across.missing))}")
    return ", ".join(parts)


def _ranks(across: Across) -> Table:
    """Return the ranks that cost others most, or wait longest, in order of rank."""
    most = sorted(across.ranks, key=lambda each: (-each.cost_ns, -each.wait_ns))[:_MAX_RANKS]
    rows = [
        (
            f"rank {each.rank}",
            f"{each.matched:,}",
            ms(each.wait_ns),
            f"{each.last:,}",
            ms(each.cost_ns),
        )
        for each in sorted(most, key=lambda each: each.rank)
    ]
    return Table(("", "collectives", "wait ms", "last to arrive", "costs others ms"), tuple(rows))


def _kinds(across: Across) -> Table:
    rows = [
        (
            " ".join(part for part in (printable(each.kind.name), printable(each.kind.group)) if part),
            f"{len(each.ranks):,}",
            f"{each.calls:,}",
            "-" if each.bytes is None else f"{each.bytes / 1e6:,.3f}",
            ms(each.transfer_ns),
            ms(each.wait_ns),
            "-" if each.bytes_per_second is None else f"{each.bytes_per_second / 1e9:,.3f}",
        )
        for each in across.kinds[:_KINDS]
    ]
    headings = ("collective", "ranks", "calls", "MB", "transfer ms", "wait ms", "GB/s")
    return Table(headings, tuple(rows))


def _caveats(across: Across) -> list[str]:
    """Return notes: whether times are only those of host calls, and by how much clocks differ."""
    lines = []
    if any(each.kind.source == "call" for each in across.kinds):
        lines.append("neither kernels nor spans were recorded: times are those of the host's calls")
    known = [each for each in across.ranks if each.clock_ns is not None]
    farthest = max(known, key=lambda each: abs(each.clock_ns or 0))
    ahead = farthest.clock_ns or 0
    if abs(ahead) >= _CLOCKS_DIFFER_NS:
        residual = max(each.clock_residual_ns or 0 for each in known)
        lines.append(
            f"rank {farthest.rank}'s clock is {ms(abs(ahead))} ms {'ahead of' if ahead > 0 else 'behind'} "
            f"rank {across.reference}'s; set alike, ends of collectives are {ms(residual)} ms apart"
        )
    return lines


def _verdict(across: Across) -> str:
    """Return one sentence with the rank that the others wait for, if there is one."""
    blamed = across.blamed
    if blamed is None:
        return "no one rank keeps the others waiting"
    each = across.cost_each_ns(blamed)
    per = f"{ms(each / across.steps)} ms a step" if across.steps else f"{ms(each)} ms"
    return (
        f"rank {blamed.rank} keeps the others waiting: last at {blamed.last:,} of {blamed.matched:,} "
        f"collectives; each of them loses {per} ({each / across.duration_ns:.1%})"
    )
