"""NVML's errors: calls with errors translated, unusable drivers, and the errors of GPUs (XID)."""

import contextlib
import ctypes
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pynvml

log = logging.getLogger("torchperfd.collectors")

_LOST_ERRORS: Final = (
    pynvml.NVMLError_GpuIsLost,
    pynvml.NVMLError_ResetRequired,
)
_GONE_ERRORS: Final = (
    pynvml.NVMLError_Uninitialized,
    pynvml.NVMLError_DriverNotLoaded,
    pynvml.NVMLError_LibRmVersionMismatch,
)


class GpuLostError(Exception):
    """The GPU does not answer any more."""


class DriverGoneError(Exception):
    """The driver was unloaded or replaced; the library has to be initialised anew."""


def ask(function: str, *arguments: Any) -> Any:
    """Call a function of the binding by name.

    Returns:
        Its result; None where this GPU, driver, binding or the daemon's permissions do not provide it.

    Raises:
        GpuLostError: The GPU has fallen off the bus, or needs a reset.
        DriverGoneError: No call can succeed before the library is initialised again.
    """
    # By name, since old releases of the binding lack functions just as old drivers lack symbols.
    call = getattr(pynvml, function, None)
    return None if call is None else attempt(call, *arguments)


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call that may raise errors of NVML; return and raise what :func:`ask` does."""
    try:
        return call(*arguments)
    except _LOST_ERRORS as error:
        raise GpuLostError(str(error)) from error
    except _GONE_ERRORS as error:
        raise DriverGoneError(str(error)) from error
    except pynvml.NVMLError as error:
        log.debug("%s: %s", call.__name__, error)
        return None


_KERNEL_MODULE: Final = "driver/nvidia/version"
"""Below procfs, while the driver's kernel module is loaded; also seen from within containers."""
_RELOAD_FIX: Final = (
    "`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia` once no process uses"
    " the GPUs, or reboot; restart containers afterwards"
)
_UNKNOWN_FIX: Final = (
    "in a container, restart it: after `systemctl daemon-reload` on the host it may not open the devices any"
    " more (name them with `--device`, or let the NVIDIA toolkit use CDI); on the host, look at"
    " `sudo dmesg | grep -i -e nvrm -e xid`, then reload the driver or reboot"
)
_LOAD_FIX: Final = (
    "`sudo modprobe nvidia`; if that fails, `dkms status` shows whether the module was built for this kernel"
)
_LOOK_FIX: Final = "`nvidia-smi` and `sudo dmesg | grep -i -e nvrm -e xid` show more"


class DriverProblem(NamedTuple):
    """A driver that is installed and cannot be used.

    Attributes:
        problem: What is wrong, with NVML's own text and number.
        fix: What to do.
    """

    problem: str
    fix: str


def is_driver_loaded(proc: Path) -> bool:
    return (proc / _KERNEL_MODULE).exists()


def driver_problem(error: pynvml.NVMLError, proc: Path) -> DriverProblem | None:
    """Return what an error of NVML's start says about the driver; None if there is none on this node.

    Args:
        proc: Root of procfs.
    """
    words = f"{error}, NVML error {error.value}"
    match error:
        case pynvml.NVMLError_LibraryNotFound():
            if not is_driver_loaded(proc):
                return None
            return DriverProblem(
                f"the NVIDIA driver is loaded, but NVML cannot be used ({words})",
                "install the library of the same version as the driver (libnvidia-ml.so.1); in a container,"
                " start it with the NVIDIA runtime",
            )
        case pynvml.NVMLError_DriverNotLoaded():
            return DriverProblem(
                f"the NVIDIA driver is installed, and its module is not loaded ({words})", _LOAD_FIX
            )
        case pynvml.NVMLError_LibRmVersionMismatch():
            return DriverProblem(
                f"the NVIDIA driver cannot be used: it was updated, and the old module is loaded ({words})",
                _RELOAD_FIX,
            )
        case pynvml.NVMLError_Unknown():
            return DriverProblem(f"the NVIDIA driver cannot be used ({words})", _UNKNOWN_FIX)
    return DriverProblem(f"the NVIDIA driver cannot be used ({words})", _LOOK_FIX)


_XID_EVENT: Final = pynvml.nvmlEventTypeXidCriticalError
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
        if not (ask("nvmlDeviceGetSupportedEventTypes", handle) or 0) & _XID_EVENT:
            return
        self._handles[uuid] = handle
        if self._split:
            return
        if self._shared is None:
            self._shared = ask("nvmlEventSetCreate")
        if self._shared is not None:
            ask("nvmlDeviceRegisterEvents", handle, _XID_EVENT, self._shared)

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
            ask("nvmlDeviceRegisterEvents", handle, _XID_EVENT, events)
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
            if event.eventType & _XID_EVENT:
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
