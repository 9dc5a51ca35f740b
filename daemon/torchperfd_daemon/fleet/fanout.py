"""The fan-out: one request to all peers at once, over channels that are kept open.

Peers that do not answer are in the result by name, with the reason, so that a missing node is never
overlooked.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc

from torchperfd.v1 import fleet_pb2_grpc
from torchperfd_daemon.fleet.address import Address
from torchperfd_daemon.fleet.credentials import Current
from torchperfd_daemon.text import one_line

Answer = TypeVar("Answer")

MAX_RECEIVED_BYTES: Final = 4 * 2**20
# More concurrent requests finish no sooner: they wait for this process's CPU time while their deadlines run.
_MAX_AT_ONCE: Final = 64
_MAX_REASON_CHARACTERS: Final = 200
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    # A peer that is back is asked within a second; gRPC's own backoff reaches two minutes.
    ("grpc.min_reconnect_backoff_ms", 1500),  # it is also the timeout of a connection
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.http2.bdp_probe", 0),
)
_REASONS: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "its torchperfd is too old for this request",
}


class PeerError(Exception):
    """A peer has sent an unusable answer; the text is the reason in a few words."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A peer that has not answered, and why, in a few words."""

    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Answers(Generic[Answer]):
    """The peers' answers, in the order asked; each peer is in exactly one of the two."""

    by_peer: dict[Address, Answer]
    unreachable: tuple[Unreachable, ...]


class FanOut:
    """Sends a request to all peers at once."""

    def __init__(self, current: Current, most_at_once: int = _MAX_AT_ONCE) -> None:
        self._current = current
        self._tls = current().tls
        self._most_at_once = most_at_once
        self._channels: dict[Address, grpc.aio.Channel] = {}
        self._held: Counter[Address] = Counter()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call."""
        return self._current().metadata()

    async def ask(
        self,
        peers: Iterable[Address],
        question: Callable[[Address, "fleet_pb2_grpc.FleetAsyncStub"], Awaitable[Answer]],
        seconds: float,
    ) -> Answers[Answer]:
        """Send a request to all peers.

        Args:
            peers: The peers; channels to others are closed unless they are held.
            question: Makes the call, with :attr:`metadata`; it may raise PeerError.
            seconds: How long each peer may take, from the moment its request starts.
        """
        addresses = list(peers)
        wanted = set(addresses)
        if self._tls != (newest := self._current().tls):
            # Channels keep the certificates that they were made with.
            self._tls, wanted = newest, set()
        await self._forget(self._channels.keys() - wanted - self._held.keys())
        slots = asyncio.Semaphore(self._most_at_once)

        async def one(address: Address) -> Answer | Unreachable:
            async with slots:
                try:
                    return await asyncio.wait_for(question(address, self._stub(address)), seconds)
                except TimeoutError:
                    return Unreachable(address, _REASONS[grpc.StatusCode.DEADLINE_EXCEEDED])
                except grpc.RpcError as error:
                    return Unreachable(address, reason_of(error))
                except PeerError as error:
                    return Unreachable(address, str(error))

        answers = await asyncio.gather(*map(one, addresses))
        return Answers(
            {
                address: answer
                for address, answer in zip(addresses, answers, strict=True)
                if not isinstance(answer, Unreachable)
            },
            tuple(answer for answer in answers if isinstance(answer, Unreachable)),
        )

    @contextlib.contextmanager
    def holding(self, addresses: Iterable[Address]) -> Iterator[None]:
        """Keep the channels to these peers open during the block, even if the list of peers changes."""
        held = Counter([*addresses])  # a mapping would be taken for counts
        self._held += held
        try:
            yield
        finally:
            self._held -= held

    async def close(self) -> None:
        """Close all channels."""
        await self._forget(set(self._channels))

    def _stub(self, address: Address) -> "fleet_pb2_grpc.FleetAsyncStub":
        channel = self._channels.get(address)
        if channel is None:
            secure = self._current().channel()
            channel = (
                grpc.aio.insecure_channel(str(address), options=_OPTIONS)
                if secure is None
                else grpc.aio.secure_channel(str(address), secure, options=_OPTIONS)
            )
            self._channels[address] = channel
        return fleet_pb2_grpc.FleetStub(channel)  # type: ignore[return-value] # the same class serves both

    async def _forget(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            await self._channels.pop(address).close(None)


def reason_of(error: grpc.RpcError) -> str:
    """Return why a call failed, in one line that ends up on terminals."""
    code = error.code()
    if code in _REASONS:
        return _REASONS[code]
    details = error.details() or code.name.lower()
    if code is grpc.StatusCode.UNAVAILABLE and "Connection refused" in details:
        return "connection refused"
    return one_line(details, _MAX_REASON_CHARACTERS)


def unreachable_text(unreachable: Sequence[Unreachable]) -> str:
    """Return all names with their reasons, as part of a sentence."""
    return ", ".join(f"{peer.address} ({peer.reason})" for peer in unreachable)
