"""How long the daemon runs: until a signal or, when embedded, until its owner and all ranks have left."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Final

_RANKS_CHECK_S: Final = 1.0
LAST_QUESTION_S: Final = 0.8
"""How long an embedded daemon waits for the question of the node on which the job's first rank ends.

Less than the second by which an exit may be delayed: the process that started the daemon waits for its end.
"""


class Lifetime:
    """Waits for the end of the daemon.

    Args:
        embedded: End once standard input is closed and no rank is connected.
    """

    def __init__(self, *, embedded: bool) -> None:
        self._embedded = embedded
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._was_asked = asyncio.Event()

    def stop(self) -> None:
        """End now."""
        self._stop.set()

    def ranks_changed(self) -> None:
        """Check again whether any rank is connected."""
        self._changed.set()

    def was_asked(self) -> None:
        """Note that a peer has asked for the end of a run."""
        self._was_asked.set()

    async def wait(
        self, ranks: Callable[[], int], awaits_question: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when the daemon should end.

        Args:
            ranks: Returns how many ranks are connected.
            awaits_question: Returns whether a peer may still ask about a run that has ended here.
        """
        if not self._embedded:
            await self._stop.wait()
            return
        owner = asyncio.create_task(_owner_gone())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((owner, stop), return_when=asyncio.FIRST_COMPLETED)
            # Other ranks of the run may still be here; the owner was only the first to finish.
            while not self._stop.is_set() and ranks():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _RANKS_CHECK_S)
            if not self._stop.is_set() and awaits_question():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._was_asked.wait(), LAST_QUESTION_S)
        finally:
            owner.cancel()
            stop.cancel()


async def _owner_gone() -> None:
    """Return once standard input is closed: the process that started us holds its other end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()
