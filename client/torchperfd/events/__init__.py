"""Events: hooks write them to a ring buffer on the training thread; another thread reads them.

The buffer and its hooks exist in C, compiled when the package is built, and in Python, where no
compiler was available. Both write the same events; the C one costs a fifth.
"""

from torchperfd._version import NATIVE_ABI

OUTDATED = ""
"""Why the compiled half is not used although there is one, in one line; else empty."""

try:
    from torchperfd.events import _native

    if getattr(_native, "ABI", "") != NATIVE_ABI:
        OUTDATED = f"{_native.__file__} was compiled from another version of torchperfd"
        raise ImportError(OUTDATED)
    from torchperfd.events._native import Draws, EventBuffer, Forward, IndexLists, Steps, Timed

    NATIVE = True
except ImportError:
    from torchperfd.events.codes import EventBuffer  # type: ignore[assignment]
    from torchperfd.events.reference import Draws, Forward, IndexLists, Steps, Timed  # type: ignore[assignment]

    NATIVE = False

__all__ = ["NATIVE", "OUTDATED", "Draws", "EventBuffer", "Forward", "IndexLists", "Steps", "Timed"]
