"""Errors that the driver reports by number (XID), through NVML's events."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from torchperfd_daemon.collectors.nvml_call import GpuLostError, ask

_XID: Final = pynvml.nvmlEventTypeXidCriticalError
# The documentation does not define a wait of zero, and for some event sets it never returns.
_WAIT_MS: Final = 1
# A GPU that reports errors continuously must not block the sampling of other GPUs.
_MAX_EVENTS: Final = 256


@dataclass(slots=True)
class XidCount:
    """One error number: how often, and when last in Unix seconds."""

    errors: int = 0
    last_unix_seconds: float = 0.0


class XidLog:
    """The errors of all GPUs since the daemon started.

    One event set for all GPUs: each wait puts the sampler to sleep and wakes it again, and one wait per GPU
    and second was a third of the collector's cost. Once the set reports a lost GPU, each GPU has a set of
    its own, so that events of the others still arrive.

    Args:
        wall: Unix seconds.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._handles: dict[str, Any] = {}
        self._counts: dict[str, dict[int, XidCount]] = {}
        self._shared: Any = None
        self._split = False
        self._own: dict[str, Any] = {}
        self._uuids: dict[int | None, str] = {}

    def follow(self, handle: Any, uuid: str) -> None:
        """Subscribe to a GPU's errors; a GPU without error events has none.

        Raises:
            GpuLostError: The GPU does not answer.
            DriverGoneError: The driver does not.
        """
        if not (ask("nvmlDeviceGetSupportedEventTypes", handle) or 0) & _XID:
            return
        self._handles[uuid] = handle
        if self._split:
            return
        if self._shared is None:
            self._shared = ask("nvmlEventSetCreate")
        if self._shared is not None:
            ask("nvmlDeviceRegisterEvents", handle, _XID, self._shared)

    def of(self, uuid: str) -> Mapping[int, XidCount]:
        """Return a GPU's errors, by number."""
        return self._counts.get(uuid, {})

    def update(self) -> None:
        """Count what has come in since the last time.

        Raises:
            DriverGoneError: The driver does not answer.
        """
        if self._shared is not None:
            try:
                self._drain(self._shared)
            except GpuLostError:
                ask("nvmlEventSetFree", self._shared)
                self._shared = None
                self._split = True
        if self._split:
            for uuid, handle in self._handles.items():
                with contextlib.suppress(GpuLostError):
                    self._drain(self._own.get(uuid) or self._listen(handle, uuid))

    def _listen(self, handle: Any, uuid: str) -> Any:
        """Return an event set for one GPU; None where that is not supported."""
        events = ask("nvmlEventSetCreate")
        if events is None:
            return None
        try:
            ask("nvmlDeviceRegisterEvents", handle, _XID, events)
        except GpuLostError:
            ask("nvmlEventSetFree", events)
            raise
        self._own[uuid] = events
        return events

    def _drain(self, events: Any) -> None:
        if events is None:
            return
        for _ in range(_MAX_EVENTS):
            event = ask("nvmlEventSetWait", events, _WAIT_MS)
            if event is None:
                return
            if event.eventType & _XID:
                counts = self._counts.setdefault(self._uuid(event.device), {})
                count = counts.setdefault(event.eventData, XidCount())
                count.errors += 1
                count.last_unix_seconds = self._wall()

    def _uuid(self, handle: Any) -> str:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        if address not in self._uuids:
            known = {ctypes.cast(own, ctypes.c_void_p).value: uuid for uuid, own in self._handles.items()}
            self._uuids[address] = known.get(address) or ask("nvmlDeviceGetUUID", handle) or ""
        return self._uuids[address]
