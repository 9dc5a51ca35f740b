"""The events on a ring buffer, by code, and that buffer in Python; ``native/`` has it in C.

An event is a time, a code and an argument.
"""

import time
import weakref
from array import array
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from torchperfd.safety.interrupts import is_from_script

# fmt: off
DRAW: Final = 0             # argument: the iterator's id, and DRAW_... flags
CLOSURE_DRAW: Final = 1     # the closure of an optimizer that is at work draws
DRAWN: Final = 2            # argument: samples in the batch
EXHAUSTED: Final = 3        # the draw raised, in general StopIteration; argument: the iterator's id
FORWARD: Final = 4
EVALUATE: Final = 5         # argument: EVALUATE_... flags
FORWARD_END: Final = 6
BACKWARD: Final = 7
BACKWARD_END: Final = 8
ZERO: Final = 9
ZERO_END: Final = 10
OPTIMIZER: Final = 11       # argument: the optimizer's id
OPTIMIZER_END: Final = 12   # argument: the optimizer's id
STALE: Final = 13           # an earlier optimizer step raised, so that its end was never written
ELSEWHERE: Final = 14       # argument: id of an optimizer that stepped on one of autograd's threads
SCALER: Final = 15          # argument: the optimizer's id
SCALER_END: Final = 16
SCALER_FAILED: Final = 17
SAVE: Final = 18
SAVE_END: Final = 19
ENTER: Final = 20           # argument: the phase's slot
EXIT: Final = 21
STEP: Final = 22            # argument: samples
SAMPLES: Final = 23         # argument: samples of the newest batch, if unknown at its draw
OUTER_DRAW: Final = 24      # a framework draws; argument: DRAW_... flags
OUTER_DRAWN: Final = 25     # argument: samples, if not known from a DataLoader inside
BETWEEN: Final = 26         # the loop is over, until the next draw
ADOPT: Final = 27           # from here on another thread writes
ABANDON: Final = 28         # a hook has failed: the step in progress is lost
CUDA_EVENT: Final = 29          # argument: number of the device event of the next event plus 1; 0 for none
NOT_TRAINING: Final = 30    # argument: for so many ns until now the thread did work of ours
READY: Final = 31           # argument: batches that wait in the workers' queue of the next draw plus 1
TOKENS: Final = 32          # argument: tokens that the step in progress has trained on
COLLECTIVE: Final = 33      # a collective is issued, or waited for
COLLECTIVE_END: Final = 34
REDUCTION: Final = 35       # the rest of the backward waits for others'; argument: for how long it has, in ns
PASS: Final = 36            # a loader is about to be drawn from
LEFT: Final = 37            # argument: id of an iterator that is gone, or that a name holds with LEFT_NAMED
OPTIMIZER_MADE: Final = 38  # argument: id of a new optimizer, with parameters of its own
EVALUATION_MODE: Final = 39  # a model that is trained is put into evaluation mode
TRAINING_MODE: Final = 40   # it is put back into training mode
# fmt: on

CODES: Final = 41

# Iterators lie at even addresses, so the low bits are free for flags.
DRAW_WITHOUT_GRADIENTS: Final = 1  # gradients are off
DRAW_IN_EVALUATION: Final = 2  # the models are in evaluation mode
LEFT_NAMED: Final = 1  # the script holds the iterator by a name
ITERATOR_MASK: Final = ~3

ONE_OR_BATCH: Final = -1
"""Instead of a number of samples, where only the batch shows whether it is one sample."""

EVALUATE_IN_TRAINING_MODE: Final = 1  # gradients are off
EVALUATE_WITH_GRADIENTS: Final = 2  # the model is in evaluation mode

ARGUMENT_SHIFT: Final = 8
CODE_MASK: Final = (1 << ARGUMENT_SHIFT) - 1
EVENT_FORMAT: Final = "=qq"
"""How :mod:`struct` reads a drained event: a time in nanoseconds, then argument << 8 | code."""

PLACES: Final[dict[int, str]] = {
    **dict.fromkeys((DRAW, CLOSURE_DRAW, DRAWN, EXHAUSTED, OUTER_DRAW, OUTER_DRAWN, SAMPLES), "draw"),
    **dict.fromkeys((PASS, LEFT, NOT_TRAINING), "draw"),
    **dict.fromkeys((FORWARD, EVALUATE, FORWARD_END), "forward"),
    **dict.fromkeys((EVALUATION_MODE, TRAINING_MODE), "modes"),
    **dict.fromkeys((BACKWARD, BACKWARD_END), "backward"),
    **dict.fromkeys((ZERO, ZERO_END), "zero_grad"),
    **dict.fromkeys((OPTIMIZER, OPTIMIZER_END, STALE, ELSEWHERE, OPTIMIZER_MADE), "optimizer"),
    **dict.fromkeys((SCALER, SCALER_END, SCALER_FAILED), "scaler"),
    **dict.fromkeys((SAVE, SAVE_END), "save"),
    **dict.fromkeys((ENTER, EXIT), "phase"),
    STEP: "step",
    TOKENS: "step",
    READY: "draw",
    **dict.fromkeys((COLLECTIVE, COLLECTIVE_END, REDUCTION), "collective"),
}
"""Which hook a failure to understand an event is counted against."""


def evaluation_flags(grad_enabled: Callable[[], bool], models: "list[weakref.ref[Any]]") -> int:
    """Return the ``DRAW_...`` flags that hold for a draw, or 0."""
    flags = 0 if grad_enabled() else DRAW_WITHOUT_GRADIENTS
    alive = [model for reference in models if (model := reference()) is not None]
    if alive and not any(model.training for model in alive):
        flags |= DRAW_IN_EVALUATION
    return flags


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
