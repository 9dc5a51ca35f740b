"""Relays: ranks of other nodes as participants of a capture that this daemon conducts.

One stream per peer carries orders to it and reports back. Regular pings measure the offset of the peer's
clock and its ranks' progress, and detect a lost peer.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc

from torchperfd.model.messages import unpack
from torchperfd.v1 import control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Result
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.transport import PeerError, reason_of
from torchperfd_daemon.service.targets import answer_later


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its response, in Unix ns: sent and arrived by the local clock, the rest by theirs."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    arrived_ns: int

    @property
    def offset_ns(self) -> int:
        """Their clock less ours, if both ways took equally long (theta of RFC 5905, section 8)."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.arrived_ns)) // 2

    @property
    def delay_ns(self) -> int:
        """Time on the way, there and back (delta of RFC 5905): the offset is wrong by at most half of it."""
        return (self.arrived_ns - self.sent_ns) - (self.answered_ns - self.received_ns)


class ClockOffset:
    """The offset measured by the quickest of several exchanges; queueing only adds to the delay."""

    def __init__(self) -> None:
        self._best: Exchange | None = None

    def add(self, exchange: Exchange) -> None:
        """Add an exchange. One that arrived before it was sent is ignored."""
        if exchange.delay_ns >= 0 and (self._best is None or exchange.delay_ns < self._best.delay_ns):
            self._best = exchange

    @property
    def ns(self) -> int | None:
        """Their clock less ours; None until it is measured."""
        return None if self._best is None else self._best.offset_ns


_QUICK_ROUNDS: Final = 8
_QUICK_S: Final = 0.05
_SLOW_S: Final = 1.0
_BETWEEN_PINGS_S: Final = 0.002
_SILENCE_S: Final = 10.0
_CLOSE_S: Final = 6.0
"""At the end a peer waits up to five seconds for ranks that are still writing."""


