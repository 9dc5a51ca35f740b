"""CUDA memory, as the caching allocator counts it; the device is not asked."""

import sys
from typing import Any

from torchperfd.steps.totals import CudaMemory


def read_cuda_memory() -> CudaMemory | None:
    """Return what this process has on all of its devices together, in bytes.

    A rank usually has one device, and only the training thread knows which. Nothing is
    synchronised, imported or initialised for it. The peak is the allocator's own, since the start
    or since the script last reset it; of several devices, the sum of their peaks.

    Returns:
        None while the script has not initialised CUDA, and where the allocator does not count.
    """
    torch: Any = sys.modules.get("torch")
    cuda: Any = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    allocated = reserved = peak = most = main = 0
    try:
        for device in range(cuda.device_count()):
            # The flat form of the same sorts a hundred names, each time.
            stats = cuda.memory_stats_as_nested_dict(device)
            allocated += stats["allocated_bytes"]["all"]["current"]
            peak += stats["allocated_bytes"]["all"]["peak"]
            held = stats["reserved_bytes"]["all"]["current"]
            reserved += held
            if held > most:
                most, main = held, device
    except (KeyError, RuntimeError):
        return None
    return CudaMemory(
        allocated=allocated, reserved=reserved, peak=peak, device_uuid=_uuid(cuda, main) if most else ""
    )


def _uuid(cuda: Any, device: int) -> str:
    """Return the device's UUID, which torch reads once; empty where torch is too old for that."""
    uuid = str(getattr(cuda.get_device_properties(device), "uuid", ""))
    return uuid.removeprefix("GPU-").removeprefix("MIG-")
