"""The life of the daemon's process: systemd's readiness protocol and watchdog, and when the daemon ends.

It runs until a signal or, when embedded, until its owner and all ranks have left.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

log = logging.getLogger("torchperfd.server")


def notify_systemd(state: str) -> bool:
    """Send a state such as ``READY=1``; return whether a service manager received it.

    See sd_notify(3): a leading ``@`` names an abstract socket.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:
        return False
    return True


def watchdog_seconds() -> float | None:
    """Return systemd's watchdog timeout for this process; None when there is none.

    See sd_watchdog_enabled(3).
    """
    microseconds, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0 or process not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6


async def keep_watchdog_quiet(stopped: Callable[[], Sequence[str]] = tuple) -> None:
    """Notify systemd's watchdog twice per timeout; return at once if there is none.

    Args:
        stopped: Returns the workers that have stopped; while there are any, the watchdog is not notified, so
            that systemd restarts the service.
    """
    period = watchdog_seconds()
    while period is not None:
        if names := stopped():
            log.error("%s has stopped: systemd's watchdog is not notified", " and ".join(names))
        else:
            notify_systemd("WATCHDOG=1")
        await asyncio.sleep(period / 2)


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
