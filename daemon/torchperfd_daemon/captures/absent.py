"""Ranks that cannot take part in a capture, and say why."""

import asyncio
from pathlib import Path

from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, RankFacts
from torchperfd_daemon.captures.turns import Ack


class AbsentRank:
    """A rank of the run that nobody has: it fails by name instead of being left out."""

    def __init__(self, rank: int, facts: RankFacts, reason: str, coordinator: Coordinator) -> None:
        self.rank = rank
        self.steps_seen = 0
        self.facts = facts
        self._reason = reason
        self._coordinator = coordinator

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Say why there is no such rank."""
        answer_later(self._coordinator, capture_id, self.rank, self._reason)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Do nothing: it never is ready."""

    def cancel(self, capture_id: str, reason: str) -> None:
        """Do nothing: it never was ready."""


def answer_later(coordinator: Coordinator, capture_id: str, rank: int, reason: str) -> None:
    """Answer prepare, once whoever has asked waits for it."""
    loop = asyncio.get_running_loop()
    loop.call_soon(coordinator.on_ack, capture_id, rank, Ack(False, reason, 0, 0.0))
