"""Which collectives ranks wait in, and for whom, by torch's own record of them on each rank.

A rank comes to the collectives of a process group in order, so whoever has not begun number n keeps those
that have from ending it. Who calls something else as number n does so, too.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchperfd_daemon.stacks.model import GroupProgress, RankStacks


@dataclass(frozen=True, slots=True)
class Missed:
    """A collective that some ranks are in and that cannot end.

    Attributes:
        group: Its process group, in words.
        number: Which of the group's it is, from 1.
        call: Such as ``all_reduce``.
        sizes: Of its inputs, such as ``4x4, 10``.
        waiting: The ranks that are in it.
        absent: Those of the group that have not come to it.
        others: Those that call something else in its place, each with what that is.
    """

    group: str
    number: int
    call: str
    sizes: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    others: tuple[tuple[int, str], ...]


def missed(ranks: Sequence[RankStacks]) -> tuple[Missed, ...]:
    """Return the collectives that cannot end, of each process group the first.

    Args:
        ranks: What is known of them, also of those that told nothing of their groups.
    """
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        for progress in rank.collectives:
            groups.setdefault(progress.name, {})[rank.rank] = progress
    found = (_missed(members) for members in groups.values())
    return tuple(each for each in found if each is not None)


def culprits(found: Sequence[Missed]) -> tuple[int, ...]:
    """Return the ranks that others wait for and that wait for nobody; who calls something else, otherwise."""
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
    # Of two that call two things nobody can tell which is wrong.
    tied = len(calls) > 1 and calls[0][1] == calls[1][1]
    call = calls[0][0]
    others = tuple((rank, progress.call) for rank, progress in there.items() if progress.call != call)
    if not absent and (not others or tied):
        return None
    waiting = {rank: progress for rank, progress in there.items() if progress.call == call}
    first = next(iter(waiting.values()))
    group = first.description if first.description not in ("", "undefined") else f"group {first.name}"
    return Missed(group, number, call, first.sizes, tuple(waiting), absent, others)
