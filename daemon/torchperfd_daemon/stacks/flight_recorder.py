"""Finds the collectives of a dead job that could not end, and the ranks that the others waited for.

The verdict on Flight Recorder dumps is a document for people, and one for programs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from torchperfd.document.blocks import Document, Sentences
from torchperfd.document.text import printable
from torchperfd.model.process import GroupProgress
from torchperfd_daemon.stacks.flight_recorder_dumps import Call, Dump, Found, Group
from torchperfd_daemon.stacks.merge import Missed, culprits, group_text, missed
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks
from torchperfd_daemon.text import ranks_phrase

# Collectives whose inputs are of the same size on all ranks.
_SAME_SIZES: Final = frozenset(
    {"all_reduce", "allreduce_coalesced", "broadcast", "reduce", "all_gather", "_all_gather_base"}
    | {"reduce_scatter", "_reduce_scatter_base", "all_gather_into_tensor_coalesced"}
    | {"reduce_scatter_tensor_coalesced"}
)
_MAX_WORLD: Final = 100_000


@dataclass(frozen=True, slots=True)
class Stuck:
    """A collective that ranks have entered and that has not ended.

    Attributes:
        undumped: Ranks of its group that left no dump.
        differing: Ranks that entered it with inputs of other sizes than most, each with these.
        places: The lines at which ranks entered it, each with its ranks.
    """

    missed: Missed
    undumped: tuple[int, ...]
    differing: tuple[tuple[int, str], ...]
    places: tuple[tuple[Frame, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class LastCall:
    """The newest collective that a rank has entered, of those that others wait in."""

    group: str
    call: Call


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the dumps of a job show.

    Attributes:
        ranks: Those with a dump.
        undumped: Ranks of the job that left none.
        culprits: The ranks that the others waited for; without any, those that called something else.
        last: The newest collective of each culprit with a dump, if its record is not gone.
        progress: Of each rank in its process groups, numbered as in the files.
    """

    ranks: tuple[int, ...]
    undumped: tuple[int, ...]
    stuck: tuple[Stuck, ...]
    culprits: tuple[int, ...]
    last: Mapping[int, LastCall]
    progress: Mapping[int, tuple[GroupProgress, ...]]


def judge(dumps: Mapping[int, Dump]) -> Verdict:
    """Return what the dumps of a job show.

    Args:
        dumps: By rank; at least one.
    """
    groups = _by_group(dumps)
    # A progress of 0 means that there is none. torch counts from 1, others from 0.
    shift = int(
        any(call.number == 0 for those in groups.values() for each in those.values() for call in each.calls)
    )
    progress = {
        rank: tuple(_progress(key, those[rank], shift) for key, those in groups.items() if rank in those)
        for rank in dumps
    }
    found = missed(
        [RankStacks(rank, 0, "", 0, Outcome.GONE, collectives=each) for rank, each in progress.items()]
    )
    stuck = [_stuck(each, groups, dumps, shift) for each in (*found, *_unfinished(progress, found))]
    world = _world(groups, dumps)
    return Verdict(
        ranks=tuple(dumps),
        undumped=tuple(rank for rank in world if rank not in dumps),
        stuck=tuple(stuck),
        culprits=(named := culprits(found)),
        last={
            rank: last
            for rank in named
            if rank in dumps and (last := _last_call(rank, found, groups)) is not None
        },
        progress={rank: tuple(_shifted(one, shift) for one in each) for rank, each in progress.items()},
    )


def _by_group(dumps: Mapping[int, Dump]) -> dict[str, dict[int, Group]]:
    """Return each rank's part in each process group; the key is unique, unlike the name of a group."""
    members: dict[str, list[frozenset[int]]] = {}
    for dump in dumps.values():
        for group in dump.groups:
            if group.members and group.members not in members.setdefault(group.name, []):
                members[group.name].append(group.members)
    found: dict[str, dict[int, Group]] = {}
    for rank, dump in dumps.items():
        for group in dump.groups:
            known = members.get(group.name, [])
            those = group.members or next((each for each in known if rank in each), frozenset[int]())
            key = group.name if len(known) < 2 else f"{group.name}, of rank {min(those, default=rank)}"
            found.setdefault(key, {})[rank] = replace(group, members=those)
    return found


def _world(groups: Mapping[str, Mapping[int, Group]], dumps: Mapping[int, Dump]) -> list[int]:
    members = {rank for those in groups.values() for group in those.values() for rank in group.members}
    # Groups of a gloo job have no members; then a gap in the ranks is a dump that is missing.
    return sorted(members | set(dumps) if members else range(min(max(dumps) + 1, _MAX_WORLD)))


