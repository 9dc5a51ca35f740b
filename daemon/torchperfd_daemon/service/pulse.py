"""The pulse desk: sees the steps of ranks that keep a pulse, and asks for a report where one has changed.

Beside steps of a millisecond a client reports every sixteen seconds only: each report makes a step late.
Whether such a rank goes on is read once a second from memory that it shares; nothing in it notices. A
rank that becomes slower or faster, stops, or trains again is asked to report at once, and a few times more:
what has changed is to be known within seconds, as it is of ranks with longer steps.
"""

import asyncio
import logging
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Protocol

from torchperfd.v1 import contract
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.collectors.procfs import open_memory_file
from torchperfd_daemon.collectors.ranks import RankProcess, own_namespace, stat_here
from torchperfd_daemon.service.process import process_of
from torchperfd_daemon.store import Rank, State

log = logging.getLogger("torchperfd.session")

LOOK_S: Final = 1.0

_LAYOUT: Final = "=qq"
_REMEMBERED: Final = 8
_LEAST_REMEMBERED: Final = 4
_CHANGED: Final = 1.2
_AT_ONCE: Final = 2
"""So many looks in a row are not as those before where the pace has changed; one is chance."""
_SHORT_STEPS_PER_S: Final = 50.0
_STALE_S: Final = 2.5
"""Whose newest report is younger reports once a second anyway."""
_REPORTS: Final = 4
_REST_S: Final = 16.0
"""From change to change that is asked about: where the pace is restless, reports stay few."""
_POLL_S: Final = 0.01
_POLLS: Final = 25
"""An answer takes milliseconds; who looks is not to wait for a rank that does not answer."""


class Felt(Protocol):
    """A connected rank that may be asked to report."""

    @property
    def record(self) -> Rank:
        """What is kept of it."""

    def tell_steps(self) -> None:
        """Ask it to report now."""


class Pulse:
    """A process's count of its steps, open to be read."""

    def __init__(self, file: int) -> None:
        self._file = file
        # A session may end while its pulse is being looked for.
        self.close = weakref.finalize(self, os.close, file)
        """Close it; more than once is no error."""

    @classmethod
    def open(cls, process: RankProcess, proc: Path = Path("/proc")) -> "Pulse | None":
        """Find a process's pulse; None where there is none, or it is not for us to see."""
        try:
            if stat_here(proc, process, own_namespace(proc)) is None:
                return None
            file = open_memory_file(proc / str(process.pid), contract.PULSE_FILE, os.O_RDONLY)
        except OSError:
            return None
        return cls(file) if file is not None else None

    def read(self) -> tuple[int, float]:
        """Return how many steps have ended, and when the newest did, in seconds of its monotonic clock.

        Raises:
            ValueError: It is no pulse.
        """
        try:
            count, at_ns = struct.unpack(_LAYOUT, os.pread(self._file, struct.calcsize(_LAYOUT), 0))
        except (OSError, struct.error) as error:
            raise ValueError(f"a pulse cannot be read: {error}") from error
        return count, at_ns / 1e9


@dataclass(slots=True)
class _Followed:
    """A pulse, and what it was at the newest looks.

    Attributes:
        count: Steps at the newest look.
        looked_at: When that was.
        paces: Steps per second between looks.
        told: The account that came last.
        told_count: Steps when it was asked for, or had come.
        heard_at: When it was first seen to be there.
        reports: So many are still to be asked for.
        asked_at: When the newest change was asked about.
    """

    pulse: Pulse
    count: int
    looked_at: float
    told: object
    told_count: int
    heard_at: float
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    reports: int = 0
    asked_at: float = float("-inf")

    def look(self, rank: Rank, now: float, wall: float) -> int:
        """Take note of the steps since the last look; return how many there were.

        Raises:
            ValueError: They cannot be read.
        """
        count, at = self.pulse.read()
        made, seconds = max(0, count - self.count), now - self.looked_at
        if made:
            # In a time namespace of its own its clock says something else.
            at = min(now, max(at, self.looked_at))
            rank.beats, rank.beat_at = count, at
            rank.last_step_unix_seconds = wall - (now - at)
        if rank.totals is not self.told:
            self.told, self.told_count, self.heard_at = rank.totals, count, now
        # While nobody would be asked, what the pace was before is remembered.
        if seconds > 0 and (now - self.asked_at >= _REST_S or len(self.paces) < _REMEMBERED):
            self.paces.append(made / seconds)
        self.count, self.looked_at = count, now
        return made

    def is_stale(self, rank: Rank, now: float) -> bool:
        """Return whether it has not reported for some time, and has made steps in it."""
        return rank.totals is self.told and self.count != self.told_count and now - self.heard_at > _STALE_S

    def may_be_asked(self, rank: Rank, now: float) -> bool:
        """Return whether it reports seldom, and has not been asked about a change a moment ago."""
        return self.is_stale(rank, now) and now - self.asked_at >= _REST_S

    def begin_to_ask(self, now: float) -> None:
        """Have it asked at this look and the next ones; what comes now is its pace from here on."""
        self.asked_at, self.reports = now, _REPORTS
        while len(self.paces) > _AT_ONCE:
            self.paces.popleft()


