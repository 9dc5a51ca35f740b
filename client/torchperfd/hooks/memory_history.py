"""The history of CUDA memory, which torch's allocator records."""

import sys
from typing import Any


def is_recorded() -> bool:
    """Return whether the history is recorded already; torch and CUDA must have been initialised."""
    recording = getattr(sys.modules["torch"]._C, "_cuda_isHistoryEnabled", None)
    return recording is not None and bool(recording())


def record(context: str, most_events: int) -> None:
    """Begin to record; about 2 us for each allocation from here on.

    Args:
        context: Which Python stacks are recorded: ``alloc`` for those of allocations, ``all`` for frees, too.
        most_events: Allocations and frees that the history holds; of more, torch keeps the newest.
    """
    _memory()._record_memory_history("all", context=context, stacks="python", max_entries=most_events)


def snapshot() -> Any:
    """Return the history and what is allocated now."""
    return _memory()._snapshot()


def stop() -> None:
    """Record no longer, and forget the history."""
    _memory()._record_memory_history(None)


def _memory() -> Any:
    return sys.modules["torch"].cuda.memory
