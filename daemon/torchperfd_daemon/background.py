"""The daemon's background workers: how they are run, and their health."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

_STOPPED_S: Final = 20.0
_AFTER_REPORTS_S: Final = 0.1


def until_next_round() -> float:
    """Return the seconds until periodic work is due: once a second, a moment after clients have reported.

    All such work of the event loop is due at once, so that it wakes up once, and finds in the CPU's caches
    what the work before has used. So it is on all nodes, whose ranks wait for each other.
    """
    return 1.0 - (time.time() - _AFTER_REPORTS_S) % 1.0


@dataclass(slots=True)
class WorkerHealth:
    """One background worker, a thread or a task; read by the metrics page.

    Attributes:
        failures: Rounds that it could not finish since the daemon started.
        last_success_unix_seconds: When it last finished one; 0 for never.
    """

    worker: str
    failures: int = 0
    last_success_unix_seconds: float = 0.0

    is_failing: bool = False
    rounds: int = 0
    """Rounds that have ended, finished or not."""
    period_seconds: float = 1.0
    """From one round to the next."""

    def succeeded(self, now: float) -> None:
        """Record that a round was finished at Unix time ``now``."""
        self.rounds += 1
        self.last_success_unix_seconds = now
        self.is_failing = False

    def failed(self) -> bool:
        """Count a failure; return whether it is the first in a row, so that it is logged once."""
        self.failures += 1
        self.rounds += 1
        first, self.is_failing = not self.is_failing, True
        return first


class StoppedWorkers:
    """Finds workers that make no rounds any more.

    Args:
        workers: Those that end a round in each period, whether it succeeds or not.
    """

    def __init__(self, *workers: WorkerHealth, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._rounds = [(-1, 0.0)] * len(workers)

    def names(self) -> list[str]:
        """Return the workers that have ended no round for long, as seen by the calls of this.

        That is three of their periods, and at least twenty seconds.
        """
        now = self._clock()
        self._rounds = [
            seen if seen[0] == each.rounds else (each.rounds, now)
            for each, seen in zip(self._workers, self._rounds, strict=True)
        ]
        return [
            each.worker
            for each, (_, since) in zip(self._workers, self._rounds, strict=True)
            if now - since > max(_STOPPED_S, 3 * each.period_seconds)
        ]


def run_in_background(
    stack: contextlib.AsyncExitStack, *workers: Coroutine[None, None, None], seconds: float = 1.0
) -> None:
    """Run coroutines as tasks; when the stack unwinds, cancel them and wait so many seconds for their end."""
    tasks = [asyncio.create_task(worker) for worker in workers]

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=seconds)

    stack.push_async_callback(stop)
