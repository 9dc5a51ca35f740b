"""Ends the sessions of processes that have changed users since they connected.

A process keeps its open connection when it runs a program with the set-user-ID bit. From then on the daemon
may read of it what the session's user may not.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.ranks import has_users
from torchperfd_daemon.service.rank_session import Session

log = logging.getLogger("torchperfd.access")

_INTERVAL_S: Final = 1.0
_REASON: Final = "the process has changed users since it connected"


class UserWatch:
    """Compares the users of all connected processes with those of their sessions, once a second.

    Readers of a process check them as well, before and after: this only ends the session.

    Args:
        sessions: Returns the open sessions.
    """

    def __init__(self, sessions: Callable[[], Iterable[Session]], proc: Path = Path("/proc")) -> None:
        self._sessions = sessions
        self._proc = proc

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """End each session whose process has changed users."""
        sessions = [each for each in self._sessions() if each.caller.pid and not each.ended]
        for session in await asyncio.to_thread(self._changed, sessions):
            identity = session.record.identity
            log.warning(
                "rank %d of run %s, %s: %s; its session is ended",
                identity.rank,
                identity.run,
                session.caller,
                _REASON,
            )
            session.end(_REASON)

    def _changed(self, sessions: Iterable[Session]) -> list[Session]:
        return [session for session in sessions if self._has_changed(session)]

    def _has_changed(self, session: Session) -> bool:
        caller = session.caller
        try:
            return not has_users(self._proc, caller.pid, caller.uid, caller.gid)
        except OSError:
            return False  # it has ended, and so has its session or will
