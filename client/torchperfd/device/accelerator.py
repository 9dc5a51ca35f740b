"""The accelerator: device times, memory and FLOPs, if the process uses a device."""

import sys
from typing import TYPE_CHECKING, Any

from torchperfd.device.clock import DeviceTimes, cuda_device_times
from torchperfd.device.cuda_memory import read_cuda_memory
from torchperfd.device.step_times import DeviceTime
from torchperfd.faults import Faults
from torchperfd.hook_state import HookState
from torchperfd.hooks.context import describe
from torchperfd.hooks.cuda import CurrentStream
from torchperfd.hooks.patches import keep_classes_out_of_graphs
from torchperfd.safety.interrupts import is_from_script
from torchperfd.steps.replay import Replay

if TYPE_CHECKING:
    from torchperfd.hooks.flops import StepFlops
    from torchperfd.steps.totals import CudaMemory


class Accelerator:
    """Device times, memory and FLOPs of one process; asked with every flush.

    Args:
        replay: The loop's.
        faults: Where failures of ours are counted.
        count_flops: Whether to count the operations of one training step.
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
        """Whether steps run on a device."""
        return self._times is not None

    @property
    def lag(self) -> tuple[int, int]:
        """How often it was sampled how far the device is behind the host, and the sum of that in ns."""
        return (self._times.lags, self._times.lag_ns) if self._times is not None else (0, 0)

    def memory(self) -> "CudaMemory | None":
        """Return what the allocators hold, None without CUDA."""
        return read_cuda_memory()

    def times(self) -> list[DeviceTime]:
        """Return what has been timed on the device since the last call; begins to, once that is possible."""
        if self._times is None:
            # The first step initialises what later ones use, so it has no device times.
            if not self._over and self._replay.loop.train_steps:
                self._times = cuda_device_times()
                if self._times is not None:
                    # Its marks are made within compiled code as well.
                    keep_classes_out_of_graphs(DeviceTimes, CurrentStream)
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
            from torchperfd.device.flops import peak_flops

            cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
            if cuda is not None and cuda.is_initialized():
                self._peak = peak_flops(cuda.get_device_name(), counted.precision)
        return counted.flops, self._peak
