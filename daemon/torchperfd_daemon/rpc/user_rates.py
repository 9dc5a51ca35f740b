"""The rates at which the daemon serves each user, so that one user cannot keep it from another.

A user beyond a rate is slowed, and no other one: the daemon does not read that user's connection or stream
until the debt is paid, and the client's own flow control holds it back.
"""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.log_limiter import LogLimiter

log = logging.getLogger("torchperfd.access")

_MAX_KEPT: Final = 1024
"""Users whose buckets are kept before the full ones are dropped."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How much of something one user may have.

    Attributes:
        per_second: In the long run.
        burst: At once, after a pause.
    """

    per_second: float
    burst: float


BYTES: Final = Rate(16 * 2**20, 32 * 2**20)
"""Over all connections; 512 ranks of ten steps a second send 5 MB a second."""
MESSAGES: Final = Rate(4_000, 8_000)
"""In sessions, those in a bundle as well; 512 ranks send 1,500 a second, and 3,000 while a page is open."""
STEPS: Final = Rate(40_000, 100_000)
"""In sessions; the diagnosis examines each one. 512 ranks of ten steps a second have 5,000 a second."""
SESSIONS: Final = Rate(64, 256)
"""That begin; after a restart of the daemon all ranks of a node come at once."""
COMMANDS: Final = Rate(64, 256)
"""Requests of commands; `torchperfd top` sends three a second."""


class UserRate:
    """The tokens that each user has left of one rate.

    Args:
        noun: What the rate counts, in the log.
    """

    def __init__(self, noun: str, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._noun = noun
        self._rate = rate
        self._clock = clock
        self._full_at: dict[int | None, float] = {}
        self._limiter = LogLimiter(log, clock)

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, uid: int | None, amount: float) -> float:
        """Take tokens of a user, also those that are yet to come.

        Returns:
            The seconds until the debt is paid; 0 without one.
        """
        now = self._clock()
        if len(self._full_at) > _MAX_KEPT:
            self._full_at = {user: full_at for user, full_at in self._full_at.items() if full_at > now}
        full_at = max(self._full_at.get(uid, now), now) + amount / self._rate.per_second
        self._full_at[uid] = full_at
        debt = max(0.0, full_at - now - self._rate.burst / self._rate.per_second)
        if debt > 0:
            self._limiter.warning(
                "user %s is slowed: more than %s %s per second",
                "unknown" if uid is None else uid,
                f"{self._rate.per_second:,.0f}",
                self._noun,
            )
        return debt


class FairTurns:
    """Has users take turns at work on the event loop, one piece of work per round of the loop.

    Requests that arrive meanwhile are served between two pieces. A user's pieces wait for each other, so
    that another user waits for at most one of them.
    """

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        # Held by the pieces of work that wait for it.
        self._of_user: weakref.WeakValueDictionary[int | None, asyncio.Lock] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, uid: int | None) -> AsyncIterator[None]:
        """Wait for the user's turn, and have it during the block."""
        own = self._of_user.setdefault(uid, asyncio.Lock())
        async with own, self._all:
            yield


class IngestRates:
    """Slows the sessions of a user who sends more than the daemon can take in beside other users."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions = UserRate("new sessions", SESSIONS, clock)
        self._messages = UserRate("messages", MESSAGES, clock)
        self._steps = UserRate("steps", STEPS, clock)
        self._turns = FairTurns()

    async def begin(self, uid: int | None) -> None:
        """Wait until a user may begin one more session."""
        await asyncio.sleep(self._sessions.take(uid, 1))

    @contextlib.asynccontextmanager
    async def turn(self, uid: int | None, messages: int, steps: int) -> AsyncIterator[None]:
        """Wait until messages of a user may be taken in, and for that user's turn to do so."""
        debt = max(self._messages.take(uid, messages), self._steps.take(uid, steps))
        if debt > 0:
            await asyncio.sleep(debt)
        async with self._turns.turn(uid):
            yield
