"""Groups identical stacks of several ranks; finds the ranks that differ and the collectives they miss.

The collectives come from torch's flight recorder on each rank. A rank enters the collectives of a process
group in order, so a rank that has not entered number n blocks every rank that has. A rank that calls another
collective as number n blocks them as well.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchperfd.model.process import GroupProgress
from torchperfd_daemon.stacks.activity import Activity, Kind, Loading, activity, loading, worker_frames
from torchperfd_daemon.stacks.model import Frame, RankStacks, Thread


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
    return Missed(group_text(first), number, call, first.sizes, tuple(waiting), absent, others)


def group_text(progress: GroupProgress) -> str:
    """Return a process group in words: its description, or its name without one."""
    has_words = progress.description not in ("", "undefined")
    return progress.description if has_words else f"group {progress.name}"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose training threads have the same frames, by file, line and function."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    activity: Activity


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """Other threads of the script, on any rank, that have the same frames."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    count: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """DataLoader workers, of any rank, that have the same frames.

    Attributes:
        workers: Rank and number in its loader of each; the number is -1 if unknown.
    """

    workers: tuple[tuple[int, int], ...]
    frames: tuple[Frame, ...]
    loading: Loading

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.workers}))


@dataclass(frozen=True, slots=True)
class Merged:
    """The merged stacks of a run.

    Attributes:
        odd: Ranks, with stacks or without, that are not where the run waits, or where most ranks are.
        workers: The DataLoader workers, the largest group first.
        missed: The collectives that cannot end, if torch keeps a record of them.
        goes_on: Whether every rank has made a training step recently. The run is then healthy, and
            differences between ranks are temporary.
    """

    groups: tuple[Group, ...]
    others: tuple[ThreadGroup, ...]
    workers: tuple[WorkerGroup, ...]
    without_stacks: tuple[RankStacks, ...]
    odd: tuple[int, ...]
    missed: tuple[Missed, ...]
    goes_on: bool


def merge(ranks: Sequence[RankStacks]) -> Merged:
    """Group the ranks by the frames of their training threads, and find the odd ranks.

    The first rule that applies decides:

    1. Torch has a record of the collectives: ranks that others wait for in a collective are odd. 2. More than
    half of the ranks are in one place: the others are odd. 3. Some ranks wait in a collective: ranks outside
    the largest waiting group are odd. A rank in backward may
       wait too, since gradients are reduced there.
    4. Otherwise no rank with stacks is odd.

    Ranks without stacks are always odd.
    """
    by_frames: dict[tuple[Frame, ...], list[int]] = {}
    without_stacks = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        training = rank.training
        if rank.outcome.has_stacks and training is not None and training.frames:
            by_frames.setdefault(training.frames, []).append(rank.rank)
        else:
            without_stacks.append(rank)
    groups = sorted(
        (Group(tuple(members), frames, activity(frames)) for frames, members in by_frames.items()),
        key=lambda group: (-len(group.ranks), group.ranks),
    )
    late = missed(ranks)
    apart = {rank.rank for rank in without_stacks}
    apart.update(culprits(late) or (rank for group in _apart(groups) for rank in group.ranks))
    return Merged(
        groups=tuple(groups),
        others=_merge_others(ranks),
        workers=_merge_workers(ranks),
        without_stacks=tuple(without_stacks),
        odd=tuple(sorted(apart)),
        missed=late,
        goes_on=not without_stacks and all(rank.goes_on for rank in ranks),
    )


def _apart(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of odd ranks; ``groups`` are sorted, the largest first."""
    total = sum(len(group.ranks) for group in groups)
    if groups and 2 * len(groups[0].ranks) > total:
        return list(groups[1:])
    kinds = [group.activity.kind for group in groups]
    if Kind.COLLECTIVE not in kinds:
        return []
    waiting = [group for group in groups if group.activity.kind in (Kind.COLLECTIVE, Kind.BACKWARD)]
    if len(waiting) > 1 and len(waiting[0].ranks) == len(waiting[1].ranks):
        # Two waiting groups are equally large: it is unknown which of them is wrong.
        return [group for group in groups if group not in waiting]
    return [group for group in groups if group is not waiting[0]]


def _merge_workers(ranks: Sequence[RankStacks]) -> tuple[WorkerGroup, ...]:
    members: dict[tuple[Frame, ...], list[tuple[int, Thread]]] = {}
    for rank in ranks:
        for thread in rank.threads:
            if thread.worker_pid and thread.frames:
                members.setdefault(worker_frames(thread.frames), []).append((rank.rank, thread))
    groups = [
        WorkerGroup(tuple(sorted((rank, thread.worker) for rank, thread in threads)), frames, activity)
        for frames, threads in members.items()
        if (activity := loading(threads[0][1])) is not None
    ]
    return tuple(sorted(groups, key=lambda group: (-len(group.workers), group.workers)))


def _merge_others(ranks: Sequence[RankStacks]) -> tuple[ThreadGroup, ...]:
    members: dict[tuple[Frame, ...], list[tuple[int, str]]] = {}
    for rank in ranks:
        for thread in rank.threads:
            if not (thread.training or thread.own or thread.worker_pid) and thread.frames:
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
