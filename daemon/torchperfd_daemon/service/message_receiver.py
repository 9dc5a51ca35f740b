"""What the daemon does with each message of a training process, by the message's kind.

Rank 0 may request captures of the whole job from within the script.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torchperfd.model.formatting import one_line
from torchperfd.model.messages import unpack
from torchperfd.v1 import session_pb2
from torchperfd_daemon.captures.attempt import MAX_STEPS
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions
from torchperfd_daemon.captures.rank_attempts import Ack, Participant, Result, failure
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.rpc.interceptors import MAX_BUNDLED, Unreadable
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.service.rank_process import LISTED
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.service.stack_requests import StackRequests
from torchperfd_daemon.service.targets import PeerDirectory, RankSelection, whole_job
from torchperfd_daemon.store.store import Rank, Store

log = logging.getLogger("torchperfd.orders")

_AUTOMATIC: Final = "automatic"
_MAX_ORDERS: Final = 16
_LONGEST_S: Final = 86_400.0
_NOT_CONNECTED: Final = "is not connected to this daemon"


@dataclass(slots=True)
class _Order:
    """An order in progress; its capture has no id before it was admitted."""

    task: "asyncio.Task[None] | None" = None
    capture_id: str = ""
    unwanted: bool = False


class CommandHandler:
    """Runs ordered captures, and sends their progress to the rank that ordered them.

    Args:
        others: Finds those on other nodes; None where there are none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        of_run: Callable[[str], Sequence[Participant]],
        others: PeerDirectory | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._of_run = of_run
        self._others = others
        self._orders: dict[tuple[Participant, int], _Order] = {}

    def on_order(
        self,
        requester: Participant,
        run: str,
        order: session_pb2.CaptureOrder,
        send_result: Callable[[session_pb2.CaptureOrderResult], None],
    ) -> None:
        """Start or cancel an order.

        Args:
            requester: The rank that orders; must be rank 0.
            send_result: Takes each answer to it.
        """
        key = (requester, order.order_id)
        known = self._orders.get(key)
        if order.cancel and known is not None:
            known.unwanted = True
            if known.capture_id:
                self._coordinator.cancel(known.capture_id, "script")
        if order.cancel or known is not None:
            return
        self._orders[key] = begun = _Order()
        begun.task = asyncio.get_running_loop().create_task(self._serve(key, run, order, send_result))

    def on_departure(self, requester: Participant) -> None:
        """Cancel the orders of a rank that has left."""
        for key, order in list(self._orders.items()):
            if key[0] is requester and order.task is not None:
                order.task.cancel()

    async def _serve(
        self,
        key: tuple[Participant, int],
        run: str,
        order: session_pb2.CaptureOrder,
        send_result: Callable[[session_pb2.CaptureOrderResult], None],
    ) -> None:
        begun = self._orders[key]
        try:
            options, timeout = _checked(order)
            if key[0].rank != 0:
                raise UsageError("only rank 0 may order a capture of other ranks", "do it there")
            if len(self._orders) > _MAX_ORDERS:
                raise TorchperfdError(f"{_MAX_ORDERS} orders are in progress", "wait for one of them")
            async with self._gathered(run, order.ranks) as gathered:
                trigger = _AUTOMATIC if options.automatic else "script"
                async for progress in self._coordinator.capture(
                    run, gathered.participants, options, timeout, trigger=trigger
                ):
                    if not begun.capture_id:
                        begun.capture_id = progress.record.capture_id
                        if begun.unwanted:
                            self._coordinator.cancel(begun.capture_id, "script")
                    send_result(
                        translate.order_result_to_message(order.order_id, progress, gathered.elsewhere)
                    )
        except TorchperfdError as error:
            send_result(_refused(order, str(error)))
        except Exception:
            log.exception("a capture ordered by a script failed")
            send_result(_refused(order, "internal error; see the daemon's log"))
        finally:
            del self._orders[key]

    @asynccontextmanager
    async def _gathered(self, run: str, ranks: Sequence[int]) -> AsyncIterator[RankSelection]:
        if self._others is None:
            yield RankSelection(run, self._participants(run, ranks), {}, [])
            return
        users = {each.facts.uid for each in self._of_run(run)}
        async with self._others.gather(
            run, ranks, lambda: {run: [*self._of_run(run)]}, users.__contains__
        ) as gathered:
            yield gathered

    def _participants(self, run: str, ranks: Iterable[int]) -> list[Participant]:
        """Return the chosen ranks, by default those of the whole job, connected or not."""
        here = {each.rank: each for each in self._of_run(run)}
        if not here:
            raise NoSuchTargetError(f"no rank of run {run} is connected", LISTED)
        return whole_job(run, [*ranks], here, _NOT_CONNECTED, self._coordinator)


def _refused(order: session_pb2.CaptureOrder, reason: str) -> session_pb2.CaptureOrderResult:
    return session_pb2.CaptureOrderResult(order_id=order.order_id, state="failed", ended=True, reason=reason)


def _checked(order: session_pb2.CaptureOrder) -> tuple[CaptureOptions, float]:
    """Return what to record, and for how long to try."""
    options = translate.capture_options_from_message(order.options)
    if not 1 <= options.steps <= MAX_STEPS:
        raise UsageError(f"steps must be 1 to {MAX_STEPS}")
    timeout = order.timeout_seconds
    if not 0 < timeout <= _LONGEST_S:
        raise UsageError("the timeout must be up to a day")
    return options, timeout


