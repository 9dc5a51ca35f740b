"""The ring buffer: what hooks write down on the training thread, event by event, to be read elsewhere.

What writes on it exists twice: in C, where a compiler was at hand when the package was built,
and in Python, for where there was none. Both write the same; the C one costs a fifth.
"""

try:
    from torchperfd.events._native import Draws, EventBuffer, Forward, Steps, Timed

    NATIVE = True
except ImportError:
    from torchperfd.events.reference import Draws, EventBuffer, Forward, Steps, Timed  # type: ignore[assignment]

    NATIVE = False

__all__ = ["NATIVE", "Draws", "EventBuffer", "Forward", "Steps", "Timed"]
