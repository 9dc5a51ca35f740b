"""The answers of a request for stacks, put together."""

from collections.abc import Sequence
from typing import Final

from torchperfd_daemon.stacks import Outcome, RankStacks

_MAX_RANKS: Final = 100_000


def each_once(ranks: Sequence[RankStacks]) -> list[RankStacks]:
    """Return one answer of each rank, in order: a rank that has moved is reported as gone by its old node."""
    once: dict[int, RankStacks] = {}
    for rank in sorted(ranks, key=lambda rank: rank.outcome is Outcome.GONE):
        once.setdefault(rank.rank, rank)
    return [once[number] for number in sorted(once)]


def absent_ranks(ranks: Sequence[RankStacks], wanted: Sequence[int]) -> list[int]:
    """Return the ranks asked for, by default all of the run, that are not in the answers."""
    world = min(max(rank.world_size for rank in ranks), _MAX_RANKS)
    found = {rank.rank for rank in ranks}
    return [rank for rank in wanted or range(world) if rank not in found]
