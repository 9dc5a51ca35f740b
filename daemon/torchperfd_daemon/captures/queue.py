"""The queue: captures of one run take turns, in the order they were asked for."""

import asyncio
from collections import deque
from typing import Final

from torchperfd_daemon.errors import TorchperfdError

_LONGEST: Final = 16


class BusyError(TorchperfdError):
    """A capture of this run is in progress."""


class Place:
    """A place in the queue of a run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._moved = asyncio.Event()

    @property
    def first(self) -> bool:
        """Whether it need not wait, or no longer."""
        return self._moved.is_set()

    async def wait(self) -> None:
        """Wait until it is this one's turn, or it was given up."""
        await self._moved.wait()

    def move(self) -> None:
        """Wake up whoever waits."""
        self._moved.set()


class RunQueue:
    """Whose turn it is, run by run."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Place]] = {}

    def enter(self, run: str, *, wait: bool) -> Place:
        """Return a place at the end of a run's queue; to be left in any case.

        Raises:
            BusyError: Somebody is there, and the caller would not wait.
            TorchperfdError: Too many wait already.
        """
        line = self._lines.get(run, ())
        if line and not wait:
            raise BusyError(
                f"a capture of run {run} is in progress", "wait until it has ended, or ask with --queue"
            )
        if len(line) > _LONGEST:
            raise TorchperfdError(
                f"{_LONGEST} captures of run {run} are queued already",
                "cancel some with `torchperfd captures cancel ID`",
            )
        place = Place(run)
        line = self._lines.setdefault(run, deque())
        line.append(place)
        line[0].move()
        return place

    def leave(self, place: Place) -> None:
        """Let the next one have its turn, if it was this one's."""
        line = self._lines[place.run]
        line.remove(place)
        if line:
            line[0].move()
        else:
            del self._lines[place.run]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
