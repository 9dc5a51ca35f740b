"""The ring buffer of events in Python; ``native/`` has the same in C."""

import time
from array import array
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torchperfd.events.codes import ABANDON, ARGUMENT_SHIFT
from torchperfd.safety.interrupts import is_from_script

_MAX_PER_EVENT = 2  # the event, and one with its CUDA event id


class EventBuffer:
    """Events of one thread, in a list of at most ``capacity``.

    Args:
        capacity: How many events fit, a power of two.
        cuda_event_code: The code of the event that carries what ``cuda_event_id`` returns.

    Attributes:
        thread: The training thread; 0 for none.
        steps_open: Optimizer steps in progress; updated by the hooks.
        muted: Bit mask of codes whose calls are not recorded.
        lost: Events for which there was no room.
        on_event: Called after every event, unless None.
        on_low: Called when there is room for half as many events as at first, once until events are taken
            off, unless None.
        on_full: Called to make room, unless None.
        cuda_event_id: Called before each event for its CUDA event id, -1 for none, unless None.
    """

    __slots__ = (
        "_capacity",
        "_cuda_event_code",
        "_events",
        "_low_mark",
        "cuda_event_id",
        "lost",
        "muted",
        "on_event",
        "on_full",
        "on_low",
        "steps_open",
        "thread",
    )

    def __init__(self, capacity: int, cuda_event_code: int = 0) -> None:
        if capacity < 4:
            raise ValueError("capacity must be at least 4 events")
        if capacity & (capacity - 1):
            raise ValueError("capacity must be a power of two")
        self.thread = get_ident()
        self.steps_open = 0
        self.muted = 0
        self.lost = 0
        self.on_event: Callable[[], object] | None = None
        self.on_low: Callable[[], object] | None = None
        self.on_full: Callable[[], object] | None = None
        self.cuda_event_id: Callable[[], int] | None = None
        # In numbers, of which an event has two.
        self._capacity = 2 * capacity
        self._low_mark = capacity
        self._cuda_event_code = cuda_event_code
        self._events = array("q")

    def mark(self, code: int, argument: int = 0) -> bool:
        """Write an event if this is the training thread; return whether it is."""
        if get_ident() != self.thread:
            return False
        self.write(code, argument)
        return True

    def write(self, code: int, argument: int = 0) -> None:
        """Write an event, whatever the thread."""
        now = time.perf_counter_ns()
        events = self._events
        if len(events) > self._low_mark - 2 * _MAX_PER_EVENT and not self._look_for_room():
            return
        self._write_cuda_event(now)
        events.extend((now, argument << ARGUMENT_SHIFT | code))
        call_back(self.on_event)

    def forget_step(self) -> None:
        """Write that the step in progress is to be forgotten: the script raised within a hook.

        Nothing is called back, since that may raise again.
        """
        if get_ident() == self.thread:
            self._events.extend((time.perf_counter_ns(), ABANDON))

    def here(self) -> bool:
        """Return whether this is the training thread."""
        return get_ident() == self.thread

    def peek(self) -> bytes:
        """Return all events in the buffer: pairs of native int64, a time and argument << 8 | code."""
        # Events that are written meanwhile come after them.
        return self._events[: len(self._events)].tobytes()

    def skip(self, count: int) -> None:
        """Remove the ``count`` oldest events."""
        if not 0 <= count <= len(self):
            raise ValueError("the buffer holds fewer events than count")
        del self._events[: 2 * count]
        self._low_mark = self._capacity // 2

    def __len__(self) -> int:
        return len(self._events) // 2

    def _look_for_room(self) -> bool:
        full = self._capacity - 2 * _MAX_PER_EVENT
        if len(self._events) <= full:
            self._low_mark = self._capacity
            call_back(self.on_low)
            return True
        call_back(self.on_full)
        if len(self._events) <= full:
            return True
        self.lost += 1
        return False

    def _write_cuda_event(self, now: int) -> None:
        if self.cuda_event_id is not None:
            number = call_back(self.cuda_event_id)
            following = number + 1 if isinstance(number, int) else 0
            self._events.extend((now, following << ARGUMENT_SHIFT | self._cuda_event_code))


def call_back(callback: Callable[..., object] | None, *args: Any) -> object:
    """Call back; an error of ours, which the callback handles itself, goes no further."""
    if callback is None:
        return None
    try:
        return callback(*args)
    except Exception as error:
        if is_from_script(error):
            raise
        return None