class PulseDesk:
    """Follows the pulses of the connected ranks.

    Args:
        find: Finds the pulse of a process.
        clock: Monotonic seconds.
        wall: Unix seconds.
    """

    def __init__(
        self,
        find: Callable[[RankProcess], Pulse | None] = Pulse.open,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._find = find
        self._clock = clock
        self._wall = wall
        self._followed: dict[Felt, _Followed] = {}
        self.health = WorkerHealth("pulse")

    def find(self, rank: Rank) -> Pulse | None:
        """Return a rank's pulse, None where it has none; looks through its descriptors, however many."""
        return self._find(process_of(rank))

    def admit(self, felt: Felt, pulse: Pulse) -> bool:
        """Follow a rank's pulse from now on; return whether it can be read."""
        identity = felt.record.identity
        now = self._clock()
        try:
            count, _ = pulse.read()
        except ValueError as error:
            log.debug("rank %d of run %s: %s", identity.rank, identity.run, error)
            pulse.close()
            return False
        self._followed[felt] = _Followed(pulse, count, now, felt.record.totals, count, now)
        return True

    def dismiss(self, felt: Felt) -> None:
        """Follow a rank no longer."""
        followed = self._followed.pop(felt, None)
        if followed is not None:
            followed.pulse.close()

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
                self.health.succeeded(self._wall())
            except Exception:
                # The ranks still report their steps, only later.
                if self.health.failed():
                    log.exception("pulses cannot be looked at")

    def look(self) -> None:
        """Look at all pulses once, and ask whom there is to ask."""
        now, wall = self._clock(), self._wall()
        changed = set()
        for felt, followed in self._followed.items():
            rank = felt.record
            try:
                made = followed.look(rank, now, wall)
            except ValueError:
                continue
            resumed = made > 0 and rank.state is not State.TRAINING
            if followed.may_be_asked(rank, now) and (resumed or _has_changed(followed.paces)):
                changed.add(rank.identity.run)
        for felt, followed in self._followed.items():
            # Ranks of a run are judged together.
            if felt.record.identity.run in changed and followed.may_be_asked(felt.record, now):
                followed.begin_to_ask(now)
            if followed.reports:
                followed.reports -= 1
                felt.tell_steps()

    async def freshen(self, ranks: Collection[Rank] | None = None) -> None:
        """Have ranks, or all of them, report that have not for some time: somebody looks at what they do."""
        now = self._clock()
        asked = []
        for felt, followed in self._followed.items():
            if followed.is_stale(felt.record, now) and (ranks is None or felt.record in ranks):
                # Who does not answer is not waited for again before it goes on.
                followed.told_count = followed.count
                asked.append((felt, followed.told))
                felt.tell_steps()
        for _ in range(_POLLS):
            if all(felt.record.totals is not told for felt, told in asked):
                return
            await asyncio.sleep(_POLL_S)


def _has_changed(paces: deque[float]) -> bool:
    """Return whether the newest looks saw another pace than those before them; only of short steps."""
    if len(paces) < _LEAST_REMEMBERED + _AT_ONCE:
        return False
    *before, first, second = paces
    usual = median(before)
    if max(usual, first, second) < _SHORT_STEPS_PER_S:
        return False
    return max(first, second) * _CHANGED < usual or min(first, second) > usual * _CHANGED
