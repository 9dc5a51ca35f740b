"""The queue: captures of one run happen one after another, in the order of their requests."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from torchperfd_daemon.errors import TorchperfdError

_LONGEST: Final = 16


class BusyError(TorchperfdError):
    """A capture of this run is in progress."""


@dataclass(eq=False, slots=True)
class QueueEntry:
    """A capture's entry in the queue of a run.

    Attributes:
        automatic: The run makes it by itself.
        woken: Set once it is the first, or was cancelled.
    """

    run: str
    automatic: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class RunQueue:
    """One queue per run."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[QueueEntry]] = {}

    def enter(self, run: str, *, wait: bool, automatic: bool = False) -> QueueEntry:
        """Return an entry at the end of a run's queue; pass it to :meth:`leave` in any case.

        Args:
            wait: Wait for any capture. Only for one that the run makes by itself does every other one wait.

        Raises:
            BusyError: The queue is not empty, and the caller would not wait.
            TorchperfdError: Too many wait already.
        """
        line = self._lines.get(run, ())
        if line and not wait and (automatic or not all(each.automatic for each in line)):
            raise BusyError(
                f"a capture of run {run} is in progress", "wait until it has ended, or ask with --queue"
            )
        if len(line) > _LONGEST:
            raise TorchperfdError(
                f"{_LONGEST} captures of run {run} are queued already",
                "cancel some with `torchperfd captures cancel ID`",
            )
        entry = QueueEntry(run, automatic)
        line = self._lines.setdefault(run, deque())
        line.append(entry)
        line[0].woken.set()
        return entry

    def is_busy(self, run: str) -> bool:
        """Return whether a run has an entry."""
        return bool(self._lines.get(run))

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry; if it was the first, wake the next."""
        line = self._lines[entry.run]
        line.remove(entry)
        if line:
            line[0].woken.set()
        else:
            del self._lines[entry.run]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
