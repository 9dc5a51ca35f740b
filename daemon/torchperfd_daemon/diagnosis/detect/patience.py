"""How long a change of pace must last before it is told: longer than earlier ones did that were undone.

A machine that others use, too, becomes slower for seconds and is then as fast as before. The first such
episode cannot be told from a change that stays; the next ones can, once it is known how long they take.
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


class Patience:
    """The seconds that the next change must last, learnt from the changes told."""

    __slots__ = ("_after", "_asked", "_before", "_since", "_until")

    def __init__(self) -> None:
        self._asked = LEAST_SECONDS
        self._until = 0
        self._since: int | None = None
        self._before = self._after = 0.0

    def seconds(self, step: int) -> float:
        """Return how long a change that is looked at in a step must have lasted."""
        return self._asked if step < self._until else LEAST_SECONDS

    def learn(self, since: int, before: float, after: float) -> None:
        """Take a change that was told: its first step, and the logarithms of the step's seconds around it."""
        if self._since is not None and abs(after - self._before) < abs(self._after - self._before) / 2:
            lasted = (since - self._since) * math.exp(before)
            if lasted < LONGEST_SECONDS:
                self._asked = min(LONGEST_SECONDS, max(self.seconds(since), _LONGER * lasted))
                self._until = since + MEMORY_STEPS
        self._since, self._before, self._after = since, before, after
