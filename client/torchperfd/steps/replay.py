"""The replay: reads the tape and tells the loop what happened, event by event.

In general it is the flusher that reads, once per second, far from the training thread.
While a watcher must act at step edges, the training thread reads along as it writes.
"""

import threading
import time
from collections.abc import Callable
from struct import calcsize, iter_unpack, unpack_from
from typing import Any, Final

from torchperfd.events import EventBuffer
from torchperfd.events import codes as on_tape
from torchperfd.faults import Faults
from torchperfd.safety.interrupts import is_from_script
from torchperfd.steps import templates as cycles
from torchperfd.steps.epochs import EpochTracker
from torchperfd.steps.loop import Loop, StepWatcher
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.recorder import BACKWARD, DATA, DeviceClock, Recorder
from torchperfd.steps.step_batch import StepBatch
from torchperfd.steps.templates import Cycles, Scribe

_EVENT_BYTES: Final = calcsize(on_tape.EVENT_FORMAT)
_SLICE: Final = 512 * _EVENT_BYTES
_PATIENCE: Final = 4
"""So many steps that are no cycle, and the rest of what is on the tape is told one by one."""


class Replay:
    """One tape's reader.

    Args:
        tape: What the hooks write on; read by nobody else.
        capacity: Steps that the recorder holds until they are drained.
        faults: Where failures of ours are counted.
        overhead: Estimates our own cost.

    Attributes:
        loop: What has been read so far adds up to this.
        recorder: What times the loop's steps.
        passes: The loop's passes over loaders.
        overhead: Estimates our own cost.
        now: When that happened which is being told: the loop's and the recorder's clock.
        follower: Called on the training thread after each event that it has read along, unless None.
    """

    def __init__(
        self, tape: EventBuffer, capacity: int, faults: Faults, overhead: Overhead | None = None
    ) -> None:
        self.passes = EpochTracker()
        self.overhead = overhead or Overhead(tape)
        self.now = time.perf_counter_ns()
        self.follower: Callable[[], None] | None = None
        self.recorder = Recorder(self, capacity)
        self.loop = Loop(self.recorder, self)
        self._tape = tape
        self._faults = faults
        # Reentrant: what a watcher starts at an edge may read along, too.
        self._lock: Any = threading.RLock()
        self._read_on_other_thread: Callable[[], None] = self.catch_up
        self._reading = False
        self._given_up = False
        self._lost = 0
        self._newest = 0
        # So many events were left on the tape, as the beginning of a step.
        self._left = 0
        # What was taken off the tape and not told, since the script raised meanwhile; and how far that came.
        self._unread = b""
        self._told = 0
        # Of the calls that are under way, how deep phases were nested before, and optimizer calls.
        self._calls: list[tuple[int, int, int]] = []
        self._handlers = self._make_handlers()
        self._cycles = Cycles(self.loop, self.recorder)
        tape.on_full = self.catch_up

    @property
    def live(self) -> bool:
        """Whether the training thread reads along."""
        return self._tape.on_event is not None

    @property
    def thread(self) -> int:
        """The thread that trains; 0 for none."""
        return self._tape.thread

    def catch_up(self, *, again: bool = False) -> None:
        """Read what is on the tape; leaves it to the training thread where that reads along.

        Args:
            again: Who calls soon calls again: what seems to be the beginning of a step like those before it
                may stay on the tape until then, unless it already has and nothing came after it.
        """
        with self._lock:
            if not self.live or self._tape.here():
                self._read(again)

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread is in the middle of reading: a signal handler of the script runs."""
        return bool(self._lock._is_owned())

    def read_elsewhere(self, read: Callable[[], None]) -> None:
        """Have ``read`` make room on a full tape where the main thread writes.

        What a signal handler of the script raises on that thread must not interrupt the reading.
        """
        self._read_on_other_thread = read
        self._tape.on_full = self._make_room_for_writer

    def _make_room_for_writer(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._read_on_other_thread()
        else:
            self.catch_up()

    def drain(self, *, again: bool = False) -> list[StepBatch]:
        """Catch up, and take all steps that have ended."""
        with self._lock:
            self.catch_up(again=again)
            return self.recorder.drain()

    def watch(self, watcher: StepWatcher) -> None:
        """Have ``watcher`` told of step edges, on the training thread, from now on."""
        self.go_live()
        self.loop.watcher = watcher

    def unwatch(self, watcher: StepWatcher) -> None:
        """Stop telling ``watcher``; somebody else's is left alone."""
        if self.loop.watcher is watcher:
            self.loop.watcher = None
        if self.loop.watcher is None:
            self.leave()

    def time_device(self, device: DeviceClock, mark: Callable[[], int]) -> None:
        """From now on, have ``mark`` called at every event, and ``device`` told what it was."""
        with self._lock:
            self.recorder.device = device
            self._tape.ticket = self.overhead.timing(mark)

    def go_live(self) -> None:
        """Have the training thread read along; what it has written so far is read here and now."""
        with self._lock:
            if not self.live:
                self._read()
                self._tape.on_event = self._read_along

    def leave(self) -> None:
        """Have the training thread only write again."""
        self._tape.on_event = None

    def finish(self) -> None:
        """The loop is over, and nobody writes any more: read the rest and account for the last step."""
        with self._lock:
            self.leave()
            self._read()
            try:
                self.loop.finish()
                self.passes.finish()
            except Exception as error:
                if is_from_script(error):
                    raise
                self._faults.note("loop", error)

    def abandon(self) -> None:
        """Forget the open step: a hook has failed."""
        self._calls.clear()
        self.loop.abandon()

    def _read_along(self) -> None:
        self.catch_up()
        follower = self.follower
        if follower is not None:
            follower()

    def _read(self, again: bool = False) -> None:
        if self._reading:
            return  # an event that was written while one is being told; it comes next
        self._reading = True
        try:
            if self._unread:
                unread, self._unread = self._unread, b""
                self._tell_all(memoryview(unread), 0)
            while (there := len(self._tape)) and not self._given_up:
                left, self._left = self._left, 0
                self.recorder.wall_offset = time.time_ns() - time.perf_counter_ns()
                if self._tape.lost != self._lost:
                    # Of what happened in between nothing is known.
                    self._lost = self._tape.lost
                    self.abandon()
                events = memoryview(self._tape.peek())
                told, begun = 0, False
                if cycles.AVAILABLE and not self.live:
                    told, begun = self._read_cycles_or_none(events)
                if begun and again and there != left:
                    self._left = (len(events) - told) // _EVENT_BYTES
                    events = events[:told]
                self._tape.skip(len(events) // _EVENT_BYTES)
                self.overhead.count(len(events) // _EVENT_BYTES)
                self._tell_all(events, told)
                if self._left:
                    return
        finally:
            self._reading = False

    def _tell_all(self, events: "memoryview[int]", start: int) -> None:
        """Tell the loop of events from ``start`` on; the rest stays unread if the script raises meanwhile."""
        position, self._told = start, 0
        try:
            for position in range(start, len(events), _SLICE):
                if self._given_up:
                    return
                if not self.live:
                    self.recorder.make_room()
                    # The training thread wants the interpreter: let it go on, every half millisecond.
                    time.sleep(0)
                self._told = 0
                self._tell(events[position : position + _SLICE])
        except BaseException:
            self._unread = bytes(events[position + self._told :])
            self.abandon()
            raise

    def _read_cycles_or_none(self, events: "memoryview[int]") -> tuple[int, bool]:
        """The same as :meth:`_read_cycles`; what the script raises meanwhile costs these events."""
        try:
            return self._read_cycles(events)
        except BaseException:
            # Some may have been counted, and none may be twice.
            self._tape.skip(len(events) // _EVENT_BYTES)
            self.abandon()
            raise

    def _read_cycles(self, events: "memoryview[int]") -> tuple[int, bool]:
        """Read while steps go as those before; return up to where, and whether another has begun there."""
        position, patience = 0, _PATIENCE
        while position < len(events) and patience and not self._given_up:
            repeated, begun = self._cycles.repeat(events[position:], self._newest)
            if repeated:
                position, patience = position + repeated, _PATIENCE
                self.now, self._newest = unpack_from(on_tape.EVENT_FORMAT, events, position - _EVENT_BYTES)
            if begun:
                return position, True
            self.recorder.make_room()
            if repeated:
                position += self._tell(events[position:], to_edge=True)
            else:
                patience -= 1
                with self._cycles.lesson() as lesson:
                    position += self._tell(events[position:], lesson, to_edge=True)
        return position, False

    def _tell(self, events: "memoryview[int]", lesson: Scribe | None = None, *, to_edge: bool = False) -> int:
        """Tell the loop event by event, ``to_edge`` until a step ends; return how many bytes that were."""
        handlers, recorder = self._handlers, self.recorder
        recorded, told, word = recorder.recorded, 0, self._newest
        try:
            for self.now, word in iter_unpack(on_tape.EVENT_FORMAT, events):
                code = word & on_tape.CODE_MASK
                told += _EVENT_BYTES
                try:
                    if lesson is not None:
                        lesson.event(word)
                    handlers[code](word >> on_tape.ARGUMENT_SHIFT)
                except Exception as error:
                    if is_from_script(error):
                        raise
                    self._fault(code, error)
                    if lesson is not None:
                        lesson.plain = False
                    if self._given_up:
                        break
                if to_edge and recorder.recorded != recorded:
                    break
        finally:
            self._newest, self._told = word, told
        return told

    def _fault(self, code: int, error: Exception) -> None:
        place = f"hook {on_tape.PLACES.get(code, 'loop')}"
        self._faults.note(place, error)
        self.abandon()
        if self._faults.spent(place):
            self._given_up = True
            self._tape.thread = 0

    # Handlers, by code; each takes the event's argument.

    def _make_handlers(self) -> "list[Callable[[int], None]]":
        loop, recorder = self.loop, self.recorder
        told: dict[int, Callable[[int], None]] = {
            on_tape.DRAW: self._draw,
            on_tape.CLOSURE_DRAW: lambda _: loop.closure_draw_begin(),
            on_tape.DRAWN: lambda samples: loop.draw_end(samples),
            on_tape.EXHAUSTED: self._exhausted,
            on_tape.FORWARD: lambda _: loop.forward_begin(True),
            on_tape.EVALUATE: self._evaluate,
            on_tape.FORWARD_END: lambda _: loop.forward_end(),
            on_tape.BACKWARD: self._backward,
            on_tape.BACKWARD_END: lambda _: loop.backward_end(self._depth_before()),
            on_tape.ZERO: self._zero,
            on_tape.ZERO_END: lambda _: loop.leave(self._depth_before()),
            on_tape.OPTIMIZER: lambda optimizer: loop.optimizer_begin(optimizer),
            on_tape.OPTIMIZER_END: lambda optimizer: loop.optimizer_end(optimizer),
            on_tape.STALE: lambda _: recorder.unwind(),
            on_tape.ELSEWHERE: lambda optimizer: loop.stepped_elsewhere(optimizer),
            on_tape.SCALER: self._scaler,
            on_tape.SCALER_END: self._scaler_end,
            on_tape.SCALER_FAILED: lambda _: loop.leave(self._depth_before()),
            on_tape.SAVE: self._save,
            on_tape.SAVE_END: lambda _: loop.save_end(self._depth_before()),
            on_tape.ENTER: lambda slot: loop.enter(slot),
            on_tape.EXIT: lambda _: loop.exit(),
            on_tape.STEP: lambda samples: loop.client_step(samples),
            on_tape.SAMPLES: lambda samples: loop.count(samples),
            on_tape.OUTER_DRAW: self._draw,
            on_tape.OUTER_DRAWN: lambda samples: loop.draw_end(samples),
            on_tape.BETWEEN: lambda _: loop.finish(),
            on_tape.ADOPT: self._adopt,
            on_tape.ABANDON: lambda _: self.abandon(),
            on_tape.TICKET: self._ticket,
            on_tape.READY: self._ready,
            on_tape.TOKENS: self._tokens,
            on_tape.COLLECTIVE: self._collective,
            on_tape.COLLECTIVE_END: lambda _: loop.leave(self._depth_before()),
            on_tape.REDUCTION: self._reduction,
            on_tape.PASS: lambda _: loop.pass_begins(),
            on_tape.LEFT: self._iterator_left,
            on_tape.NOT_TRAINING: lambda ns: recorder.leave_out(ns),
            on_tape.OPTIMIZER_MADE: lambda optimizer: loop.optimizer_made(optimizer),
        }
        return [told[code] for code in range(on_tape.CODES)]

    def _draw(self, argument: int) -> None:
        loop, iterator = self.loop, argument & on_tape.ITERATOR_MASK
        outermost = not self.recorder.inside(DATA)
        loop.draw_begin(
            iterator,
            gradients=not argument & on_tape.DRAW_WITHOUT_GRADIENTS,
            evaluation_mode=bool(argument & on_tape.DRAW_IN_EVALUATION),
        )
        if outermost and iterator:
            self.passes.draw(iterator, self.now, loop.train_steps, loop.validate_steps)

    def _exhausted(self, iterator: int) -> None:
        loop = self.loop
        loop.draw_stop(iterator)
        if not self.recorder.inside(DATA):
            self.passes.exhausted(iterator, self.now, loop.train_steps, loop.validate_steps)

    def _iterator_left(self, argument: int) -> None:
        iterator = argument & on_tape.ITERATOR_MASK
        self.loop.left(iterator, for_sure=not argument & on_tape.LEFT_NAMED)

    def _evaluate(self, argument: int) -> None:
        self.loop.forward_begin(
            False,
            evaluation_mode=not argument & on_tape.EVALUATE_IN_TRAINING_MODE,
            backward_may_follow=bool(argument & on_tape.EVALUATE_WITH_GRADIENTS),
        )

    def _ready(self, following: int) -> None:
        self.loop.ready = following - 1

    def _tokens(self, tokens: int) -> None:
        self.loop.tokens += tokens

    def _ticket(self, following: int) -> None:
        self.recorder.ticket = following - 1

    def _call(self, optimizer: int = 0) -> None:
        self._calls.append((self.recorder.depth, optimizer, self.loop.optimizer_calls))

    def _depth_before(self) -> int:
        # None under way: it was begun before a failure made us forget.
        return self._calls.pop()[0] if self._calls else self.recorder.depth

    def _backward(self, _: int) -> None:
        self._call()
        self.loop.backward_begin()

    def _zero(self, _: int) -> None:
        self._call()
        self.loop.zero_begin()

    def _scaler(self, optimizer: int) -> None:
        self._call(optimizer)
        self.loop.optimizer_begin(optimizer)

    def _scaler_end(self, _: int) -> None:
        if self._calls:
            depth, optimizer, calls = self._calls.pop()
            self.loop.leave(depth + 1)
            # The scaler's own call is one; a further one says that it let the optimizer step.
            self.loop.optimizer_end(optimizer, called_off=self.loop.optimizer_calls == calls + 1)

    def _save(self, _: int) -> None:
        self._call()
        self.loop.save_begin()

    def _collective(self, ago: int) -> None:
        self._call()
        self.loop.recorder.arrive(ago)

    def _reduction(self, ago: int) -> None:
        # It has no end of its own: the backward's is.
        if self.recorder.inside(BACKWARD):
            self.loop.recorder.arrive(ago)

    def _adopt(self, _: int) -> None:
        self._calls.clear()
        self.loop.adopt()
