"""Has the ranks of the runs that a live page shows report more often."""

import time
from collections.abc import Callable, Iterable
from typing import Final

from torchperfd_daemon.service.rank_session import Session

RENEW_S: Final = 3.0
LEASE_S: Final = 10
"""A rank goes back to its usual reports so long after the last message, also if the daemon was killed."""


class FrequentReports:
    """Asks ranks for frequent reports, for some seconds at a time.

    Args:
        sessions: Returns the connected ranks of a run.
        clock: Monotonic seconds.
    """

    def __init__(
        self, sessions: Callable[[str], Iterable[Session]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sessions = sessions
        self._clock = clock
        self._runs: frozenset[str] = frozenset()
        self._renew_at = float("-inf")

    def watch(self, runs: frozenset[str]) -> None:
        """Ask the ranks of these runs, and end what was asked of those of other runs.

        To be called at each change, and at least once per second while there are any.
        """
        begun, ended = runs - self._runs, self._runs - runs
        self._runs = runs
        if self._clock() >= self._renew_at:
            # All of them: ranks may have connected since.
            begun, self._renew_at = runs, self._clock() + RENEW_S
        for run in begun:
            self._ask(run, LEASE_S)
        for run in ended:
            self._ask(run, 0)

    def _ask(self, run: str, seconds: int) -> None:
        for session in self._sessions(run):
            session.report_frequently(seconds)