class PeerExchange(Protocol):
    """Collects the addresses of other daemons that ranks report."""

    @property
    def address(self) -> object:
        """The address of this daemon for other daemons; ranks pass it on."""

    def on_addresses(self, rank: Rank, addresses: Sequence[str], /) -> None:
        """Store the addresses that a rank reports; those that are not accepted are dropped."""

    def forget(self, rank: Rank, /) -> None:
        """Drop the addresses of a rank that has left."""


class MessageReceiver:
    """Hands each message of a session to the part of the daemon that it concerns.

    Args:
        peer_exchange: Collects other daemons' addresses from the ranks; None where that is off.
        takes_over: Ranks hand their captures over, so that a result without a file is a failure.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        orders: CommandHandler,
        stacks: StackRequests,
        peer_exchange: PeerExchange | None,
        *,
        takes_over: bool,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._orders = orders
        self._stacks = stacks
        self._peer_exchange = peer_exchange
        self._takes_over = takes_over
        self._handlers: dict[str, Callable[[Session, Any], None]] = {
            "steps": self._on_steps,
            "account": self._on_account,
            "state": self._on_state,
            "capture_ack": self._on_capture_ack,
            "capture_result": self._on_capture_result,
            "capture_order": self._on_capture_order,
            "stack_report": self._on_stack_report,
            "collective_report": self._on_collective_report,
            "job_daemons": self._on_job_daemons,
        }

    def receive(self, session: Session, message: session_pb2.ClientMessage | Unreadable) -> bool:
        """Handle one message; return False when the process ends the session.

        Raises:
            BadMessageError: No client of ours would send it.
        """
        if isinstance(message, Unreadable):
            raise translate.BadMessageError(message.reason)
        kind = message.WhichOneof("body")
        if kind == "bundle":
            return self._receive_bundle(session, message.bundle)
        if kind in self._handlers:
            self._handlers[kind](session, getattr(message, kind))
        return kind != "goodbye"

    def _receive_bundle(self, session: Session, bundle: session_pb2.Bundle) -> bool:
        if len(bundle.messages) > MAX_BUNDLED:
            raise translate.BadMessageError(f"a bundle holds more than {MAX_BUNDLED} messages")
        for part in bundle.messages:
            # Nested bundles would allow unbounded recursion.
            if part.HasField("bundle"):
                raise translate.BadMessageError("a bundle holds another")
            if not self.receive(session, part):
                return False
        return True

    def _on_steps(self, session: Session, batch: session_pb2.StepBatch) -> None:
        self._store.ingested_steps += batch.count
        self._store.add_steps(session.record, translate.training_steps_from_message(batch))

    def _on_account(self, session: Session, account: session_pb2.Account) -> None:
        session.record.totals = translate_diagnosis.totals_from_message(account)

    def _on_state(self, session: Session, report: session_pb2.StateChange) -> None:
        rank = session.record
        rank.state = translate.state_from_message(report.state) or rank.state
        rank.framework = translate.clean_label(report.framework) or rank.framework
        if report.failure and not rank.failure:
            rank.failure = one_line(report.failure, translate.MAX_REASON_CHARACTERS)
            rank.failed_unix_seconds = time.time()
        if report.outcome:
            rank.outcome = one_line(report.outcome, translate.MAX_REASON_CHARACTERS)

    def _on_capture_ack(self, session: Session, ack: session_pb2.CaptureAck) -> None:
        self._coordinator.on_ack(ack.capture_id, session.rank, unpack(ack, Ack))

    def _on_capture_result(self, session: Session, message: session_pb2.CaptureResult) -> None:
        result = unpack(message, Result)
        is_ordered = self._takes_over and not message.self_started
        if is_ordered and result.ok and not self._coordinator.has_file(message.capture_id, result.file):
            result = failure("it has not handed its trace over to the daemon")
        if not message.self_started:
            self._coordinator.on_result(message.capture_id, session.rank, result)
            return
        try:
            self._coordinator.adopt(
                message.capture_id,
                session.record.identity.run,
                translate.capture_options_from_message(message.options),
                session.rank,
                result,
                session.facts,
                session.record.process.uid,
            )
        except NoSuchTargetError as error:
            raise translate.BadMessageError(error.problem) from error

    def _on_capture_order(self, session: Session, order: session_pb2.CaptureOrder) -> None:
        self._orders.on_order(session, session.record.identity.run, order, session.send_order_result)

    def _on_stack_report(self, session: Session, report: session_pb2.StackReport) -> None:
        self._stacks.on_report(
            session, report.request_id, translate_diagnosis.stack_report_from_message(report)
        )

    def _on_collective_report(self, session: Session, report: session_pb2.CollectiveReport) -> None:
        groups = translate_diagnosis.collectives_from_message(report)
        self._stacks.on_collectives(session, report.request_id, groups)

    def _on_job_daemons(self, session: Session, message: session_pb2.JobDaemons) -> None:
        if self._peer_exchange is not None:
            self._peer_exchange.on_addresses(session.record, message.addresses)
