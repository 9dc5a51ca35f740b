"""Events: hooks write them to a ring buffer on the training thread; another thread reads them.

The buffer and its hooks exist in C, compiled when the package is built, and in Python, where no
compiler was available. Both write the same events; the C one costs a fifth.
"""

try:
    from torchperfd.events._native import Draws, EventBuffer, Forward, Steps, Timed

    NATIVE = True
except ImportError:
    from torchperfd.events.reference import Draws, EventBuffer, Forward, Steps, Timed  # type: ignore[assignment]

    NATIVE = False

__all__ = ["NATIVE", "Draws", "EventBuffer", "Forward", "Steps", "Timed"]
