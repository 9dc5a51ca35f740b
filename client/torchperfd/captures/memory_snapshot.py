"""Memory snapshots: what the CUDA allocator did during some steps, and what it holds after them.

torch records the history and hands out the snapshot; the file is the pickle that its own
``memory_viz`` page and module read. A ``Tracer`` like those of :mod:`torchperfd.captures.tracer`,
so that a snapshot is written, hashed and reported like a trace.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, Final

from torchperfd.hooks import memory_history

MAX_EVENTS: Final = 200_000
"""Allocations and frees that the history holds; of more, torch keeps the newest.

Each is an entry of a Python dictionary in the snapshot, about 1 kB with its frames.
"""

VIEWERS_PROTOCOL: Final = 4
"""The newest pickle protocol that torch's viewer reads. Python 3.14 writes 5 by default."""


def unusable() -> str:
    """Return why no snapshot can be made now, '' when one can."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "the process has not imported torch yet"
    # Not is_available(): asking the driver for the first time may cost this process its forked workers.
    if not torch.cuda.is_initialized():
        return "no CUDA in this process"
    if memory_history.is_recorded():
        return "the script records the history of CUDA memory itself; wait until it has stopped"
    return ""


class MemoryTracer:
    """The history of the CUDA allocator between ``start`` and ``stop``.

    Args:
        with_stack: Record the Python stacks of frees as well, not only those of allocations.
    """

    def __init__(self, with_stack: bool) -> None:
        self._context: Final = "all" if with_stack else "alloc"
        self._snapshot: Any = None

    @property
    def lost(self) -> bool:
        """Never: torch's profilers do not meddle with it."""
        return False

    def start(self) -> None:
        """Begin to record; about 2 us for each allocation from here on."""
        memory_history.record(self._context, MAX_EVENTS)

    def stop(self) -> None:
        """Take the snapshot, and end recording: that forgets the history, so it comes second."""
        try:
            self.take()
        finally:
            memory_history.stop()

    def take(self) -> None:
        """Take the snapshot."""
        self._snapshot = memory_history.snapshot()

    def export(self, path: Path) -> None:
        """Write the snapshot, once, and forget it.

        Raises:
            OSError: It cannot be written.
        """
        snapshot, self._snapshot = self._snapshot, None
        with path.open("wb") as file:
            pickle.dump(snapshot, file, protocol=VIEWERS_PROTOCOL)

    def discard(self) -> None:
        """Forget the snapshot."""
        self._snapshot = None
