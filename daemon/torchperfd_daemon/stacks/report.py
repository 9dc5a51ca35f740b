"""Merged stacks as a document for people, and as one for programs."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any, Final

from torchperfd.document.blocks import Block, Document, Facts, Sentences
from torchperfd_daemon.stacks.activity import Activity, Kind, Stage
from torchperfd_daemon.stacks.merge import Group, Merged, Missed, WorkerGroup
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks
from torchperfd_daemon.text import ranks_phrase, ranks_text

SCHEMA: Final = "torchperfd.stacks/1"
_MAX_NAMED: Final = 4
_LOADS: Final = {
    Stage.WAIT: ("waits for indices", "wait for indices"),
    Stage.SAMPLER: ("chooses indices", "choose indices"),
    Stage.FETCH: ("fetches", "fetch"),
    Stage.COLLATE: ("collates", "collate"),
    Stage.PIN: ("pins memory", "pin memory"),
    Stage.SEND: ("sends a batch", "send a batch"),
    Stage.OTHER: ("is", "are"),
}
_WIDEST_NAME: Final = 32
_SOURCES: Final = {Outcome.READ: "read by py-spy", Outcome.SIGNALLED: "asked by a signal"}
_LIBRARY: Final = re.compile(r".*(?:/(?:site|dist)-packages|/lib/python3[.\d]*t?)/")


def sentence(merged: Merged) -> str:
    """Return one sentence with the odd ranks, the places of the others, and the workers they wait for."""
    apart, others = [_without_stacks_text(rank) for rank in merged.without_stacks], list[str]()
    for group in merged.groups:
        (apart if set(group.ranks) <= set(merged.odd) else others).append(_group(group))
    loaders = [_workers(group) for group in _awaited(merged)]
    missed = [_missed(each) for each in merged.missed]
    return "; ".join(_few(apart) + _few(others) + _few(loaders) + _few(missed))


def to_dict(run: str, ranks: Sequence[RankStacks], merged: Merged, absent: Sequence[int]) -> dict[str, Any]:
    """Return the document of schema :data:`SCHEMA`: every thread of every rank, and the finding."""
    return {
        "schema": SCHEMA,
        "run": run,
        "finding": sentence(merged),
        "goes_on": merged.goes_on,
        "odd": list(merged.odd),
        "absent": list(absent),
        "missed": [asdict(each) for each in merged.missed],
        "groups": [
            {
                "ranks": list(group.ranks),
                "doing": group.activity.kind.value,
                "call": group.activity.call,
                "place": asdict(group.activity.place),
            }
            for group in merged.groups
        ],
        "workers": [
            {
                "workers": [{"rank": rank, "worker": number} for rank, number in group.workers],
                "stage": group.loading.stage.value,
                "place": asdict(group.loading.place) if group.loading.place else None,
                "call": group.loading.call,
            }
            for group in merged.workers
        ],
        "ranks": [
            {
                **asdict(rank),
                "outcome": rank.outcome.value,
                "threads": [asdict(thread) for thread in rank.threads],
                "collectives": [asdict(group) for group in rank.collectives],
            }
            for rank in ranks
        ],
    }


def stacks_document(run: str, ranks: Sequence[RankStacks], merged: Merged) -> Document:
    """Return the odd ranks, then each stack once, with its ranks."""
    known = {rank.rank: rank for rank in ranks}
    lines = [f"run {run}: {len(ranks)} {_plural(len(ranks), 'rank')}{_last_step(ranks)}"]
    lines += ["training goes on; this is one moment of it"] * merged.goes_on
    sections: list[list[Block]] = [[Sentences([*lines, sentence(merged)])]]
    for group in merged.groups:
        members = [known[rank] for rank in group.ranks]
        does = f"{ranks_phrase(group.ranks)} {_does(group.activity, len(group.ranks))}{_steps(members)}"
        sources = [
            f"rank {rank.rank}, {_SOURCES[rank.outcome]}: {rank.reason}"
            for rank in members
            if rank.outcome is not Outcome.ANSWERED
        ]
        sections.append([Sentences([does]), Sentences(sources, indent=2), _frames(group.frames)])
    for rank in merged.without_stacks:
        what = f"rank {rank.rank} (pid {rank.pid}): {rank.outcome.value}: {rank.reason}"
        sections.append([Sentences([what])])
    for loaders in merged.workers:
        sections.append([Sentences([_workers(loaders)]), _frames(loaders.frames)])
    if merged.others:
        sections.append([Sentences(["other threads"])])
    for threads in merged.others:
        named = f": {', '.join(threads.names[:_MAX_NAMED])}" if threads.names else ""
        several = f", {threads.count} threads" if threads.count > len(threads.ranks) else ""
        whose = Sentences([f"{ranks_phrase(threads.ranks)}{several}{named}"])
        sections.append([whose, _frames(threads.frames)])
    return Document(sections)


def _group(group: Group) -> str:
    place = group.activity.place
    does = _does(group.activity, len(group.ranks))
    return f"{ranks_phrase(group.ranks)} {does}" + (
        "" if group.activity.kind is Kind.CODE else f" ({_place(place)})"
    )


def _without_stacks_text(rank: RankStacks) -> str:
    words = {Outcome.STOPPED: "is stopped", Outcome.GONE: "is gone"}
    return f"rank {rank.rank} {words.get(rank.outcome, 'does not answer')}"


def _missed(missed: Missed) -> str:
    words = f"{missed.call} number {missed.number} of {missed.group}"
    sizes = f" ({missed.sizes})" if missed.sizes else ""
    if missed.absent:
        have = "has" if len(missed.absent) == 1 else "have"
        return f"{ranks_phrase(missed.absent)} {have} not entered {words}{sizes}"
    called = ", ".join(f"rank {rank} calls {call}" for rank, call in missed.others[:_MAX_NAMED])
    return f"{words}{sizes}: {called}"


def _does(activity: Activity, count: int) -> str:
    if activity.kind is Kind.COLLECTIVE:
        return f"{'waits' if count == 1 else 'wait'} in {activity.call}"
    be = "is" if count == 1 else "are"
    if activity.kind is Kind.BACKWARD:
        return f"{be} in backward"
    if activity.kind is Kind.DATA:
        return f"{'waits' if count == 1 else 'wait'} for data"
    return f"{be} at {_place(activity.place)}"


def _awaited(merged: Merged) -> list[WorkerGroup]:
    """Return the DataLoader workers that ranks wait for; not those that wait themselves."""
    waiting = {rank for group in merged.groups if group.activity.kind is Kind.DATA for rank in group.ranks}
    return [
        group
        for group in merged.workers
        if group.loading.stage is not Stage.WAIT and waiting.intersection(group.ranks)
    ]


def _workers(group: WorkerGroup) -> str:
    """Return how many DataLoader workers of which ranks do what."""
    count = len(group.workers)
    numbers = sorted({number for _, number in group.workers if number >= 0})
    named = f" {ranks_text(numbers)}" if len(group.ranks) == 1 and len(numbers) == count else ""
    several = f", {count} workers" if count > 1 and not named else ""
    does = _LOADS[group.loading.stage][count > 1]
    place = f" at {_place(group.loading.place)}" if group.loading.place else ""
    calls = f", calling {group.loading.call}" if group.loading.call else ""
    which = f"{_plural(count, 'worker')}{named} of {ranks_phrase(group.ranks)}{several}"
    return f"DataLoader {which}: {does}{place}{calls}"


def _place(frame: Frame) -> str:
    return f"{PurePath(frame.file).name}:{frame.line} in {frame.function}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def _few(parts: list[str]) -> list[str]:
    more = len(parts) - _MAX_NAMED
    return [*parts[:_MAX_NAMED], f"and {more} more {_plural(more, 'place')}"] if more > 0 else parts


def _last_step(ranks: Sequence[RankStacks]) -> str:
    since = [rank.seconds_since_step for rank in ranks if rank.seconds_since_step is not None]
    usual = max((rank.step_seconds for rank in ranks), default=0.0)
    if not since:
        return ", no training step so far"
    return f", last training step {min(since):.1f} s ago (a step takes {usual:.3g} s)"


def _steps(members: Sequence[RankStacks]) -> str:
    steps = sorted({rank.step for rank in members if rank.step is not None})
    phases = sorted({rank.phase for rank in members} - {"", "other"})
    phase = f", phase {' or '.join(phases)}" if phases else ""
    return (f", {_plural(len(steps), 'step')} {ranks_text(steps)}" if steps else "") + phase


def _frames(frames: Sequence[Frame]) -> Facts:
    width = min(_WIDEST_NAME, max(len(frame.function) for frame in frames))
    rows = [(frame.function, f"{_short(frame.file)}:{frame.line or '?'}") for frame in frames]
    return Facts(rows, column=width + 4, indent=2, margin=4)


def _short(file: str) -> str:
    """Return a path without the folder of Python's packages or its own modules."""
    return _LIBRARY.sub("", file)