def _progress(key: str, group: Group, shift: int) -> GroupProgress:
    waiting = next((call for call in group.calls if not call.has_ended), None)
    newest = [call.number + shift for call in group.calls]
    if group.newest is not None and (group.calls or group.newest):
        newest.append(group.newest + shift)
    return GroupProgress(
        name=key,
        description=group.description,
        begun=max(newest, default=0),
        number=0 if waiting is None else waiting.number + shift,
        call="" if waiting is None else waiting.name,
        sizes="" if waiting is None else waiting.sizes,
    )


def _shifted(progress: GroupProgress, shift: int) -> GroupProgress:
    number = progress.number - shift if progress.number else progress.number
    return replace(progress, begun=progress.begun - shift, number=number)


def _unfinished(progress: Mapping[int, tuple[GroupProgress, ...]], found: tuple[Missed, ...]) -> list[Missed]:
    """Return the collectives that have not ended although every rank with a dump has entered them."""
    known = {(each.group, each.number) for each in found}
    waiting: dict[tuple[str, int], dict[int, GroupProgress]] = {}
    for rank, groups in progress.items():
        for each in groups:
            if each.number:
                waiting.setdefault((each.name, each.number), {})[rank] = each
    first = {name: min(number for other, number in waiting if other == name) for name, _ in waiting}
    unfinished = []
    for (name, number), those in waiting.items():
        one = next(iter(those.values()))
        group = group_text(one)
        if number == first[name] and (group, number) not in known:
            unfinished.append(Missed(group, number, one.call, one.sizes, tuple(those), (), ()))
    return unfinished


def _stuck(
    missed: Missed, groups: Mapping[str, Mapping[int, Group]], dumps: Mapping[int, Dump], shift: int
) -> Stuck:
    number = missed.number - shift
    calls: dict[int, Call] = {}
    members: frozenset[int] = frozenset()
    for key, those in groups.items():
        entered = {
            rank: call
            for rank in missed.waiting
            if rank in those
            for call in those[rank].calls
            if call.number == number and call.name == missed.call and not call.has_ended
        }
        if entered and group_text(_progress(key, next(iter(those.values())), 0)) == missed.group:
            calls = entered
            members = frozenset().union(*(group.members for group in those.values()))
            break
    places: dict[Frame, list[int]] = {}
    for rank, call in calls.items():
        if call.place is not None:
            places.setdefault(call.place, []).append(rank)
    sizes = [call.sizes for call in calls.values()]
    usual = max(sizes, key=sizes.count, default="")
    has_same = missed.call in _SAME_SIZES
    return Stuck(
        missed=replace(missed, number=number, sizes=usual),
        undumped=tuple(sorted(members - set(dumps))),
        differing=tuple(
            (rank, call.sizes) for rank, call in calls.items() if has_same and call.sizes != usual
        ),
        places=tuple((place, tuple(ranks)) for place, ranks in places.items()),
    )


def _last_call(
    rank: int, found: tuple[Missed, ...], groups: Mapping[str, Mapping[int, Group]]
) -> LastCall | None:
    """Return the newest collective of a rank in a group in which others wait for it."""
    for key, those in groups.items():
        if rank not in those or not those[rank].calls:
            continue
        group = group_text(_progress(key, those[rank], 0))
        if any(group == each.group and (rank in each.absent or rank in dict(each.others)) for each in found):
            return LastCall(group, those[rank].calls[-1])
    return None


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


def dumps_document(found: Found, verdict: Verdict) -> Document:
    """Return the verdict, the lines at which ranks wait, and the last collective of missing ranks."""
    lines = [f"Flight Recorder dumps of {ranks_phrase(verdict.ranks)}"]
    for stuck in verdict.stuck[:_MAX_NAMED]:
        for place, ranks in stuck.places[:_MAX_NAMED]:
            waits = "waits" if len(ranks) == 1 else "wait"
            lines.append(f"{ranks_phrase(ranks)} {waits} in {_call_text(stuck)} since {_place(place)}")
    for rank, last in list(verdict.last.items())[:_MAX_NAMED]:
        call = last.call
        where = "" if call.place is None else f", at {_place(call.place)}"
        lines.append(f"rank {rank} entered {call.name} number {call.number} of {last.group} last{where}")
    lines += [f"not read: {path.name}: {error}" for path, error in found.failed]
    return Document([[Sentences([sentence(verdict)])], [Sentences(lines)]])


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
                "last": _last_document(verdict, rank),
            }
            for rank, dump in found.dumps.items()
        ],
        "failed": [{"path": str(path), "error": error} for path, error in found.failed],
    }


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


def _last_document(verdict: Verdict, rank: int) -> dict[str, Any] | None:
    if (last := verdict.last.get(rank)) is None:
        return None
    place = None if last.call.place is None else _frame(last.call.place)
    return {"group": last.group, "number": last.call.number, "call": last.call.name, "place": place}


def _frame(frame: Frame) -> dict[str, Any]:
    return {"file": frame.file, "line": frame.line, "function": frame.function}


def _place(frame: Frame) -> str:
    return printable(f"{PurePath(frame.file).name}:{frame.line or '?'} in {frame.function or '?'}")
