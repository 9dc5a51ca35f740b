"""The daemon's background workers: how they are run, and their health."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass


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

    def succeeded(self, now: float) -> None:
        """Record that a round was finished at Unix time ``now``."""
        self.last_success_unix_seconds = now
        self.is_failing = False

    def failed(self) -> bool:
        """Count a failure; return whether it is the first in a row, so that it is logged once."""
        self.failures += 1
        first, self.is_failing = not self.is_failing, True
        return first


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
