"""The session service: one stream per training process."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import contract, session_pb2, session_pb2_grpc
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.rpc.callers import (
    Caller,
    CallerDirectory,
    IngestRates,
    UserLimit,
    has_ended,
    is_process,
)
from torchperfd_daemon.rpc.interceptors import Unreadable
from torchperfd_daemon.service import translate
from torchperfd_daemon.service.handover import Sender
from torchperfd_daemon.service.message_receiver import CommandHandler, MessageReceiver, PeerExchange
from torchperfd_daemon.service.rank_session import FrequentReports, Session
from torchperfd_daemon.service.stack_requests import StackRequests
from torchperfd_daemon.service.targets import PeerDirectory
from torchperfd_daemon.stacks.model import RankStacks, Thread
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.text import LogLimiter

log = logging.getLogger("torchperfd.session")

_HOOKS: Final = {"native": contract.NATIVE_HOOKS, "reference": contract.REFERENCE_HOOKS}
_HELLO_S: Final = 10.0
_MAX_FEATURES: Final = 64
_SESSIONS: Final = 512


@dataclass(frozen=True, slots=True)
class Node:
    """The facts about this daemon that it sends to others."""

    name: str
    metrics_url: str
    captures_dir: Path
    takes_over: bool = False
    """Ranks hand their captures over: the captures directory is the daemon's alone."""