class Relay:
    """The stream to one peer.

    Args:
        call: The stream, not begun yet.
        coordinator: Receives acks, results and departures.
    """

    def __init__(self, address: Address, call: Any, coordinator: Coordinator) -> None:
        self.address = address
        self._call = call
        self._coordinator = coordinator
        self._orders: asyncio.Queue[fleet_pb2.TakeOrder | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ranks: dict[int, RemoteRank] = {}
        # When the oldest unanswered ping was sent.
        self._asked_at: float | None = None
        self.here = fleet_pb2.NodeRuns()
        """The peer's report on its node."""
        self.offset = ClockOffset()
        self.steps: dict[int, int] = {}
        """By rank, training steps reported so far."""
        self.lost = ""
        """Why the stream has ended; empty while it is open."""

    async def begin(self) -> "Relay":
        """Open the stream and receive the peer's ranks.

        Raises:
            grpc.RpcError: The peer does not answer.
            PeerError: It supports no common protocol version.
        """
        await self._call.write(
            fleet_pb2.TakeOrder(begin=fleet_pb2.TakeBegin(api=fleet_translate.api_message()))
        )
        first = await self._call.read()
        if not first or not first.HasField("here"):
            self._call.cancel()
            raise PeerError("its first message does not describe its node")
        try:
            fleet_translate.check_version(first.here.api)
        except PeerError:
            self._call.cancel()
            raise
        self.here = first.here
        return self

    @property
    def instance(self) -> str:
        """Which daemon the peer is."""
        return self.here.instance

    def carry(self, run: str, wanted: Iterable[control_pb2.RankStatus]) -> list["RemoteRank"]:
        """Return participants for some of the peer's ranks, and start to forward their messages."""
        self._ranks = {status.identity.rank: RemoteRank(self, run, status) for status in wanted}
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        # First, so that the clock's offset is roughly known before the capture starts.
        self.ping()
        return list(self._ranks.values())

    def send(self, order: fleet_pb2.TakeOrder) -> None:
        """Send an order to the peer; without effect when it is lost."""
        if not self.lost:
            self._orders.put_nowait(order)

    def ping(self) -> None:
        """Ask for its time; a peer that has not answered for long is lost."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > _SILENCE_S:
            self._lose(f"its daemon at {self.address} has not answered for {_SILENCE_S:.0f} s")
            self._call.cancel()
        # What is sent is the time when it goes; see _write.
        self.send(fleet_pb2.TakeOrder(ping=fleet_pb2.TakePing()))

    def refuse(self, capture_id: str, rank: int) -> None:
        """Answer prepare for a rank whose peer is lost."""
        answer_later(self._coordinator, capture_id, rank, self.lost)

    async def close(self) -> None:
        """Let the peer finish its part, and wait until it has."""
        if not self._tasks:
            self._call.cancel()
            return
        self._orders.put_nowait(None)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while (order := await self._orders.get()) is not None:
                if order.HasField("ping"):
                    # Waiting here is no delay of the network.
                    order.ping.sent_ns = time.time_ns()
                await self._call.write(order)
            await self._call.done_writing()

    async def _read(self) -> None:
        reason = "it has ended the capture on its side"
        try:
            # The end of the stream counts as false, a report never does.
            while report := await self._call.read():
                self._asked_at = None
                self._receive(report)
        except grpc.RpcError as error:
            reason = reason_of(error)
        self._lose(f"its daemon at {self.address} is lost: {reason}")

    def _receive(self, report: fleet_pb2.TakeReport) -> None:
        body = report.WhichOneof("body")
        if body == "ack" and report.ack.rank in self._ranks:
            ack = report.ack
            self._coordinator.on_ack(ack.ack.capture_id, ack.rank, unpack(ack.ack, Ack))
        elif body == "result" and report.result.rank in self._ranks:
            result = report.result
            self._coordinator.on_result(result.result.capture_id, result.rank, unpack(result.result, Result))
        elif body == "pong":
            pong = report.pong
            self.offset.add(Exchange(pong.sent_ns, pong.received_ns, pong.answered_ns, time.time_ns()))
            self.steps = {rank: made for rank, made in pong.steps.items() if rank in self._ranks}

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        for rank in self._ranks.values():
            self._coordinator.on_departure(rank, reason)


class RemoteRank:
    """A rank on another node: a ``Participant`` whose messages go through its daemon."""

    def __init__(self, relay: Relay, run: str, status: control_pb2.RankStatus) -> None:
        self.rank = status.identity.rank
        self._relay = relay
        self._run = run
        self._steps_before = status.steps
        self._facts = fleet_translate.facts_from_message(status)

    @property
    def steps_seen(self) -> int:
        """Training steps that its daemon has reported so far."""
        return max(self._steps_before, self._relay.steps.get(self.rank, 0))

    @property
    def facts(self) -> RankFacts:
        """Its process, and the offset of its node's clock."""
        return replace(self._facts, clock_offset_ns=self._relay.offset.ns or 0)

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Ask the rank to prepare; it writes into the directory of its own daemon."""
        if self._relay.lost:
            self._relay.refuse(capture_id, self.rank)
            return
        prepare = session_pb2.PrepareCapture(
            capture_id=capture_id, options=options.to_message(), max_bytes=max_bytes
        )
        self._relay.send(
            fleet_pb2.TakeOrder(prepare=fleet_pb2.TakePrepare(run=self._run, rank=self.rank, prepare=prepare))
        )

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Send the first step, and the number of steps."""
        commit = session_pb2.CommitCapture(capture_id=capture_id, start_step=start_step, steps=steps)
        self._relay.send(fleet_pb2.TakeOrder(commit=fleet_pb2.TakeCommit(rank=self.rank, commit=commit)))

    def cancel(self, capture_id: str, reason: str) -> None:
        """Ask it to cancel."""
        cancel = session_pb2.CancelCapture(capture_id=capture_id, reason=reason)
        self._relay.send(fleet_pb2.TakeOrder(cancel=fleet_pb2.TakeCancel(rank=self.rank, cancel=cancel)))


async def keep_pinging(relays: list[Relay]) -> None:
    """Ping all until cancelled, often at first so that their clocks are known soon, never many at once."""
    for count in itertools.count():
        seconds = _QUICK_S if count < _QUICK_ROUNDS else _SLOW_S
        for relay in relays:
            relay.ping()
            await asyncio.sleep(max(seconds / len(relays), _BETWEEN_PINGS_S))
