"""Identical stacks of several ranks made one, and the ranks that stand apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchperfd_daemon.stacks.activity import Activity, Kind, activity
from torchperfd_daemon.stacks.collectives import Missed, culprits, missed
from torchperfd_daemon.stacks.model import Frame, RankStacks


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose training threads have the same frames: file, line and function of each."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    activity: Activity


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """Other threads of the script's, on any rank, that have the same frames."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    count: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """Where a run stands.

    Attributes:
        groups: Largest first, then by rank.
        others: Likewise.
        untold: Ranks without stacks.
        odd: Ranks, untold or not, that are not where the run is waiting, or where most of it is.
        missed: The collectives that cannot end, where torch keeps a record of them.
        goes_on: Whether every rank has made a training step a moment ago: then this is a
            moment of a run that is well, and nobody stands apart for long.
    """

    groups: tuple[Group, ...]
    others: tuple[ThreadGroup, ...]
    untold: tuple[RankStacks, ...]
    odd: tuple[int, ...]
    missed: tuple[Missed, ...]
    goes_on: bool


def merge(ranks: Sequence[RankStacks]) -> Merged:
    """Group the ranks by where their training threads are, and tell those that stand apart.

    Where torch keeps a record of the collectives, those do that others wait for in one. Else, where more than
    half of the ranks are in one place, the others stand apart. Else, where some wait in a
    collective, those do that are not waiting with the most of them; a rank in backward may be
    waiting, too, since gradients are reduced there. Else nobody can tell.
    """
    by_frames: dict[tuple[Frame, ...], list[int]] = {}
    untold = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        training = rank.training
        if rank.outcome.has_stacks and training is not None and training.frames:
            by_frames.setdefault(training.frames, []).append(rank.rank)
        else:
            untold.append(rank)
    groups = sorted(
        (Group(tuple(members), frames, activity(frames)) for frames, members in by_frames.items()),
        key=lambda group: (-len(group.ranks), group.ranks),
    )
    late = missed(ranks)
    apart = {rank.rank for rank in untold}
    apart.update(culprits(late) or (rank for group in _apart(groups) for rank in group.ranks))
    return Merged(
        groups=tuple(groups),
        others=_merge_others(ranks),
        untold=tuple(untold),
        odd=tuple(sorted(apart)),
        missed=late,
        goes_on=not untold and all(rank.goes_on for rank in ranks),
    )


def _apart(groups: Sequence[Group]) -> list[Group]:
    """Return the groups that stand apart; groups are given largest first."""
    told = sum(len(group.ranks) for group in groups)
    if groups and 2 * len(groups[0].ranks) > told:
        return list(groups[1:])
    kinds = [group.activity.kind for group in groups]
    if Kind.COLLECTIVE not in kinds:
        return []
    waiting = [group for group in groups if group.activity.kind in (Kind.COLLECTIVE, Kind.BACKWARD)]
    if len(waiting) > 1 and len(waiting[0].ranks) == len(waiting[1].ranks):
        # As many wait here as there: which of them are wrong nobody can tell.
        return [group for group in groups if group not in waiting]
    return [group for group in groups if group is not waiting[0]]


def _merge_others(ranks: Sequence[RankStacks]) -> tuple[ThreadGroup, ...]:
    members: dict[tuple[Frame, ...], list[tuple[int, str]]] = {}
    for rank in ranks:
        for thread in rank.threads:
            if not thread.training and not thread.own and thread.frames:
                members.setdefault(thread.frames, []).append((rank.rank, thread.name))
    merged = (
        ThreadGroup(
            ranks=tuple(sorted({rank for rank, _ in threads})),
            names=tuple(sorted({name for _, name in threads if name})),
            count=len(threads),
            frames=frames,
        )
        for frames, threads in members.items()
    )
    return tuple(sorted(merged, key=lambda group: (-group.count, group.ranks, group.names)))
