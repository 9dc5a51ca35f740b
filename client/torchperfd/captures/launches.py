"""Counts what a trace has of a device: launches of kernels by the host, and the kernels."""

from typing import Final

from torchperfd.device.cuda_memory import read_cuda_memory
from torchperfd.safety.logs import log
from torchperfd.v1.contract import MIN_KERNELS_PER_LAUNCH

_LAUNCHES: Final = (b'"name": "cudaLaunchKernel', b'"name": "cuLaunchKernel', b'"name": "hipLaunchKernel')
_KERNEL: Final = b'"cat": "kernel"'


class LaunchCounter:
    """Reads a Chrome trace as Kineto writes it, in pieces; each field of an event is within one line.

    Attributes:
        launches: Launches of one kernel each. One that launches a CUDA graph is none of these.
        kernels: Kernels, those of CUDA graphs included.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.kernels = 0
        self._rest = b""

    def add(self, piece: bytes) -> None:
        """Count the lines of the next piece; the last one may continue in the piece after it."""
        lines, newline, rest = piece.rpartition(b"\n")
        if not newline:
            self._rest += piece
            return
        self._count(self._rest + lines)
        self._rest = rest

    def end(self) -> None:
        """Count what follows the last line's end."""
        self._count(self._rest)
        self._rest = b""

    def _count(self, lines: bytes) -> None:
        self.launches += sum(map(lines.count, _LAUNCHES))
        self.kernels += lines.count(_KERNEL)


def warn_of_missing(capture_id: str, launches: int, kernels: int) -> None:
    """Write a warning to the log if a trace lacks kernels."""
    memory = read_cuda_memory()
    text = warning(launches, kernels, holds_device_memory=memory is not None and memory.allocated > 0)
    if text:
        log.warning("capture %s: %s", capture_id, text)


def warning(launches: int, kernels: int, *, holds_device_memory: bool = False) -> str:
    """Return that kernels are missing, and why that may be, as one line; '' if they are all there.

    Args:
        holds_device_memory: Whether the process has tensors on a device, which it then works with.
    """
    if holds_device_memory and not launches and not kernels:
        return (
            "the trace has nothing of the device, though the process has tensors there: did another profiler"
            " use CUPTI before, in this process or beside it? Capture again"
        )
    if kernels >= MIN_KERNELS_PER_LAUNCH * launches:
        return ""
    return (
        f"the trace has {launches:,} launches and only {kernels:,} kernels: does another profiler (nsys, ncu,"
        " DCGM) use CUPTI, or was a CUDA graph captured meanwhile?"
    )
