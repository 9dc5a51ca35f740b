"""Distinguishes a driver that cannot be used from a node without one, and names the fix."""

from pathlib import Path
from typing import Final, NamedTuple

import pynvml

_KERNEL_MODULE: Final = "driver/nvidia/version"
"""Below procfs, while the driver's kernel module is loaded; also seen from within containers."""
_RELOAD: Final = (
    "`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia` once no process uses"
    " the GPUs, or reboot; restart containers afterwards"
)
_UNKNOWN: Final = (
    "in a container, restart it: after `systemctl daemon-reload` on the host it may not open the devices any"
    " more (name them with `--device`, or let the NVIDIA toolkit use CDI); on the host, look at"
    " `sudo dmesg | grep -i -e nvrm -e xid`, then reload the driver or reboot"
)
_LOAD: Final = (
    "`sudo modprobe nvidia`; if that fails, `dkms status` shows whether the module was built for this kernel"
)
_LOOK: Final = "`nvidia-smi` and `sudo dmesg | grep -i -e nvrm -e xid` show more"


class DriverProblem(NamedTuple):
    """A driver that is installed and cannot be used.

    Attributes:
        problem: What is wrong, with NVML's own text and number.
        fix: What to do.
    """

    problem: str
    fix: str


def is_loaded(proc: Path) -> bool:
    """Return whether the driver's kernel module is loaded."""
    return (proc / _KERNEL_MODULE).exists()


def driver_problem(error: pynvml.NVMLError, proc: Path) -> DriverProblem | None:
    """Return what an error of NVML's start says about the driver; None if there is none on this node.

    Args:
        proc: Root of procfs.
    """
    words = f"{error}, NVML error {error.value}"
    match error:
        case pynvml.NVMLError_LibraryNotFound():
            if not is_loaded(proc):
                return None
            return DriverProblem(
                f"the NVIDIA driver is loaded, but NVML cannot be used ({words})",
                "install the library of the same version as the driver (libnvidia-ml.so.1); in a container,"
                " start it with the NVIDIA runtime",
            )
        case pynvml.NVMLError_DriverNotLoaded():
            return DriverProblem(
                f"the NVIDIA driver is installed, and its module is not loaded ({words})", _LOAD
            )
        case pynvml.NVMLError_LibRmVersionMismatch():
            return DriverProblem(
                f"the NVIDIA driver cannot be used: it was updated, and the old module is loaded ({words})",
                _RELOAD,
            )
        case pynvml.NVMLError_Unknown():
            return DriverProblem(f"the NVIDIA driver cannot be used ({words})", _UNKNOWN)
    return DriverProblem(f"the NVIDIA driver cannot be used ({words})", _LOOK)
