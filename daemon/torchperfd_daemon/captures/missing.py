"""Ranks that cannot take part in a capture, with the reason."""

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Participant
from torchperfd_daemon.errors import NoSuchTargetError

_MAX_RANKS: Final = 100_000
_MAX_NAMED: Final = 20


class MissingRank:
    """A rank of the run that was not found: it fails by name instead of being left out."""

    def __init__(self, rank: int, facts: RankFacts, reason: str, coordinator: Coordinator) -> None:
        self.rank = rank
        self.steps_seen = 0
        self.facts = facts
        self._reason = reason
        self._coordinator = coordinator

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Fail with the reason."""
        answer_later(self._coordinator, capture_id, self.rank, self._reason)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Do nothing: the rank is never ready."""

    def cancel(self, capture_id: str, reason: str) -> None:
        """Do nothing: the rank was never ready."""


def whole_job(
    run: str, wanted: Collection[int], found: Mapping[int, Participant], reason: str, coordinator: Coordinator
) -> list[Participant]:
    """Return a participant for each rank, in order; those that were not found fail by name.

    Args:
        run: The run's name, for the error.
        wanted: Which ranks; all ranks of the job when empty.
        found: The ranks that can take part; at least one.
        reason: Why the others cannot.

    Raises:
        NoSuchTargetError: The job is too small to have one of the ranks.
    """
    facts = next(iter(found.values())).facts
    world = min(max(each.facts.world_size for each in found.values()), _MAX_RANKS)
    ranks = sorted(set(wanted)) or sorted(found.keys() | set(range(world)))
    if beyond := [rank for rank in ranks if rank not in found and rank >= world]:
        raise NoSuchTargetError(
            f"run {run} has no rank {', '.join(map(str, beyond[:_MAX_NAMED]))}", f"it has {world} ranks"
        )
    missing = RankFacts(job_name=facts.job_name, world_size=facts.world_size)
    return [found.get(rank) or MissingRank(rank, missing, reason, coordinator) for rank in ranks]


def answer_later(coordinator: Coordinator, capture_id: str, rank: int, reason: str) -> None:
    """Answer prepare, after the caller has begun to wait for the answer."""
    loop = asyncio.get_running_loop()
    loop.call_soon(coordinator.on_ack, capture_id, rank, Ack(False, reason, 0, 0.0))
