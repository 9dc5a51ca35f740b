"""The processes that connect to the daemon's socket: who they are by the kernel, and what each user may have.

A user beyond a rate is slowed, and no other one: the daemon does not read that user's connection or stream
until the debt is paid, and the client's own flow control holds it back.
"""

import asyncio
import functools
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.collectors.process import has_users, own_namespace
from torchperfd_daemon.collectors.procfs import parse_stat, read
from torchperfd_daemon.text import LogLimiter

log = logging.getLogger("torchperfd.access")

_CREDENTIALS: Final = "=iII"
_PEER_GROUPS: Final = 59  # SO_PEERGROUPS
_MAX_GROUP_BYTES: Final = 1024  # that Python asks the kernel for
_EVERY_ID: Final = "4294967295"


@dataclass(frozen=True, slots=True)
class Caller:
    """A process that has connected.

    Attributes:
        uid: Its user; None when it has none in this daemon's user namespace.
        pid: Its process id in this daemon's pid namespace; 0 when it has none there.
        start_ticks: When that process started, in clock ticks since boot; 0 when not known.
        groups: All of its groups.
        gid: Its first group; None when it is not known.
    """

    uid: int | None = None
    pid: int = 0
    start_ticks: int = 0
    groups: frozenset[int] = frozenset()
    gid: int | None = None

    def __str__(self) -> str:
        return f"uid {'unknown' if self.uid is None else self.uid} (pid {self.pid})"


UNKNOWN: Final = Caller()
"""A caller that the kernel does not identify."""


class UserLimit:
    """Counts open connections or sessions per user, and limits them.

    Args:
        most_per_user: Of one user.
        most: Of all users.
    """

    def __init__(self, noun: str, most_per_user: int, most: int) -> None:
        self._noun = noun
        self._most_per_user = most_per_user
        self._most = most
        self._open: Counter[int | None] = Counter()

    def admit(self, uid: int | None) -> str:
        """Count one more of a user; return why it is refused, empty when it is not."""
        if self._open[uid] >= self._most_per_user:
            return f"this user has {self._most_per_user} {self._noun}, the most that one user may have"
        if self._open.total() >= self._most:
            return f"there are {self._most} {self._noun}, the most that all users may have"
        self._open[uid] += 1
        return ""

    def dismiss(self, uid: int | None) -> None:
        """Count one less of a user."""
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]


class CallerDirectory:
    """The caller at each connection, and the number of connections of each user.

    Args:
        most_per_user: Connections of one user at the same time.
        most: Of all users.
    """

    def __init__(self, most_per_user: int, most: int) -> None:
        self._limit = UserLimit("connections", most_per_user, most)
        self._callers: dict[str, Caller] = {}
        self.on_received: Callable[[str, int], None] = lambda _name, _size: None
        """Takes the name of a connection, and the bytes of a message that it has received whole."""

    def received(self, call: Any, size: int) -> None:
        """Note that a message of a call has arrived whole."""
        self.on_received(str(call.peer()), size)

    def find(self, call: Any) -> Caller:
        """Return the caller of a method."""
        return self._callers.get(str(call.peer()), UNKNOWN)

    def admit(self, name: str, caller: Caller) -> str:
        """Register a connection; return why it is refused, empty when it is not.

        Args:
            name: Its name in ``peer()`` of gRPC's contexts.
            caller: At its other end.
        """
        refused = self._limit.admit(caller.uid)
        if not refused:
            self._callers[name] = caller
        return refused

    def dismiss(self, name: str) -> None:
        """Forget a connection that was admitted."""
        caller = self._callers.pop(name, None)
        if caller is not None:
            self._limit.dismiss(caller.uid)


def read_caller(connection: socket.socket, proc: Path = Path("/proc")) -> Caller:
    """Return the process that has connected to a unix socket.

    Raises:
        OSError: The kernel does not identify it.
    """
    size = struct.calcsize(_CREDENTIALS)
    pid, uid, gid = struct.unpack(
        _CREDENTIALS, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    try:
        blob = connection.getsockopt(socket.SOL_SOCKET, _PEER_GROUPS, _MAX_GROUP_BYTES)
    except OSError:
        # In too many groups, or an old kernel: then only its first group is known.
        blob = b""
    groups = struct.unpack(f"={len(blob) // 4}I", blob)
    return Caller(
        uid=None if uid == _overflow_uid(proc) else uid,
        pid=pid,
        start_ticks=_start_ticks(proc, pid) if pid > 0 else 0,
        groups=frozenset((gid, *groups)),
        gid=gid,
    )


def has_ended(caller: Caller, proc: Path = Path("/proc")) -> bool:
    """Return whether a caller's process has certainly ended; its children may keep its connection open."""
    if not caller.pid or not caller.start_ticks:
        return False
    try:
        text = read(f"{proc}/{caller.pid}/stat")
        return (
            parse_stat(text).start_ticks != caller.start_ticks or text.rpartition(")")[2].split()[0] in "ZX"
        )
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError):
        return False


def is_process(
    caller: Caller, pid: int, pid_namespace: int, start_ticks: int, proc: Path = Path("/proc")
) -> bool:
    """Return whether the kernel's information is consistent with a caller's claim about its process.

    In another pid namespace than the daemon's a process has another id, which is not compared. A process that
    has changed users since it connected is not the caller.

    Args:
        pid: As it claims, like the two below.
    """
    try:
        if caller.pid and not has_users(proc, caller.pid, caller.uid, caller.gid):
            return False
        if pid_namespace not in (0, own_namespace(proc)):
            return True
    except OSError:
        return False
    return pid == caller.pid and (0 in (start_ticks, caller.start_ticks) or start_ticks == caller.start_ticks)


def _start_ticks(proc: Path, pid: int) -> int:
    try:
        return parse_stat(read(f"{proc}/{pid}/stat")).start_ticks
    except (OSError, ValueError):
        return 0


@functools.cache
def _overflow_uid(proc: Path) -> int:
    """Return the overflow id of users without one in this user namespace; -1 where all have one."""
    try:
        if read(f"{proc}/self/uid_map").split() == ["0", "0", _EVERY_ID]:
            return -1
        return int(read(f"{proc}/sys/kernel/overflowuid"))
    except (OSError, ValueError):
        return -1


def own_uid() -> int:
    """Return the user that this daemon runs as."""
    return os.geteuid()


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


class IngestRates:
    """Slows the sessions of a user who sends more than the daemon can take in beside other users."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions = UserRate("new sessions", SESSIONS, clock)
        self._messages = UserRate("messages", MESSAGES, clock)
        self._steps = UserRate("steps", STEPS, clock)

    async def begin(self, uid: int | None) -> None:
        """Wait until a user may begin one more session."""
        await asyncio.sleep(self._sessions.take(uid, 1))

    def take(self, uid: int | None, messages: int, steps: int) -> float:
        """Count messages of a user, with their steps; return the seconds until they may be taken in."""
        return max(self._messages.take(uid, messages), self._steps.take(uid, steps))
