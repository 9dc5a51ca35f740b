"""Renders the verdict on Flight Recorder dumps as text and as a document for programs."""

from dataclasses import asdict
from pathlib import PurePath
from typing import Any, Final, TextIO

from torchperfd_daemon.flight_recorder.dumps import Found
from torchperfd_daemon.flight_recorder.verdict import Stuck, Verdict
from torchperfd_daemon.stacks import Frame
from torchperfd_daemon.text import printable, ranks_phrase

SCHEMA: Final = "torchperfd.flight-recorder/1"
_MAX_NAMED: Final = 4


def sentence(verdict: Verdict) -> str:
    """Return one sentence: which ranks the others waited for, and in which collective."""
    parts = [_stuck_text(each) for each in verdict.stuck[:_MAX_NAMED]]
    if (more := len(verdict.stuck) - _MAX_NAMED) > 0:
        parts.append(f"and {more} more process groups")
    if not parts:
        parts.append("no rank waits in a collective: all that were entered have ended")
    if verdict.undumped and not any(each.undumped for each in verdict.stuck):
        parts.append(f"no readable dump of {ranks_phrase(verdict.undumped)}")
    return "; ".join(parts)


def to_dict(found: Found, verdict: Verdict) -> dict[str, Any]:
    """Return the document of schema :data:`SCHEMA`."""
    return {
        "schema": SCHEMA,
        "finding": sentence(verdict),
        "odd": list(verdict.culprits),
        "absent": list(verdict.undumped),
        "missed": [
            {
                **asdict(each.missed),
                "undumped": list(each.undumped),
                "differing": [{"rank": rank, "sizes": sizes} for rank, sizes in each.differing],
                "places": [{"place": _frame(place), "ranks": list(ranks)} for place, ranks in each.places],
            }
            for each in verdict.stuck
        ],
        "ranks": [
            {
                "rank": rank,
                "path": str(dump.path),
                "skipped": dump.skipped,
                "collectives": [asdict(group) for group in verdict.progress[rank]],
                "last": _last(verdict, rank),
            }
            for rank, dump in found.dumps.items()
        ],
        "failed": [{"path": str(path), "error": error} for path, error in found.failed],
    }


def render_text(found: Found, verdict: Verdict, out: TextIO) -> None:
    """Write the verdict, the lines at which ranks wait, and the last collective of those that are missing."""
    out.write(f"{printable(sentence(verdict))}\n\n")
    out.write(f"Flight Recorder dumps of {ranks_phrase(verdict.ranks)}\n")
    for stuck in verdict.stuck[:_MAX_NAMED]:
        for place, ranks in stuck.places[:_MAX_NAMED]:
            waits = "waits" if len(ranks) == 1 else "wait"
            out.write(f"{ranks_phrase(ranks)} {waits} in {_call_text(stuck)} since {_place(place)}\n")
    for rank, last in list(verdict.last.items())[:_MAX_NAMED]:
        call = last.call
        where = "" if call.place is None else f", at {_place(call.place)}"
        out.write(f"rank {rank} entered {call.name} number {call.number} of {last.group} last{where}\n")
    for path, error in found.failed:
        out.write(f"not read: {printable(path.name)}: {printable(error)}\n")


def _stuck_text(stuck: Stuck) -> str:
    """Return who is missing in a collective, or why else it has not ended."""
    missed, call = stuck.missed, _call_text(stuck)
    wait = f"{ranks_phrase(missed.waiting)} {'waits' if len(missed.waiting) == 1 else 'wait'} in"
    if missed.absent:
        have = "has" if len(missed.absent) == 1 else "have"
        parts = [f"{ranks_phrase(missed.absent)} {have} not entered {call}"]
        if stuck.undumped:
            parts.append(f"no readable dump of {ranks_phrase(stuck.undumped)}")
        return "; ".join([*parts, f"{wait} it"])
    if missed.others:
        called = ", ".join(f"rank {rank} calls {other}" for rank, other in missed.others[:_MAX_NAMED])
        return f"{called} in place of {call}; {wait} it"
    if stuck.differing:
        sizes = ", ".join(f"rank {rank} with {size or 'none'}" for rank, size in stuck.differing[:_MAX_NAMED])
        return f"{wait} {call} with different sizes: {sizes}, the others with {missed.sizes or 'none'}"
    if stuck.undumped:
        those = ranks_phrase(stuck.undumped)
        return f"{wait} {call}; no readable dump of {those}, which may not have entered it"
    return f"{wait} {call}: every rank has entered it, so look at the network and the devices"


def _call_text(stuck: Stuck) -> str:
    missed = stuck.missed
    return f"{missed.call} number {missed.number} of {missed.group}"


def _last(verdict: Verdict, rank: int) -> dict[str, Any] | None:
    if (last := verdict.last.get(rank)) is None:
        return None
    place = None if last.call.place is None else _frame(last.call.place)
    return {"group": last.group, "number": last.call.number, "call": last.call.name, "place": place}


def _frame(frame: Frame) -> dict[str, Any]:
    return {"file": frame.file, "line": frame.line, "function": frame.function}


def _place(frame: Frame) -> str:
    return printable(f"{PurePath(frame.file).name}:{frame.line or '?'} in {frame.function or '?'}")
