"""Calls into NVML, with its errors translated."""

import logging
from typing import Any, Final

import pynvml

log = logging.getLogger("torchperfd.collectors")

_LOST: Final = (
    pynvml.NVMLError_GpuIsLost,
    pynvml.NVMLError_ResetRequired,
)
_GONE: Final = (
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
    if call is None:
        return None
    try:
        return call(*arguments)
    except _LOST as error:
        raise GpuLostError(str(error)) from error
    except _GONE as error:
        raise DriverGoneError(str(error)) from error
    except pynvml.NVMLError as error:
        log.debug("%s: %s", function, error)
        return None
