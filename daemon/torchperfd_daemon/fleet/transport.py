"""The fleet's connections: one request to all peers at once, and the authenticated port that serves peers.

Channels to peers are kept open. Peers that do not answer are in the result by name, with the reason, so that
a missing node is never overlooked. Calls without the fleet's secret are refused, counted and logged.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc

from torchperfd.model.formatting import one_line
from torchperfd.v1 import fleet_pb2_grpc
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.credentials import Current, check_listening, server_credentials
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.interceptors import CallCounter
from torchperfd_daemon.text import LogLimiter

Answer = TypeVar("Answer")

MAX_ANSWER_BYTES: Final = 4 * 2**20
# More concurrent requests finish no sooner: they wait for this process's CPU time while their deadlines run.
_MAX_AT_ONCE: Final = 64
_MAX_REASON_CHARACTERS: Final = 200
_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
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
        await self._forget(set(self._channels))

    def _stub(self, address: Address) -> "fleet_pb2_grpc.FleetAsyncStub":
        channel = self._channels.get(address)
        if channel is None:
            secure = self._current().channel()
            name = address.certified_name
            certified = (("grpc.ssl_target_name_override", name),) if name else ()
            options = (*_CHANNEL_OPTIONS, *certified)
            channel = (
                grpc.aio.insecure_channel(str(address), options=options)
                if secure is None
                else grpc.aio.secure_channel(str(address), secure, options=options)
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


log = logging.getLogger("torchperfd.fleet")


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Admits calls that carry the fleet's secret, for all methods."""

    def __init__(self, current: Current) -> None:
        self.current = current
        self._limiter = LogLimiter(log)
        self.refused_calls = 0
        """Since the start."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the method's handler, or one that refuses the call."""
        if self.current().admits(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        self.refused_calls += 1
        method = handler_call_details.method

        async def refuse(_requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            self._limiter.warning("refused %s from %s: no valid token", method, context.peer())
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the fleet's token is missing or another one; give all daemons the same --fleet-token-file",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)


_MAX_REQUEST_BYTES: Final = 256 * 1024
_MAX_CALLS: Final = 256
_SERVER_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", _MAX_CALLS),
    # Else a second daemon binds the same port without an error, and each gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
)


async def listen(
    address: Address, interceptor: AuthInterceptor, service: fleet_pb2_grpc.FleetServicer, calls: CallCounts
) -> tuple[grpc.aio.Server, Address]:
    """Serve the fleet; return the server and its address, with the port that was chosen for port 0.

    Args:
        interceptor: Decides which calls are admitted, and by which credentials connections are secured.
        calls: Where admitted calls are counted. Refused ones could name any method, and are counted apart.

    Raises:
        UsageError: Other nodes can reach the address, and there are no credentials.
        TorchperfdError: The address cannot be bound.
    """
    check_listening(address, interceptor.current())
    server = grpc.aio.server(
        interceptors=[interceptor, CallCounter(calls)],
        options=_SERVER_OPTIONS,
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    fleet_pb2_grpc.add_FleetServicer_to_server(service, server)
    secure = server_credentials(interceptor.current)
    try:
        port = (
            server.add_insecure_port(str(address))
            if secure is None
            else server.add_secure_port(str(address), secure)
        )
        await server.start()
    except RuntimeError as error:
        raise TorchperfdError(
            f"cannot listen for the fleet on {address}", "choose another address with --fleet-address"
        ) from error
    return server, Address(address.host, port)
