"""A connected rank: what the daemon may send to it, how often it reports, when its session ends.

A process keeps its open connection when it runs a program with the set-user-ID bit. From then on the daemon
may read of it what the session's user may not, so the session is ended.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from torchperfd.v1 import contract, session_pb2
from torchperfd_daemon.background import until_next_round
from torchperfd_daemon.captures.manifest import CaptureOptions, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack
from torchperfd_daemon.collectors.process import has_users
from torchperfd_daemon.rpc.callers import UNKNOWN, Caller
from torchperfd_daemon.service import translate
from torchperfd_daemon.store.store import Rank

log = logging.getLogger("torchperfd.session")

_OUTGOING: Final = 64
_FEW: Final = 4
"""Messages that may wait for a process that reads."""


class Session:
    """A connected rank: a ``Participant`` of captures, and ``Asked`` for its stacks.

    Args:
        takes_over: Answers for a client that cannot hand its captures over; None if the daemon takes none.

    Attributes:
        token: Known to this rank's process only; empty if the daemon takes no captures.
    """

    def __init__(
        self,
        rank: Rank,
        features: Iterable[str] = (),
        client_version: str = "",
        caller: Caller = UNKNOWN,
        takes_over: Callable[[str, Ack], None] | None = None,
    ) -> None:
        self.record = rank
        self.caller = caller
        self._client_version = client_version
        self._takes_over = takes_over
        self.token = secrets.token_hex(16) if takes_over is not None else ""
        self.features = frozenset(features)
        self.outgoing: asyncio.Queue[session_pb2.DaemonMessage] = asyncio.Queue(_OUTGOING)
        self.handler: asyncio.Task[None] | None = None
        """What serves it."""
        self.ended = ""
        """Why the daemon has ended it; empty while it has not."""

    def end(self, reason: str) -> None:
        """End the session from the daemon's side."""
        self.ended = reason
        if self.handler is not None:
            self.handler.cancel()

    @property
    def rank(self) -> int:
        return self.record.identity.rank

    @property
    def facts(self) -> RankFacts:
        """Which process it is, for a capture's manifest."""
        return translate.rank_facts(
            self.record.identity,
            self._client_version,
            self.record.process.uid,
            self.record.totals.coordinates,
        )

    @property
    def steps_seen(self) -> int:
        """Training steps it has reported so far."""
        return self.record.totals.train.steps

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Ask it to get ready for a capture."""
        if self._takes_over is not None and contract.HANDOVER not in self.features:
            reason = (
                f"its torchperfd ({self._client_version or 'unknown'}) is too old to hand its trace over to"
                " this daemon; install the same version on both sides"
            )
            self._takes_over(capture_id, Ack(False, reason, 0, 0.0))
            return
        prepare = session_pb2.PrepareCapture(
            capture_id=capture_id,
            options=options.to_message(),
            directory="" if self._takes_over is not None else str(directory),
            max_bytes=max_bytes,
        )
        self._send(prepare_capture=prepare)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Send the first step, and the number of steps."""
        commit = session_pb2.CommitCapture(capture_id=capture_id, start_step=start_step, steps=steps)
        self._send(commit_capture=commit)

    def cancel(self, capture_id: str, reason: str) -> None:
        """Ask it to cancel a capture."""
        self._send(cancel_capture=session_pb2.CancelCapture(capture_id=capture_id, reason=reason))

    def send_order_result(self, result: session_pb2.CaptureOrderResult) -> None:
        """Send it the progress of a capture that its script has ordered."""
        self._send(capture_order_result=result)

    @property
    def reports_stacks(self) -> bool:
        """Whether its client can report its stacks."""
        return contract.STACKS in self.features

    @property
    def reports_collectives(self) -> bool:
        """Whether its client can report the progress of its process groups."""
        return contract.COLLECTIVES in self.features

    @property
    def supports_kinds(self) -> bool:
        """Whether its client can make captures other than traces."""
        return contract.CAPTURE_KINDS in self.features

    def dump_stacks(self, request_id: int, *, loading_only: bool = False, threads_only: bool = False) -> None:
        """Ask it for its stacks; see ``DumpStacks``."""
        request = session_pb2.DumpStacks(
            request_id=request_id, loading_only=loading_only, threads_only=threads_only
        )
        self._send(dump_stacks=request)

    def tell_collectives(self, request_id: int) -> None:
        """Ask it for the progress of its process groups."""
        self._send(tell_collectives=session_pb2.TellCollectives(request_id=request_id))

    def report_frequently(self, seconds: int) -> None:
        """Have it report more often for so many seconds; 0 ends that.

        Nothing is sent while several messages wait, as they do for a stopped process: the request is
        repeated, and what was requested ends by itself.
        """
        if contract.FREQUENT_REPORTS in self.features and self.outgoing.qsize() < _FEW:
            self._send(report_frequently=session_pb2.ReportFrequently(seconds=seconds))

    def _send(self, **body: Any) -> None:
        try:
            self.outgoing.put_nowait(session_pb2.DaemonMessage(**body))
        except asyncio.QueueFull:
            # A stopped process reads nothing. A message that it missed shows as a capture without an ack.
            log.warning(
                "rank %d of run %s is not reading its message queue; message dropped",
                self.rank,
                self.record.identity.run,
            )


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


access_log = logging.getLogger("torchperfd.access")

_USERS_CHANGED: Final = "the process has changed users since it connected"


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
            await asyncio.sleep(until_next_round())
            self.check()

    def check(self) -> None:
        """End each session whose process has changed users."""
        for session in list(self._sessions()):
            if session.ended or not session.caller.pid or not self._has_changed(session):
                continue
            identity = session.record.identity
            access_log.warning(
                "rank %d of run %s, %s: %s; its session is ended",
                identity.rank,
                identity.run,
                session.caller,
                _USERS_CHANGED,
            )
            session.end(_USERS_CHANGED)

    def _has_changed(self, session: Session) -> bool:
        caller = session.caller
        try:
            return not has_users(self._proc, caller.pid, caller.uid, caller.gid)
        except OSError:
            return False  # it has ended, and so has its session or will
