"""CUDA in this process: events on the current stream, the allocator's history, and allocations that fail."""

import sys
from collections.abc import Callable
from typing import Any, Final

_NO_STREAM: Final = (-1, -1)


class CurrentStream:
    """Records events on the stream that is current on the calling thread, which is always the same one.

    ``event.record()`` has torch make an object of the current stream each time, which takes longer than the
    rest (measured on an H200: 6.4 to 11.3 µs a record without a stream, 2.8 to 3.0 µs with one). Here that
    is done only when the stream is another one than the last time.

    Args:
        device: Returns the index of the current device.
        address: Returns the address of that device's current stream.
        stream: Returns the current stream.
    """

    __slots__ = ("_address", "_device", "_key", "_recorded", "_stream")

    def __init__(
        self, device: Callable[[], int], address: Callable[[int], int], stream: Callable[[], Any]
    ) -> None:
        self._device = device
        self._address = address
        self._stream = stream
        self._key = _NO_STREAM
        self._recorded: Any = None

    def record(self, event: Any) -> None:
        """Record an event behind all work of the current stream."""
        device = self._device()
        key = device, self._address(device)
        if key != self._key:
            # First: if this fails, the next record must not use the stream before.
            self._key = _NO_STREAM
            self._recorded = self._stream()
            self._key = key
        event.record(self._recorded)


def recorder_of_events(torch: Any) -> Callable[[Any], None]:
    """Return what records an event on the current stream.

    Args:
        torch: The module; where it lacks what is needed, events look for the stream themselves.
    """
    try:
        current = CurrentStream(
            torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch.cuda.current_stream
        )
    except AttributeError:
        return record_without_stream
    return current.record


def record_without_stream(event: Any) -> None:
    """Record an event that finds out by itself which stream is current."""
    event.record()


AllocationObserver = Callable[[int, int, int, int], None]
"""Called with a device, and in bytes what was wanted, what all of the device is and what of it is free."""

_keeps_stacks = False
"""Whether the stacks of live allocations are recorded by us, and are to be after a history has ended."""


def is_memory_recorded() -> bool:
    """Return whether the script records the history; torch and CUDA must have been initialised."""
    recording = getattr(sys.modules["torch"]._C, "_cuda_isHistoryEnabled", None)
    return recording is not None and bool(recording()) and not _keeps_stacks


def record_memory(context: str, most_events: int) -> None:
    """Begin to record; about 2 us for each allocation from here on.

    Args:
        context: Which Python stacks are recorded: ``alloc`` for those of allocations, ``all`` for frees, too.
        most_events: Allocations and frees that the history holds; of more, torch keeps the newest.
    """
    _cuda_memory()._record_memory_history("all", context=context, stacks="python", max_entries=most_events)


def snapshot_memory() -> Any:
    return _cuda_memory()._snapshot()


def stop_memory_recording() -> None:
    """Record no longer, and forget the history; stacks of live allocations are kept if they were before."""
    _cuda_memory()._record_memory_history(None)
    if _keeps_stacks:
        _record_stacks()


def observe_allocation_failures(observer: AllocationObserver) -> None:
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
        if not is_memory_recorded():
            _record_stacks()
            _keeps_stacks = True

    torch.cuda._lazy_call(begin)


def forget_stacks() -> None:
    """Record the stacks of allocations no longer, if that was ours."""
    global _keeps_stacks
    if _keeps_stacks:
        _keeps_stacks = False
        _cuda_memory()._record_memory_history(None)


def _record_stacks() -> None:
    """Record where each allocation that lives was made, and no history."""
    _cuda_memory()._record_memory_history("state", context="state", stacks="python")


def _cuda_memory() -> Any:
    return sys.modules["torch"].cuda.memory
