"""How long a change of step time must last before it is reported: longer than earlier temporary changes.

A shared machine becomes slower for seconds, and is then as fast as before. The first such episode cannot be
distinguished from a lasting change. Later ones can, once their length is known. The end of an episode is
certain only when it has lasted longer than the episode.
"""

import math
from typing import Final

MIN_SECONDS: Final = 0.5
"""No change is reported before it has lasted this long, regardless of the number of steps."""
LONGEST_SECONDS: Final = 10.0
"""The longest required time, within which a culprit must be named. A longer change is not an episode."""
MEMORY_STEPS: Final = 100_000
"""An episode is remembered for this many steps, in which one false alarm is allowed."""

# A change must last this many times the longest episode.
_LONGER: Final = 2.0


class DebounceWindow:
    """The time that the next change must last, learnt from the reported changes."""

    __slots__ = ("_learnt", "_since", "_until")

    def __init__(self) -> None:
        self._learnt = MIN_SECONDS
        self._until = 0
        self._since = -math.inf

    def seconds(self, step: int) -> float:
        """Return the required time, in seconds, of a change that comes long after the last one."""
        return self._learnt if step < self._until else MIN_SECONDS

    def required_seconds(self, since: int, step_seconds: float) -> float:
        """Return the required time of a change, in seconds.

        Args:
            since: The first step of the change.
        """
        return max(self.seconds(since), min(LONGEST_SECONDS, _LONGER * self._episode(since, step_seconds)))

    def learn(self, since: int, step_seconds: float) -> None:
        """Record a reported change; the arguments are those of :meth:`required_seconds`."""
        if self._episode(since, step_seconds):
            self._learnt = self.required_seconds(since, step_seconds)
            self._until = since + MEMORY_STEPS
        self._since = since

    def _episode(self, since: int, step_seconds: float) -> float:
        """Return for how many seconds the last change lasted; 0 if that is too long for an episode."""
        lasted = (since - self._since) * step_seconds
        return lasted if lasted < LONGEST_SECONDS else 0.0
