"""The device's idle time in a step that is not recorded, by cause."""

from collections.abc import Sequence
from typing import Final

from torchperfd_daemon.analysis.idle import CAUSES, Cause, Idle

# The cost of recording is taken off these causes first: the profiler's own work in the gaps, then launches,
# which recording slows down.
_FIRST: Final[tuple[Cause, ...]] = ("profiler", "launch")


class IdleShare:
    """The idle time of the mean step by cause; together no more than the step has besides its busy time.

    Recording lengthens a step and its gaps by the same time. So what the step is shortened by is taken off
    the gaps as well: off the profiler's own work and launches first, off the others in proportion.

    Args:
        idle: Why the device was idle while it was recorded; None without a device.
        kept: The steps that count.
        most_ns: The most that one step can idle: its length when nothing is recorded, less its busy time.
        recording_ns: What recording costs a step.

    Attributes:
        ns: All idle time of a step, in ns.
    """

    def __init__(self, idle: Idle | None, kept: Sequence[int], most_ns: float, recording_ns: float) -> None:
        self._ns: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        if idle is not None:
            for cause in CAUSES:
                self._ns[cause] = sum(idle.steps[step].get(cause, 0) for step in kept) / len(kept)
        whole = sum(self._ns.values())
        left = max(min(whole - recording_ns, most_ns), 0.0)
        excess = whole - left
        for cause in _FIRST:
            taken = min(excess, self._ns[cause])
            self._ns[cause] -= taken
            excess -= taken
        # The profiler's own work in gaps is no part of a step that is not recorded.
        self._ns["profiler"] = 0.0
        others = sum(ns for cause, ns in self._ns.items() if cause not in _FIRST)
        for cause in CAUSES:
            if cause not in _FIRST and others:
                self._ns[cause] *= max(1 - excess / others, 0.0)
        self.ns = sum(self._ns.values())

    def of(self, cause: Cause) -> float:
        """Return the idle time of a cause, in ns."""
        return self._ns[cause]
