"""The replay: reads events from the ring buffer and calls the loop for each.

The flusher reads once per second, on its own thread. While a watcher must act at step edges, the training
thread reads each event as soon as it has written it.
"""

import threading
import time
from collections.abc import Callable
from struct import calcsize, iter_unpack, unpack_from
from typing import Any, Final

from torchperfd.events import EventBuffer, codes
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults
from torchperfd.steps import templates
from torchperfd.steps.epochs import EpochTracker
from torchperfd.steps.event_handlers import EventHandlers
from torchperfd.steps.loop import Loop
from torchperfd.steps.loop_state import StepWatcher
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.phases import DeviceClock, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.templates import StepTemplates, TemplateRecorder

_EVENT_BYTES: Final = calcsize(codes.EVENT_FORMAT)
_SLICE: Final = 512 * _EVENT_BYTES
_MAX_UNKNOWN_STEPS: Final = 4
"""After this many steps without a template the rest of the buffer is handled event by event."""


class Replay:
    """Reads one ring buffer.

    Args:
        buffer: What the hooks write to; it has no other reader.
        capacity: Steps that the recorder holds until they are drained.

    Attributes:
        loop: The state after all events read so far.
        now: Time of the event that is being handled, ns: the clock of the loop and the recorder.
        handlers: The function that handles each event, by the event's code.
        after_read: Called on the training thread after each event that it reads itself, unless None.
    """

    def __init__(
        self, buffer: EventBuffer, capacity: int, faults: Faults, overhead: Overhead | None = None
    ) -> None:
        self.epochs = EpochTracker()
        self.overhead = overhead or Overhead(buffer)
        self.now = time.perf_counter_ns()
        self.after_read: Callable[[], None] | None = None
        self.recorder = Recorder(self, capacity)
        self.loop = Loop(self.recorder, self)
        self._buffer = buffer
        self.faults = faults
        # Reentrant: what a watcher starts at an edge may read along, too.
        self._lock: Any = threading.RLock()
        self._read_on_other_thread: Callable[[], None] = self.catch_up
        self._reading = False
        self._given_up = False
        self._lost = 0
        self._newest = 0
        # Events left in the ring buffer, because a step had begun.
        self._left = 0
        # Events taken from the buffer and not handled, because the script raised; and bytes handled before.
        self._unread = b""
        self._handled = 0
        self._event_handlers = EventHandlers(self, self.loop, self.recorder, self.epochs)
        self.handlers = self._event_handlers.by_code
        self._mark: Callable[[], int] | None = None
        self._step_templates = StepTemplates(self.loop, self.recorder)
        buffer.on_full = self.catch_up

    @property
    def live(self) -> bool:
        """Whether the training thread reads along."""
        return self._buffer.on_event is not None

    @property
    def thread(self) -> int:
        """The thread that trains; 0 for none."""
        return self._buffer.thread

    def catch_up(self, *, again: bool = False) -> None:
        """Read what is on the ring buffer; leaves it to the training thread where that reads along.

        Args:
            again: Who calls soon calls again: what seems to be the beginning of a step like those before it
                may stay on the ring buffer until then, unless it already has and nothing came after it.
        """
        with self._lock:
            if not self.live or self._buffer.here():
                self._read(again)

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread is in the middle of reading: a signal handler of the script runs."""
        return bool(self._lock._is_owned())

    def read_elsewhere(self, read: Callable[[], None]) -> None:
        """Have ``read`` make room on a full ring buffer where the main thread writes.

        What a signal handler of the script raises on that thread must not interrupt the reading.
        """
        self._read_on_other_thread = read
        self._buffer.on_full = self._make_room_for_writer

    def _make_room_for_writer(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._read_on_other_thread()
        else:
            self.catch_up()

    def drain(self, *, again: bool = False) -> list[StepBatch]:
        """Catch up, and take all steps that have ended."""
        with self._lock:
            self.catch_up(again=again)
            self.epochs.find_begun(self.loop.train_steps)
            return self.recorder.drain()

    def watch(self, watcher: StepWatcher) -> None:
        """Call ``watcher`` at step edges, on the training thread, from now on."""
        self.go_live()
        self.loop.watcher = watcher

    def unwatch(self, watcher: StepWatcher) -> None:
        """Stop calling ``watcher``; another watcher is left alone."""
        if self.loop.watcher is watcher:
            self.loop.watcher = None
        if self.loop.watcher is None:
            self.leave()

    def time_device(self, device: DeviceClock, mark: Callable[[], int]) -> None:
        """Report boundaries to ``device`` from now on, and call ``mark`` at every event for a while."""
        with self._lock:
            self.recorder.device = device
            self._mark = self.overhead.timing(mark)
        self.mark_events()

    def mark_events(self) -> None:
        """Call the device's ``mark`` at every event again, unless that was given up."""
        if not self.overhead.degradation_level:
            self._buffer.cuda_event_id = self._mark

    def leave_events_unmarked(self) -> None:
        """Call the device's ``mark`` no more until :meth:`mark_events`."""
        self._buffer.cuda_event_id = None

    def go_live(self) -> None:
        """Have the training thread read along; what it has written so far is read here and now."""
        with self._lock:
            if not self.live:
                self._read()
                self._buffer.on_event = self._read_along

    def leave(self) -> None:
        """Have the training thread only write again."""
        self._buffer.on_event = None

    def finish(self) -> None:
        """End the loop: read the remaining events and finish the last step. No hook writes any more."""
        with self._lock:
            self.leave()
            self._read()
            try:
                self.loop.finish()
                self.epochs.find_begun(self.loop.train_steps)
                self.epochs.finish()
            except Exception as error:
                if is_from_script(error):
                    raise
                self.faults.note("loop", error)

    def abandon(self) -> None:
        """Forget the open step: a hook has failed."""
        self._event_handlers.abandon()

    def _read_along(self) -> None:
        self.catch_up()
        after_read = self.after_read
        if after_read is not None:
            after_read()

    def _read(self, again: bool = False) -> None:
        if self._reading:
            return  # an event was written while another is handled; it comes next
        self._reading = True
        try:
            if self._unread:
                unread, self._unread = self._unread, b""
                self._handle_all(memoryview(unread), 0)
            while (there := len(self._buffer)) and not self._given_up:
                left, self._left = self._left, 0
                self.recorder.wall_offset = time.time_ns() - time.perf_counter_ns()
                if self._buffer.lost != self._lost:
                    # Of what happened in between nothing is known.
                    self._lost = self._buffer.lost
                    self.abandon()
                events = memoryview(self._buffer.peek())
                handled, begun = 0, False
                if templates.AVAILABLE and not self.live:
                    handled, begun = self._read_repeated_or_none(events)
                if begun and again and there != left:
                    self._left = (len(events) - handled) // _EVENT_BYTES
                    events = events[:handled]
                self._buffer.skip(len(events) // _EVENT_BYTES)
                self.overhead.count(len(events) // _EVENT_BYTES)
                self._handle_all(events, handled)
                if self._left:
                    return
        finally:
            self._reading = False

    def _handle_all(self, events: "memoryview[int]", start: int) -> None:
        """Handle the events from ``start`` on; the rest stays unread if the script raises meanwhile."""
        position, self._handled = start, 0
        try:
            for position in range(start, len(events), _SLICE):
                if self._given_up:
                    return
                if not self.live:
                    self.recorder.make_room()
                    # Release the GIL to the training thread, every half millisecond.
                    time.sleep(0)
                self._handled = 0
                self._handle(events[position : position + _SLICE])
        except BaseException:
            self._unread = bytes(events[position + self._handled :])
            self.abandon()
            raise

    def _read_repeated_or_none(self, events: "memoryview[int]") -> tuple[int, bool]:
        """The same as :meth:`_read_repeated`; what the script raises meanwhile costs these events."""
        try:
            return self._read_repeated(events)
        except BaseException:
            # Some may have been counted, and none may be twice.
            self._buffer.skip(len(events) // _EVENT_BYTES)
            self.abandon()
            raise

    def _read_repeated(self, events: "memoryview[int]") -> tuple[int, bool]:
        """Read while steps go as those before; return up to where, and whether another has begun there."""
        position, patience = 0, _MAX_UNKNOWN_STEPS
        while position < len(events) and patience and not self._given_up:
            repeated, begun = self._step_templates.repeat(events[position:], self._newest)
            if repeated:
                position, patience = position + repeated, _MAX_UNKNOWN_STEPS
                self.now, self._newest = unpack_from(codes.EVENT_FORMAT, events, position - _EVENT_BYTES)
            if begun:
                return position, True
            self.recorder.make_room()
            if repeated:
                position += self._handle(events[position:], to_edge=True)
            else:
                patience -= 1
                with self._step_templates.learn() as learning:
                    position += self._handle(events[position:], learning, to_edge=True)
        return position, False

    def _handle(
        self, events: "memoryview[int]", learning: TemplateRecorder | None = None, *, to_edge: bool = False
    ) -> int:
        """Handle event by event, ``to_edge`` until a step ends; return the number of bytes handled."""
        handlers, recorder = self.handlers, self.recorder
        recorded, handled, word = recorder.recorded, 0, self._newest
        try:
            for self.now, word in iter_unpack(codes.EVENT_FORMAT, events):
                code = word & codes.CODE_MASK
                handled += _EVENT_BYTES
                try:
                    if learning is not None:
                        learning.event(word)
                    handlers[code](word >> codes.ARGUMENT_SHIFT)
                except Exception as error:
                    if is_from_script(error):
                        raise
                    self._fault(code, error)
                    if learning is not None:
                        learning.plain = False
                    if self._given_up:
                        break
                if to_edge and recorder.recorded != recorded:
                    break
        finally:
            self._newest, self._handled = word, handled
        return handled

    def _fault(self, code: int, error: Exception) -> None:
        place = f"hook {codes.PLACES.get(code, 'loop')}"
        self.faults.note(place, error)
        self.abandon()
        if self.faults.spent(place):
            self._given_up = True
            self._buffer.thread = 0
