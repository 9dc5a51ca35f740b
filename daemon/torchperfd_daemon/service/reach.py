"""Connects the daemon's triggers to the connected ranks."""

from collections.abc import AsyncIterator, Sequence

from torchperfd_daemon.captures import Participant
from torchperfd_daemon.service.session import SessionService
from torchperfd_daemon.stacks import RankStacks
from torchperfd_daemon.store import Store


class SessionReach:
    """Reaches the ranks of this node through their sessions."""

    def __init__(self, store: Store, sessions: SessionService) -> None:
        self._store = store
        self._sessions = sessions

    def participants(self, run: str) -> Sequence[Participant]:
        """Return the connected ranks of a run."""
        return self._sessions.of_run(run)

    async def stacks(self, run: str, seconds: float) -> AsyncIterator[RankStacks]:
        """Yield the stacks of a run's ranks, waiting at most ``seconds`` for each."""
        async for stacks in self._sessions.stacks_of(self._store.runs().get(run, []), seconds):
            yield stacks
