"""Finds the collectives in which ranks wait, and the missing ranks, by torch's flight recorder on each rank.

A rank enters the collectives of a process group in order, so a rank that has not entered number n blocks
every rank that has. A rank that calls another collective as number n blocks them as well.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchperfd_daemon.stacks.model import GroupProgress, RankStacks


@dataclass(frozen=True, slots=True)
class Missed:
    """A collective that some ranks have entered and that cannot end.

    Attributes:
        group: Its process group, in words.
        call: The function, such as ``all_reduce``.
        sizes: The sizes of its inputs, such as ``4x4, 10``.
        waiting: The ranks that have entered it.
        absent: The ranks of the group that have not entered it.
        others: The ranks that call another function in its place, each with that function.
    """

    group: str
    number: int
    call: str
    sizes: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    others: tuple[tuple[int, str], ...]


def missed(ranks: Sequence[RankStacks]) -> tuple[Missed, ...]:
    """Return the first collective of each process group that cannot end.

    Args:
        ranks: The stacks of the ranks, including ranks without a record of their groups.
    """
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        for progress in rank.collectives:
            groups.setdefault(progress.name, {})[rank.rank] = progress
    found = (_missed(members) for members in groups.values())
    return tuple(each for each in found if each is not None)


def culprits(found: Sequence[Missed]) -> tuple[int, ...]:
    """Return the missing ranks that do not wait themselves; without any, those that call another function."""
    waiting = {rank for each in found for rank in each.waiting}
    absent = {rank for each in found for rank in each.absent}
    others = {rank for each in found for rank, _ in each.others}
    return tuple(sorted(absent - waiting - others) or sorted(others))


def _missed(members: dict[int, GroupProgress]) -> Missed | None:
    numbers = [progress.number for progress in members.values() if progress.number]
    if not numbers:
        return None
    number = min(numbers)
    absent = tuple(rank for rank, progress in members.items() if progress.begun < number)
    there = {rank: progress for rank, progress in members.items() if progress.number == number}
    calls = Counter(progress.call for progress in there.values()).most_common()
    # If two functions are called equally often, it is unknown which of them is wrong.
    tied = len(calls) > 1 and calls[0][1] == calls[1][1]
    call = calls[0][0]
    others = tuple((rank, progress.call) for rank, progress in there.items() if progress.call != call)
    if not absent and (not others or tied):
        return None
    waiting = {rank: progress for rank, progress in there.items() if progress.call == call}
    first = next(iter(waiting.values()))
    group = first.description if first.description not in ("", "undefined") else f"group {first.name}"
    return Missed(group, number, call, first.sizes, tuple(waiting), absent, others)
