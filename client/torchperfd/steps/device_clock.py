"""What the recorder reports to a clock of the device."""

from typing import Final, Protocol

NO_CUDA_EVENT: Final = -1
"""In place of an event's id where none was recorded."""


class DeviceClock(Protocol):
    """Times the same phases on a device; its methods match those of the recorder."""

    def boundary(self, phase: int, cuda_event_id: int) -> None:
        """Since the last boundary ``phase`` was the innermost; -1 for no step, or for no event id."""

    def call(self, phase: int) -> None:
        """A call of ``phase`` has ended."""

    def close(self, kind: int) -> None:
        """The step has ended; 0 when it is to be forgotten."""

    def pass_over(self, kind: int, count: int) -> None:
        """Steps of this kind have ended of which nothing else is reported."""

    def hold(self) -> None:
        """The step may have ended."""

    def rejoin(self) -> None:
        """It had not."""

    def release(self, kind: int) -> None:
        """It had; 0 when it is to be forgotten."""
