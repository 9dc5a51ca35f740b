"""The HTTP server: uvicorn with a limit on connections and a deadline for slow clients.

uvicorn alone refuses new clients once enough idle connections are open, waits without limit for the end of a
request, and keeps an unfinished TLS handshake open for a minute.
"""

import asyncio
import contextlib
import socket
import ssl
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchperfd_daemon.background import until_next_round
from torchperfd_daemon.web.config_file import WebConfigFile

MAX_CONNECTIONS: Final = 64
"""Open at once. A node has a handful of scrapers; a new connection replaces the one idle longest."""

REQUEST_TIMEOUT_S: Final = 10.0
"""From the connection, or the first byte of a request, until the client has received the response."""


class Connection(Protocol):
    """A client's connection, from the moment it is accepted."""

    def is_idle(self) -> bool:
        """Return whether the client has received every response that it asked for."""

    def abort(self) -> None:
        """Close the connection at once."""


class ConnectionLimiter:
    """Limits how many connections are open, and how long each may take for a request."""

    def __init__(self, most: int = MAX_CONNECTIONS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._deadlines: dict[Connection, float | None] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def start_request(self, connection: Connection) -> None:
        """Set a connection's deadline; a new one replaces the connection idle longest when none is free."""
        if connection not in self._deadlines and len(self._deadlines) >= self._most:
            oldest = next(iter(self._deadlines))
            self.remove(oldest)
            oldest.abort()
        # Popped first, so that the order is that of the newest events.
        self._deadlines.pop(connection, None)
        self._deadlines[connection] = self._clock() + REQUEST_TIMEOUT_S

    def extend(self, connection: Connection) -> None:
        """Give a connection the time of another request: it takes a long answer, and reads it."""
        if self.has_deadline(connection):
            del self._deadlines[connection]
            self._deadlines[connection] = self._clock() + REQUEST_TIMEOUT_S

    def has_deadline(self, connection: Connection) -> bool:
        """Return whether a connection is open and must finish a request in time."""
        return self._deadlines.get(connection) is not None

    def end_request(self, connection: Connection) -> None:
        """Drop the deadline of a connection that is still open."""
        if connection in self._deadlines:
            del self._deadlines[connection]
            self._deadlines[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self._deadlines.pop(connection, None)

    def abort_slow(self) -> None:
        """Close every connection that is past its deadline."""
        now = self._clock()
        for connection, deadline in list(self._deadlines.items()):
            if deadline is None or now < deadline:
                continue
            if connection.is_idle():
                self.end_request(connection)
            else:
                self.remove(connection)
                connection.abort()

    def close(self) -> None:
        for connection in list(self._deadlines):
            self.remove(connection)
            connection.abort()


_KEEP_ALIVE_S: Final = 75
_MAX_HEAD_BYTES: Final = 16 * 1024
_OUT_OF_FILES_PAUSE_S: Final = 0.1
_CLOSE_TIMEOUT_S: Final = 2


class WebServer(uvicorn.Server):
    """Serves an ASGI application on sockets that listen already.

    uvicorn's own signal handlers stay off, since the daemon has one set for all its parts. Its timer runs
    once a second instead of ten times, which would cost more CPU than the rest of an idle daemon.

    Args:
        web_config: Whose TLS to use, as it is at the time of each connection; plain HTTP when None.
    """

    def __init__(self, app: Any, web_config: WebConfigFile | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=H11Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                # uvicorn would log a warning for each malformed request of any client.
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            )
        )
        self._web_config = web_config
        self._limiter = ConnectionLimiter()
        self._accepting: list[asyncio.Task[None]] = []
        self._leaving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await self.lifespan.startup()
        self.servers = []
        for listener in sockets or []:
            listener.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.started = True

    async def main_loop(self) -> None:
        """Run uvicorn's timer and close slow clients every second until ``leave`` is called."""
        leaving = asyncio.create_task(self._leaving.wait())
        # Of uvicorn's ticks, every tenth does something; 0 is one of those.
        while not await self.on_tick(0):
            self._limiter.abort_slow()
            await asyncio.wait((leaving,), timeout=until_next_round())

    def leave(self) -> None:
        """Stop serving."""
        self.should_exit = True
        self._leaving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, finish responses in progress for a moment, and close what is left."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)
        self._limiter.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
                # asyncio does so only where the listener named its protocol. Without, the second half
                # of each answer waits 40 ms for the other end to acknowledge the first.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                # Out of files, or the other end has gone already.
                await asyncio.sleep(_OUT_OF_FILES_PAUSE_S)
                continue
            tls = self._web_config.current().tls if self._web_config is not None else None
            # Without a name, which would keep it until the next client comes.
            _HttpConnection(self, self._limiter).open(accepted, tls)
            # Connections beyond the limit replace older ones one by one, which give up their buffers then.
            await asyncio.sleep(0)


class _HttpConnection(H11Protocol):
    """uvicorn's HTTP over one connection; reports the start and end of each request to the limiter."""

    def __init__(self, server: WebServer, limiter: ConnectionLimiter) -> None:
        # The application calls it while it sends an answer that takes longer than a request may. A strong
        # reference would keep a closed connection until the garbage collector comes.
        this = weakref.ref(self)

        def extend() -> None:
            connection = this()
            if connection is not None:
                limiter.extend(connection)

        state = {**server.lifespan.state, "extend": extend}
        super().__init__(server.config, server.server_state, state)
        self._limiter = limiter
        self._opening: asyncio.Task[Any] | None = None

    def open(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve an accepted socket; with TLS, once the client has finished its handshake."""
        self._limiter.start_request(self)
        self._opening = asyncio.create_task(self._open(accepted, tls))
        # Also of one that is cancelled before it has begun.
        self._opening.add_done_callback(lambda _: self._opened(accepted))

    async def _open(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=REQUEST_TIMEOUT_S if tls else None,
                ssl_shutdown_timeout=_CLOSE_TIMEOUT_S if tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:
            # A client's failed handshake is not an error of ours. asyncio's frames refer to the exception
            # and to 256 KiB of TLS buffers, which would wait for the garbage collector.
            traceback.clear_frames(error.__traceback__)

    def _opened(self, accepted: socket.socket) -> None:
        self._opening = None
        if self.transport is None:
            accepted.close()
            self._limiter.remove(self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; the first of a request set its deadline."""
        if not self._limiter.has_deadline(self):
            self._limiter.start_request(self)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait for one."""
        super().on_response_complete()
        if self.is_idle():
            self._limiter.end_request(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the connection's place and its memory."""
        self._limiter.remove(self)
        # Whatever the reason: only a connection without an error has uvicorn's keep-alive timer cancelled and
        # its transport closed. Otherwise, and while the newest request refers to this object, 256 KiB of TLS
        # buffers would wait for the timer or the garbage collector.
        super().connection_lost(None)
        self.cycle = None  # type: ignore[assignment]  # as uvicorn itself has it before the first request

    def is_idle(self) -> bool:
        """Return whether the client has received every response that it asked for."""
        if self.transport is None or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self.cycle is not None and self.cycle.response_complete

    def abort(self) -> None:
        """Close the connection at once, or cancel its handshake."""
        if self.transport is not None:
            self.transport.abort()
        elif self._opening is not None:
            self._opening.cancel()
