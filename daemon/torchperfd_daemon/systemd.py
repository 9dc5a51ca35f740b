"""systemd's readiness protocol: one datagram to the socket that the environment names."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence

log = logging.getLogger("torchperfd.server")


def notify(state: str) -> bool:
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
            notify("WATCHDOG=1")
        await asyncio.sleep(period / 2)
