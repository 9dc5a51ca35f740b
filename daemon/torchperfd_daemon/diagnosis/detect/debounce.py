"""How long a change of pace must last before it is told: longer than earlier ones did that did not stay.

A machine that others use, too, becomes slower for seconds, and is then as fast as before. The first such
episode cannot be told from a change that stays. The next ones can, once it is known how long they take; and
the end of one is sure only when it has lasted longer than the episode.
"""

import math
from typing import Final

LEAST_SECONDS: Final = 0.5
"""No change is told before it has lasted this long. What is shorter is a hiccup, of however many steps."""
LONGEST_SECONDS: Final = 10.0
"""More is never asked: a culprit is to be named within this time. What lasts longer is no episode."""
MEMORY_STEPS: Final = 100_000
"""For so many steps an episode counts: one false alarm in this many is what is allowed."""

# A change is asked to last this many times the longest episode.
_LONGER: Final = 2.0


class DebounceWindow:
    """The seconds that the next change must last, learnt from the changes told."""

    __slots__ = ("_learnt", "_since", "_until")

    def __init__(self) -> None:
        self._learnt = LEAST_SECONDS
        self._until = 0
        self._since = -math.inf

    def seconds(self, step: int) -> float:
        """Return how long a change must have lasted that comes long after the last."""
        return self._learnt if step < self._until else LEAST_SECONDS

    def asked(self, since: int, step_seconds: float) -> float:
        """Return how long a change must have lasted, in seconds.

        Args:
            since: Its first step.
            step_seconds: What a step took before.
        """
        return max(self.seconds(since), min(LONGEST_SECONDS, _LONGER * self._episode(since, step_seconds)))

    def learn(self, since: int, step_seconds: float) -> None:
        """Take a change that was told, described as in :meth:`asked`."""
        if self._episode(since, step_seconds):
            self._learnt = self.asked(since, step_seconds)
            self._until = since + MEMORY_STEPS
        self._since = since

    def _episode(self, since: int, step_seconds: float) -> float:
        """Return for how many seconds the last change lasted, 0 if that is too long for an episode."""
        lasted = (since - self._since) * step_seconds
        return lasted if lasted < LONGEST_SECONDS else 0.0
