"""The history of CUDA memory, which torch's allocator records, and allocations that it cannot make."""

import sys
from collections.abc import Callable
from typing import Any

Observer = Callable[[int, int, int, int], None]
"""Called with a device, and in bytes what was wanted, what all of the device is and what of it is free."""

_keeps_stacks = False
"""Whether the stacks of live allocations are recorded by us, and are to be after a history has ended."""


def is_recorded() -> bool:
    """Return whether the script records the history; torch and CUDA must have been initialised."""
    recording = getattr(sys.modules["torch"]._C, "_cuda_isHistoryEnabled", None)
    return recording is not None and bool(recording()) and not _keeps_stacks


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
    """Record no longer, and forget the history; stacks of live allocations are kept if they were before."""
    _memory()._record_memory_history(None)
    if _keeps_stacks:
        _record_stacks()


def observe_failures(observer: Observer) -> None:
    """Record the stacks of live allocations, and call ``observer`` when one fails; once CUDA is initialised.

    torch calls it before it raises, on the thread that allocates. It cannot be taken back.

    Raises:
        AttributeError: torch is too old for that.
    """
    torch: Any = sys.modules["torch"]
    attach = torch._C._cuda_attach_out_of_memory_observer

    def begin() -> None:
        global _keeps_stacks
        attach(observer)
        if not is_recorded():
            _record_stacks()
            _keeps_stacks = True

    torch.cuda._lazy_call(begin)


def forget_stacks() -> None:
    """Record the stacks of allocations no longer, if that was ours."""
    global _keeps_stacks
    if _keeps_stacks:
        _keeps_stacks = False
        _memory()._record_memory_history(None)


def _record_stacks() -> None:
    """Record where each allocation that lives was made, and no history."""
    _memory()._record_memory_history("state", context="state", stacks="python")


def _memory() -> Any:
    return sys.modules["torch"].cuda.memory
