"""Errors that the driver reports by number (XID), through NVML's events."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from torchperfd_daemon.collectors.nvml_call import ask

# Documentation does not say what a wait of zero does, and for some event sets it is forever.
_WAIT_MS: Final = 1
# A GPU in a storm of errors must not keep the sampler from its other GPUs.
_MAX_EVENTS: Final = 256


@dataclass(slots=True)
class XidCount:
    """One error number: how often, and when last in Unix seconds."""

    errors: int = 0
    last_unix_seconds: float = 0.0


class XidLog:
    """The errors of one GPU since the daemon started.

    An event set of its own, so that a lost GPU does not silence the others.

    Args:
        handle: The GPU.
        wall: Unix seconds.
    """

    def __init__(self, handle: Any, wall: Callable[[], float]) -> None:
        self._wall = wall
        self.counts: dict[int, XidCount] = {}
        self._events: Any = None
        kinds = ask("nvmlDeviceGetSupportedEventTypes", handle) or 0
        if kinds & pynvml.nvmlEventTypeXidCriticalError:
            events = ask("nvmlEventSetCreate")
            if events is not None:
                self._events = events
                ask("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)

    def update(self) -> None:
        """Count what has come in since the last time.

        Raises:
            GpuLostError: The GPU does not answer.
            DriverGoneError: The driver does not.
        """
        if self._events is None:
            return
        for _ in range(_MAX_EVENTS):
            event = ask("nvmlEventSetWait", self._events, _WAIT_MS)
            if event is None:
                return
            if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                count = self.counts.setdefault(event.eventData, XidCount())
                count.errors += 1
                count.last_unix_seconds = self._wall()
