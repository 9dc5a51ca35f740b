"""The proxy at the daemon's socket: it identifies the connecting process, which gRPC does not.

gRPC for Python does not expose the process at the other end of a unix socket. So gRPC
listens on a private socket, and each connection to the public one is passed on to it, by a socket
bound to a unique name. gRPC reports that name as the peer of each call, which identifies the caller.
A connection that begins with the greeting of a handover of captures goes to another handler instead.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final

from torchperfd.v1 import contract
from torchperfd_daemon.rpc.callers import BYTES, UNKNOWN, Caller, CallerDirectory, UserRate, read_caller
from torchperfd_daemon.text import LogLimiter

OnHandover = Callable[[socket.socket, Caller], None]
"""Takes over a connection that hands files of captures over, and its socket."""

log = logging.getLogger("torchperfd.access")

_CHUNK: Final = 1 << 16
MAX_UNFINISHED_BYTES: Final = 256 * 2**20
"""Bytes of messages of one user that have not arrived whole: gRPC holds them in memory."""
_OVERHEAD: Final = 1.01
_OVERHEAD_BYTES: Final = 1024
"""What gRPC adds to a message, with its answers and pings."""
_SILENCE_S: Final = 10.0
"""A new connection that sends nothing for so long is closed."""


class PeerProxy:
    """Passes connections on to gRPC, and registers the caller of each.

    Args:
        listener: The public socket, bound.
        private: Path of the socket that gRPC listens on.
        on_handover: Serves connections that hand files of captures over; None if there are none.
    """

    def __init__(
        self,
        listener: socket.socket,
        private: str,
        callers: CallerDirectory,
        on_handover: OnHandover | None = None,
    ) -> None:
        self._listener = listener
        self.private = private
        self.callers = callers
        self.on_handover = on_handover
        self._server: asyncio.Server | None = None
        self.open: set[_Connection] = set()
        self.by_name: dict[str, _Connection] = {}
        self.chunk = bytearray(_CHUNK)
        self.limiter = LogLimiter(log)
        self.rate = UserRate("bytes", BYTES)
        self._unfinished: Counter[int | None] = Counter()
        callers.on_received = self._on_received

    async def start(self) -> None:
        """Begin to accept."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._make, sock=self._listener, backlog=1024)

    def stop_accepting(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Close all connections."""
        self.stop_accepting()
        for connection in list(self.open):
            connection.abort()

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of messages of all users that have not arrived whole."""
        return self._unfinished.total()

    def add_unfinished(self, connection: "_Connection", size: int) -> None:
        """Count bytes that a connection has passed on; close its user's largest if they are too many."""
        uid = connection.caller.uid
        connection.unfinished += size
        self._unfinished[uid] += size
        if self._unfinished[uid] > MAX_UNFINISHED_BYTES:
            largest = max(
                (each for each in self.open if each.caller.uid == uid), key=lambda each: each.unfinished
            )
            self.limiter.warning("a connection of %s is closed: its messages never end", connection.caller)
            self.remove_unfinished(largest, largest.unfinished)
            largest.abort()

    def remove_unfinished(self, connection: "_Connection", size: int) -> None:
        """Count bytes of a connection that are in a whole message, or that the end of it has freed."""
        size = min(size, connection.unfinished)
        connection.unfinished -= size
        self._unfinished[connection.caller.uid] -= size
        if not self._unfinished[connection.caller.uid]:
            del self._unfinished[connection.caller.uid]

    def _on_received(self, name: str, size: int) -> None:
        connection = self.by_name.get(name)
        if connection is not None:
            self.remove_unfinished(connection, int(size * _OVERHEAD) + _OVERHEAD_BYTES)

    def _make(self) -> asyncio.BaseProtocol:
        return _Connection(self)


class _End(asyncio.BufferedProtocol):
    """One end of a connection: hands what it receives to the other end, as fast as that takes it."""

    def __init__(self, chunk: bytearray) -> None:
        # Shared: it is emptied before anything else is received.
        self._chunk = chunk
        self._pauses = 0
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._chunk

    def buffer_updated(self, nbytes: int) -> None:
        other = self.other
        if other is not None and other.transport is not None:
            other.transport.write(bytes(memoryview(self._chunk)[:nbytes]))

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume_reading()

    def pause_reading(self) -> None:
        """Receive no more until as many calls to resume."""
        self._pauses += 1
        if self._pauses == 1 and self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again once each pause has ended."""
        self._pauses -= 1
        if self._pauses == 0 and self.transport is not None:
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            # Pending data is sent first.
            self.other.transport.close()


class _Inner(_End):
    """The end at gRPC."""

    def __init__(self, chunk: bytearray, outer: "_Connection", first: bytes) -> None:
        super().__init__(chunk)
        self.other = outer
        self._first = first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._first)


class _Connection(_End):
    """The end at a client; its other end is connected once the client has sent something."""

    def __init__(self, proxy: PeerProxy) -> None:
        super().__init__(proxy.chunk)
        self._proxy = proxy
        self.caller = UNKNOWN
        self.unfinished = 0
        self._name = secrets.token_hex(16)
        self._silence: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._proxy.open.add(self)
        self._proxy.by_name[peer_name(self._name)] = self
        try:
            self.caller = caller = read_caller(transport.get_extra_info("socket"))
        except OSError as error:
            self._refuse(f"the kernel does not identify the connecting process: {error.strerror}")
            return
        refused = self._proxy.callers.admit(peer_name(self._name), caller)
        if refused:
            self._refuse(f"a connection of {caller} is refused: {refused}")
            return
        self._silence = asyncio.get_running_loop().call_later(_SILENCE_S, self.abort)

    def buffer_updated(self, nbytes: int) -> None:
        if self._connecting is None and self.transport is not None:
            # Most probes of the socket send nothing, so that gRPC never sees them.
            first = bytes(memoryview(self._chunk)[:nbytes])
            self.pause_reading()
            if self._silence is not None:
                self._silence.cancel()
            if self._proxy.on_handover is not None and first == contract.HANDOVER_GREETING:
                self._divert(self._proxy.on_handover)
                return
            self._connecting = asyncio.get_running_loop().create_task(self._connect(first))
            return
        super().buffer_updated(nbytes)
        self._proxy.add_unfinished(self, nbytes)
        debt = self._proxy.rate.take(self.caller.uid, nbytes)
        if debt > 0:
            self.pause_reading()
            asyncio.get_running_loop().call_later(debt, self.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._proxy.open.discard(self)
        self._proxy.by_name.pop(peer_name(self._name), None)
        self._proxy.remove_unfinished(self, self.unfinished)
        self._proxy.callers.dismiss(peer_name(self._name))
        if self._silence is not None:
            self._silence.cancel()
        if self._connecting is not None:
            self._connecting.cancel()

    def abort(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()

    def _divert(self, on_handover: OnHandover) -> None:
        """Give the connection to the handler of handovers: asyncio would drop the descriptors that come."""
        assert self.transport is not None
        # A second descriptor of the connection, since asyncio closes its own.
        connection: socket.socket = self.transport.get_extra_info("socket").dup()
        self.abort()
        on_handover(connection, self.caller)

    async def _connect(self, first: bytes) -> None:
        """Connect to gRPC from a unique name, and forward the data."""
        loop = asyncio.get_running_loop()
        inner = socket.socket(socket.AF_UNIX)
        try:
            inner.setblocking(False)
            inner.bind(f"\0{self._name}")
            await loop.sock_connect(inner, self._proxy.private)
            _, self.other = await loop.create_unix_connection(
                lambda: _Inner(self._chunk, self, first), sock=inner
            )
        except OSError as error:
            inner.close()
            self._proxy.limiter.warning("a connection cannot be passed on: %s", error.strerror or error)
            self.abort()
            return
        except asyncio.CancelledError:
            inner.close()
            raise
        if self.transport is None:
            assert self.other.transport is not None
            self.other.transport.abort()
        else:
            self.resume_reading()

    def _refuse(self, why: str) -> None:
        self._proxy.limiter.warning("%s", why)
        self.abort()


def peer_name(name: str) -> str:
    """Return what gRPC calls the peer that is bound to an abstract name."""
    return f"unix-abstract:{name}"
