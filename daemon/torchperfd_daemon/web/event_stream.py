"""One client's stream of server-sent events: a bounded queue that drops its oldest events."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from torchperfd_daemon.web.access import Access

MAX_WAITING: Final = 256
HEARTBEAT_S: Final = 5.0
_MAX_BYTES: Final = 4 << 20
_RETRY: Final = b"retry: 2000\n\n"
_HEARTBEAT: Final = b": still here\n\n"


def event(name: str, data: object) -> bytes:
    """Return an event as it goes out."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


class EventStream:
    """What waits to be sent to one client.

    Args:
        run: The only run that it follows; empty for all runs, without their steps.
        ranks: The ranks whose steps it follows; None for all.
    """

    def __init__(self, run: str, ranks: frozenset[int] | None, access: Access) -> None:
        self.run = run
        self.ranks = ranks
        self.access = access
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._woken = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """The size of the events that wait."""
        return self._bytes

    def push(self, data: bytes) -> None:
        """Add an event; the oldest ones make room for it."""
        self._waiting.append(data)
        self._bytes += len(data)
        while len(self._waiting) > MAX_WAITING or (self._bytes > _MAX_BYTES and len(self._waiting) > 1):
            self._bytes -= len(self._waiting.popleft())
            self._dropped += 1
        self._woken.set()

    def close(self, last: bytes = b"") -> None:
        """End the stream after what waits, and a last event."""
        if last:
            self.push(last)
        self._closed = True
        self._woken.set()

    async def chunks(self, extend: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
        """Yield what is to be sent, until the stream is closed.

        Args:
            extend: Called when the client has taken what was sent.
        """
        yield _RETRY
        while True:
            extend()
            if not self._waiting:
                if self._closed:
                    return
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), HEARTBEAT_S)
                if not self._waiting and not self._closed:
                    yield _HEARTBEAT
                continue
            parts = [*self._waiting]
            self._waiting.clear()
            self._bytes = 0
            if self._dropped:
                parts.insert(0, event("dropped", {"events": self._dropped}))
                self._dropped = 0
            yield b"".join(parts)