class SessionService(session_pb2_grpc.SessionServicer):
    """Receives steps into the store and carries captures' messages.

    Args:
        on_change: Called when a session has begun or ended; may be replaced.
        peer_exchange: Collects other daemons' addresses from the ranks; None where that is off.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        node: Node,
        on_change: Callable[[], None],
        others: PeerDirectory | None = None,
        peer_exchange: PeerExchange | None = None,
        callers: CallerDirectory | None = None,
        limit: UserLimit | None = None,
    ) -> None:
        self._callers = callers or CallerDirectory(0, 0)
        self._limit = limit or UserLimit("sessions", _SESSIONS, _SESSIONS)
        self._rates = IngestRates()
        self._limiter = LogLimiter(log)
        self._store = store
        self._coordinator = coordinator
        self._node = node
        self.on_change = on_change
        self._peer_exchange = peer_exchange
        self._sessions: dict[Rank, Session] = {}
        self._orders = CommandHandler(coordinator, self.of_run, others)
        self.stacks = StackRequests()
        """Gathers the ranks' stacks."""
        self.frequent_reports = FrequentReports(self.of_run)
        """Has ranks report more often while a live page shows them."""
        self._receiver = MessageReceiver(
            store, coordinator, self._orders, self.stacks, peer_exchange, takes_over=node.takes_over
        )

    def of_run(self, run: str) -> list[Session]:
        """Return the connected ranks of a run, by rank."""
        found = [session for rank, session in self._sessions.items() if rank.identity.run == run]
        return sorted(found, key=lambda session: session.rank)

    def stacks_of(
        self, ranks: Iterable[Rank], seconds: float, *, allow_signal: bool = False
    ) -> AsyncIterator[RankStacks]:
        """Yield the stacks of ranks of this node; see :meth:`StackRequests.stacks`."""
        targets = [(rank, self._sessions.get(rank)) for rank in ranks]
        return self.stacks.stacks(targets, seconds, allow_signal=allow_signal)

    async def sample_stacks(
        self, rank: Rank, seconds: float, *, threads_only: bool = False
    ) -> tuple[Thread, ...] | None:
        """Ask a connected rank for stacks; see :meth:`StackRequests.sample`."""
        session = self._sessions.get(rank)
        return await self.stacks.sample(session, seconds, threads_only=threads_only) if session else None

    def stacks_of_run(self, run: str, seconds: float) -> AsyncIterator[RankStacks]:
        """Yield the stacks of a run's ranks on this node, waiting up to ``seconds`` for each."""
        return self.stacks_of(self._store.runs().get(run, []), seconds)

    @property
    def count(self) -> int:
        return len(self._sessions)

    async def Attach(  # type: ignore[override]  # noqa: N802 - it writes instead of yielding
        self,
        request_iterator: AsyncIterator[session_pb2.ClientMessage],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        """Serve one training process until it leaves."""
        caller = self._callers.find(context)
        refused = self._limit.admit(caller.uid)
        if refused:
            self._limiter.warning("a session of %s is refused: %s", caller, refused)
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{refused}; raise max_sessions and max_sessions_per_user of torchperfd serve for more",
            )
        try:
            await self._serve(request_iterator, context, caller)
        finally:
            self._limit.dismiss(caller.uid)

    async def _serve(
        self,
        request_iterator: AsyncIterator[session_pb2.ClientMessage],
        context: "grpc.aio.ServicerContext[Any, Any]",
        caller: Caller,
    ) -> None:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(aiter(request_iterator), None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello has come")
            return
        if not isinstance(first, session_pb2.ClientMessage) or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with hello")
            return
        hello = first.hello
        if contract.overlapping_api(hello.api.min, hello.api.max) is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, version_conflict("client", hello))
            return
        try:
            identity = translate.identity_from_message(hello.identity)
        except translate.BadMessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        await self._rates.begin(caller.uid)
        await asyncio.sleep(self._rates.take(caller.uid, 1, 0))
        session = self._begin(identity, hello, caller)
        record = session.record
        session.handler = asyncio.current_task()
        sender: asyncio.Task[None] | None = None
        try:
            await context.write(self._welcome(record.identity.run, session.token))
            sender = asyncio.create_task(_send_all(session, context))
            async for message in request_iterator:
                if not isinstance(message, Unreadable):
                    self._callers.received(context, message.ByteSize())
                debt = self._rates.take(caller.uid, *_size(message))
                if debt > 0:
                    await asyncio.sleep(debt)
                # Handled without another wait: users' messages alternate as the event loop receives them.
                if self._sessions.get(record) is not session or not self._receiver.receive(session, message):
                    break
        except translate.BadMessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not session.ended:
                raise
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, session.ended)
        finally:
            if sender is not None:
                sender.cancel()
            self._orders.on_departure(session)
            self._coordinator.on_departure(session, "the process left during the capture")
            self._end(session)
            log.info("rank %d of run %s disconnected", identity.rank, record.identity.run)

    def _begin(self, identity: RankIdentity, hello: session_pb2.Hello, caller: Caller) -> Session:
        """Admit a process; it replaces an earlier process of its rank that has ended."""
        record = self._store.join(identity, caller.uid, caller.pid, self._has_ended)
        record.gid = caller.gid
        record.is_process_known = is_process(
            caller, identity.pid, identity.pid_namespace, identity.process_start_ticks
        )
        if not record.is_process_known:
            self._limiter.warning(
                "rank %d of run %s claims to be process %d, but the connection is from %s; the process is not"
                " measured",
                identity.rank,
                identity.run,
                identity.pid,
                caller,
            )
        run = record.identity.run
        rank = identity.rank
        takes_over = lambda capture_id, ack: self._coordinator.on_ack(capture_id, rank, ack)  # noqa: E731
        session = Session(
            record,
            hello.features[:_MAX_FEATURES],
            hello.client_version,
            caller,
            takes_over if self._node.takes_over else None,
        )
        record.hooks = next((name for name, feature in _HOOKS.items() if feature in session.features), "")
        record.client_version = translate.clean_label(hello.client_version)
        for other in self.of_run(run):
            # Children of a process may keep its connection open after its end.
            if other.rank == session.rank and other.record is not record:
                self._coordinator.on_departure(other, "another process has replaced it")
                self._end(other)
        self.add(session)
        log.info(
            "rank %d of run %s connected (pid %d, hooks %s), %s",
            identity.rank,
            run,
            identity.pid,
            record.hooks or "unknown",
            caller,
        )
        if run != identity.run:
            log.warning(
                "run %s already has a rank %d of another process: the run of pid %d is named %s on this node",
                identity.run,
                identity.rank,
                identity.pid,
                run,
            )
        return session

    def add(self, session: Session) -> None:
        """Register a session under its rank's record."""
        self._sessions[session.record] = session
        self.on_change()

    def open_sessions(self) -> list[Session]:
        """Return the connected ranks."""
        return list(self._sessions.values())

    def _has_ended(self, rank: Rank) -> bool:
        """Return whether a rank's process has ended, whether its connection is open or not."""
        session = self._sessions.get(rank)
        return session is None or has_ended(session.caller)

    def _end(self, session: Session) -> None:
        """End a session; nothing changes where a later one has replaced it."""
        if self._sessions.get(session.record) is session:
            del self._sessions[session.record]
            self._store.leave(session.record)
            if self._peer_exchange is not None:
                self._peer_exchange.forget(session.record)
        self.on_change()

    def find_sender(self, token: str, caller: Caller) -> Sender | None:
        """Return the rank whose session has a token and the user of a caller; None where there is none."""
        for session in tuple(self._sessions.values()):
            if token and secrets.compare_digest(session.token, token):
                uid = session.caller.uid
                if uid is not None and uid == caller.uid:
                    return Sender(session.record.identity.run, session.rank, uid)
        return None

    def _welcome(self, run: str, token: str) -> session_pb2.DaemonMessage:
        return session_pb2.DaemonMessage(
            welcome=session_pb2.Welcome(
                api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
                features=contract.FEATURES,
                daemon_version=__version__,
                daemon_revision=__revision__,
                captures_dir="" if self._node.takes_over else str(self._node.captures_dir),
                handover_token=token,
                metrics_url=self._node.metrics_url,
                fleet_address=str(self._peer_exchange.address) if self._peer_exchange else "",
                run=run,
            )
        )


def version_conflict(peer: str, hello: session_pb2.Hello) -> str:
    """Return the one line that names both versions."""
    return (
        f"the {peer} (torchperfd {hello.client_version or 'unknown'}) speaks protocol"
        f" {hello.api.min} to {hello.api.max}, this daemon (torchperfd {__version__}) speaks"
        f" {contract.API_MIN} to {contract.API_MAX}; install the same version on both sides"
    )


def _size(message: session_pb2.ClientMessage | Unreadable) -> tuple[int, int]:
    if isinstance(message, Unreadable):
        return 1, 0
    parts = message.bundle.messages or (message,)
    return len(parts), sum(len(part.steps.duration_ns) // 8 for part in parts if part.HasField("steps"))


async def _send_all(session: Session, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    while True:
        await context.write(await session.outgoing.get())
