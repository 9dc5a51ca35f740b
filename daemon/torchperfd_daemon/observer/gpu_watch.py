"""Follows the device of one rank: for how long it was busy, its clock, and who else uses it."""

from torchperfd_daemon.observer.node_context import GpuState


class GpuWatch:
    """Adds up what the driver shows once per second.

    Args:
        now: Monotonic seconds.

    Attributes:
        busy_seconds: The time for which the device was busy so far; meaningless if ``is_known`` is false.
        foreign: Other processes on the device.
    """

    def __init__(self, now: float) -> None:
        self.busy_seconds = 0.0
        self.foreign = 0
        self._state = GpuState()
        self._sampled_at = now
        self._top_clock = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the driver shows for how long the device is busy."""
        return self._state.utilization is not None

    @property
    def slowdown(self) -> float:
        """The part of its highest clock that the device has lost, 0 to 1."""
        return max(0.0, 1 - self._state.clock_hertz / self._top_clock) if self._top_clock else 0.0

    def follow(self, now: float, gpu: GpuState, pid: int, ours: frozenset[int]) -> None:
        """Add a sample.

        Args:
            now: Monotonic seconds.
            pid: The rank's process.
            ours: The process ids of all ranks.
        """
        self._state = gpu
        # Unknown for some seconds at first, and whenever the driver does not answer: not idle by that.
        busy = 1.0 if gpu.utilization is None else gpu.utilization
        self.busy_seconds += busy * (now - self._sampled_at)
        self._sampled_at = now
        self._top_clock = max(self._top_clock, gpu.clock_hertz)
        # In its own container a rank has another id than the driver sees, and all processes seem foreign.
        self.foreign = len(gpu.processes - ours) if pid in gpu.processes else 0
