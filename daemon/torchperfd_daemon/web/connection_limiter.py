"""A limit on open connections, and a deadline for each request."""

import time
from collections.abc import Callable
from typing import Final, Protocol

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
        """Close every connection."""
        for connection in list(self._deadlines):
            self.remove(connection)
            connection.abort()
