"""What the daemon does with each message of a training process, by the message's kind."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchperfd.v1 import session_pb2
from torchperfd_daemon.captures import Coordinator
from torchperfd_daemon.captures.rank_attempts import failure
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.rpc.interceptors import MAX_BUNDLED, Unreadable
from torchperfd_daemon.service import translate, translate_account, translate_diagnosis
from torchperfd_daemon.service.command_handler import CommandHandler
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.service.stack_requests import StackRequests
from torchperfd_daemon.store import Rank, Store


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
        orders: Runs the captures that scripts order.
        stacks: Gathers the ranks' stacks.
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
        session.record.totals = translate_account.totals_from_message(account)

    def _on_state(self, session: Session, report: session_pb2.StateChange) -> None:
        rank = session.record
        rank.state = translate.state_from_message(report.state) or rank.state
        rank.framework = translate.clean_framework(report.framework) or rank.framework
        if report.failure and not rank.failure:
            rank.failure = translate.clean_reason(report.failure)
            rank.failed_unix_seconds = time.time()
        if report.outcome:
            rank.outcome = translate.clean_reason(report.outcome)

    def _on_capture_ack(self, session: Session, ack: session_pb2.CaptureAck) -> None:
        self._coordinator.on_ack(ack.capture_id, session.rank, translate.ack_from_message(ack))

    def _on_capture_result(self, session: Session, message: session_pb2.CaptureResult) -> None:
        result = translate.result_from_message(message)
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
        groups = translate_diagnosis.collectives_from_messages(report.groups)
        self._stacks.on_collectives(session, report.request_id, groups)

    def _on_job_daemons(self, session: Session, message: session_pb2.JobDaemons) -> None:
        if self._peer_exchange is not None:
            self._peer_exchange.on_addresses(session.record, message.addresses)
