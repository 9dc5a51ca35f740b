"""uvicorn behind a door of our own: few connections at a time, and none that dawdles.

uvicorn alone would refuse everybody once enough idle connections are open, wait for ever for a
request that never ends, and hold a handshake that nobody finishes for a minute.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchperfd_daemon.web_config import WebConfigFile

MOST_CONNECTIONS: Final = 64
"""Open at once. A node has a handful of scrapers; the one that has waited longest makes room."""

PATIENCE_S: Final = 10.0
"""From the connection, or the first byte of a request, until the answer has been taken away."""

_KEEP_ALIVE_S: Final = 75
_TICK_S: Final = 1.0
_LONGEST_HEAD_BYTES: Final = 16 * 1024
_OUT_OF_FILES_PAUSE_S: Final = 0.1
_GOODBYE_S: Final = 2


class Visitor(Protocol):
    """A connection, from the moment it is accepted."""

    def is_waiting(self) -> bool:
        """Tell whether it has had all it asked for."""

    def hang_up(self) -> None:
        """End it at once."""


class Door:
    """Knows who is in, since when they keep us waiting, and who has to leave.

    Args:
        most: How many may be in.
        clock: Monotonic seconds.
    """

    def __init__(self, most: int = MOST_CONNECTIONS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._deadlines: dict[Visitor, float | None] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def busy(self, visitor: Visitor) -> None:
        """Let a visitor in, or note that it has begun to ask; the one longest quiet makes room."""
        if visitor not in self._deadlines and len(self._deadlines) >= self._most:
            oldest = next(iter(self._deadlines))
            self.leave(oldest)
            oldest.hang_up()
        # Popped first, so that the order is that of the newest events.
        self._deadlines.pop(visitor, None)
        self._deadlines[visitor] = self._clock() + PATIENCE_S

    def is_busy(self, visitor: Visitor) -> bool:
        """Tell whether a visitor is in and has a deadline."""
        return self._deadlines.get(visitor) is not None

    def idle(self, visitor: Visitor) -> None:
        """Note that a visitor has been served and may stay, if it is still in."""
        if visitor in self._deadlines:
            del self._deadlines[visitor]
            self._deadlines[visitor] = None

    def leave(self, visitor: Visitor) -> None:
        """Note that a visitor is gone."""
        self._deadlines.pop(visitor, None)

    def sweep(self) -> None:
        """Hang up on all who are past their deadline."""
        now = self._clock()
        for visitor, deadline in list(self._deadlines.items()):
            if deadline is None or now < deadline:
                continue
            if visitor.is_waiting():
                self.idle(visitor)
            else:
                self.leave(visitor)
                visitor.hang_up()

    def close(self) -> None:
        """Hang up on all."""
        for visitor in list(self._deadlines):
            self.leave(visitor)
            visitor.hang_up()


class WebServer(uvicorn.Server):
    """Serves an ASGI application on sockets that listen already.

    Without uvicorn's own signal handlers: the daemon has one set for all its parts. And without
    waking up ten times a second: on an idle node that would cost more than all else it does.

    Args:
        app: The application.
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
                # What strangers send is no news; uvicorn would warn of each.
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GOODBYE_S,
                h11_max_incomplete_event_size=_LONGEST_HEAD_BYTES,
            )
        )
        self._web_config = web_config
        self._door = Door()
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
        """Do what is due every second, until it is time to leave."""
        leaving = asyncio.create_task(self._leaving.wait())
        # Of uvicorn's ticks, every tenth does something; 0 is one of those.
        while not await self.on_tick(0):
            self._door.sweep()
            await asyncio.wait((leaving,), timeout=_TICK_S)

    def leave(self) -> None:
        """Stop serving."""
        self.should_exit = True
        self._leaving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let answers that are on their way go out, and hang up on the rest."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)
        self._door.close()

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
            connection = _Connection(self, self._door)
            connection.open(accepted, tls)


class _Connection(H11Protocol):
    """uvicorn's HTTP over one connection; tells the door when it is waiting for the other end."""

    def __init__(self, server: WebServer, door: Door) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._door = door
        self._opening: asyncio.Task[Any] | None = None

    def open(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take over a socket; with TLS, once the other end has finished its handshake."""
        self._door.busy(self)
        self._opening = asyncio.create_task(self._open(accepted, tls))
        # Also of one that is cancelled before it has begun.
        self._opening.add_done_callback(lambda _: self._opened(accepted))

    async def _open(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        # What goes wrong in a stranger's handshake is the stranger's business. It must not stay with
        # the task either: its frames lead back to us, and so a quarter of a megabyte of TLS buffers
        # would wait for the garbage collector.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=PATIENCE_S if tls else None,
                ssl_shutdown_timeout=_GOODBYE_S if tls else None,
            )

    def _opened(self, accepted: socket.socket) -> None:
        self._opening = None
        if self.transport is None:
            accepted.close()
            self._door.leave(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a request start its time."""
        if not self._door.is_busy(self):
            self._door.busy(self)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Go on to the next request, or wait for it."""
        super().on_response_complete()
        if self.is_waiting():
            self._door.idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave."""
        self._door.leave(self)
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """Tell whether the other end has taken all that it asked for."""
        if self.transport is None or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self.cycle is not None and self.cycle.response_complete

    def hang_up(self) -> None:
        """End the connection at once, or its handshake."""
        if self.transport is not None:
            self.transport.abort()
        elif self._opening is not None:
            self._opening.cancel()
