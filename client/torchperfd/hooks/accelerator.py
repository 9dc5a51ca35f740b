"""The accelerator: device times, memory and FLOPs, if the process uses a device.

Memory is read from the caching allocator and peak rates from a table; the device itself is not asked.
"""

import ctypes
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from torchperfd.hooks.context import describe
from torchperfd.hooks.cuda import CurrentStream, recorder_of_events
from torchperfd.hooks.patches import keep_classes_out_of_graphs
from torchperfd.model.process import HookState
from torchperfd.model.totals import CudaMemory
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults, log
from torchperfd.steps.device_times import DeviceTime
from torchperfd.steps.replay import Replay

if TYPE_CHECKING:
    from torchperfd.hooks.device_clock import DeviceTimes
    from torchperfd.hooks.flops import StepFlops


def read_cuda_memory() -> CudaMemory | None:
    """Return what this process has on all of its devices together, in bytes.

    A rank usually has one device, and only the training thread knows which. Nothing is
    synchronised, imported or initialised for it. The peak is the allocator's own, since the start
    or since the script last reset it; of several devices, the sum of their peaks.

    Returns:
        None while the script has not initialised CUDA, and where the allocator does not count.
    """
    cuda = _initialized_cuda()
    if cuda is None:
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
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_bytes=peak,
        device_uuid=_uuid(cuda, main) if most else "",
    )


def _initialized_cuda() -> Any:
    """Return ``torch.cuda`` once the script has initialised it, else None."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return cuda if is_initialized is not None and is_initialized() else None


def _uuid(cuda: Any, device: int) -> str:
    """Return the device's UUID, which torch reads once; empty where torch is too old for that."""
    uuid = str(getattr(cuda.get_device_properties(device), "uuid", ""))
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def cuda_device_times() -> "DeviceTimes | None":
    """Return device times by CUDA events; None where the script does not use CUDA, or not yet.

    Never initialises CUDA. On ROCm, where a query fails graph captures whatever one does about
    it, there are none.
    """
    torch: Any = sys.modules.get("torch")
    cuda = _initialized_cuda()
    if cuda is None or torch.version.cuda is None:
        return None
    from torchperfd.hooks.device_clock import DeviceTimes, apart_from_captures

    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        log.debug("no device times without CUDA's driver: %s", error)
        return None
    return DeviceTimes(
        lambda: cuda.Event(enable_timing=True),
        recorder_of_events(torch),
        cuda.is_current_stream_capturing,
        lambda event: apart_from_captures(exchange, cuda.device(event.device)),
    )


# Words that a device's name must contain, the more demanding first, and its peaks in TFLOP/s.
_PEAKS: Final[tuple[tuple[str, dict[str, float]], ...]] = (
    ("a100", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    ("h100 pcie", {"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756}),
    ("h100 nvl", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    ("h100", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("h200 nvl", {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}),
    ("h200", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("b200", {"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250}),
    ("l4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121}),
    ("l40s", {"fp32": 91.6, "tf32": 183, "bf16": 362.05, "fp16": 362.05}),
    ("a10g", {"fp32": 35, "tf32": 35, "bf16": 70, "fp16": 70}),
    ("v100 pcie", {"fp32": 14, "fp16": 112}),
    ("v100", {"fp32": 15.7, "fp16": 125}),
    ("t4", {"fp32": 8.1, "fp16": 65}),
    ("4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    ("3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
    ("mi250x", {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5}),
    ("mi300x", {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4}),
)
# A part of a device, or a smaller one of the same number.
_LESSER_DEVICES: Final = frozenset(("mig", "grid", "laptop", "mobile", "d", "ti", "max"))


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the floating-point operations that a device can do in a second, without sparsity.

    From the makers' data sheets and architecture papers (NVIDIA A100, H100, H200, HGX B200, L4, L40S,
    A10G, V100, T4, Ada and GA102; AMD CDNA 2 and 3): of matrix units, accumulating in ``fp32``, where
    a device has them for the precision, else of vector units. ``fp32`` of AMD's counts matrix units.
    torch shows the two halves of an MI250X as two devices, so half of its figures count.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` returns it.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.

    Returns:
        Operations per second; None for a device, a part of one, or a precision that is not known.
    """
    words = frozenset(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _LESSER_DEVICES:
        return None
    for wanted, peaks in _PEAKS:
        if words.issuperset(wanted.split()):
            tera = peaks.get(precision)
            return None if tera is None else tera * 1e12
    return None


class Accelerator:
    """Device times, memory and FLOPs of one process; asked with every flush.

    Args:
        peak_flops: Operations per second that the device can do; looked up when left out.
    """

    def __init__(
        self, replay: Replay, faults: Faults, *, count_flops: bool = False, peak_flops: float | None = None
    ) -> None:
        self._replay = replay
        self._faults = faults
        self._wants_flops = count_flops
        self._flops: StepFlops | None = None
        self._peak = peak_flops
        self._times: DeviceTimes | None = None
        self._over = False
        self._reason = ""

    def count_flops(self, peak_flops: float | None = None) -> None:
        """Count the operations of one training step from now on; see the constructor for the rest."""
        if peak_flops is not None:
            self._peak = peak_flops
        if not self._wants_flops:
            self._wants_flops = True
            if "torch" in sys.modules and not self._over:
                self.watch()

    def watch(self) -> None:
        """Count the operations of a step if that was requested; torch is imported."""
        if not self._wants_flops:
            return
        try:
            from torchperfd.hooks.flops import StepFlops

            self._flops = StepFlops()
            self._replay.watch(self._flops)
        except Exception as error:
            if is_from_script(error):
                raise
            self._reason = describe(error)
            self._faults.note("flops", error)

    @property
    def flops_state(self) -> HookState | None:
        """Whether operations are counted, and why not; None where that is not wanted."""
        if not self._wants_flops:
            return None
        return HookState("flops", self._flops.reason if self._flops is not None else self._reason)

    def end(self, reason: str) -> None:
        """No more steps will come, or this is a forked child."""
        self._over = True
        if self._flops is not None:
            self._flops.abandon(reason)
            self._replay.unwatch(self._flops)

    @property
    def is_timed(self) -> bool:
        return self._times is not None

    @property
    def work(self) -> tuple[int, int, float]:
        """Training steps timed whole on the device, their own ns, and the sum of the squares of that."""
        return self._times.work if self._times is not None else (0, 0, 0.0)

    def times(self) -> list[DeviceTime]:
        """Return what has been timed on the device since the last call; begins to, once that is possible."""
        if self._times is None:
            # The first step initialises what later ones use, so it has no device times.
            if not self._over and self._replay.loop.train_steps:
                self._times = cuda_device_times()
                if self._times is not None:
                    # Its marks are made within compiled code as well.
                    keep_classes_out_of_graphs(type(self._times), CurrentStream)
                    self._times.spent = self._replay.leave_events_unmarked
                    self._replay.time_device(self._times, self._times.mark)
            return []
        times = self._times.collect()
        self._times.allow()
        self._replay.mark_events()
        return times

    def flops(self) -> tuple[float | None, float | None]:
        """Return the operations of a training step and those of the device in a second, where known."""
        counted = self._flops
        if counted is None or not counted.ended:
            return None, self._peak
        self._replay.unwatch(counted)
        if counted.flops is not None and self._peak is None:
            cuda = _initialized_cuda()
            if cuda is not None:
                self._peak = peak_flops(cuda.get_device_name(), counted.precision)
        return counted.flops, self._peak
