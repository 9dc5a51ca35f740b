"""Device times: what the phases of steps take on the device, from CUDA events.

The host only launches work, so its clock does not show when the device does it. An event
recorded at every phase boundary does: between two of them the device was in the phase that
lay between them on the host, working or waiting.

Nothing here waits for the device. Events come from a pool of fixed size and are asked for
their times once the device has passed them.

An event costs the training thread some microseconds, so that there is a number of them for each
flush: the steps that have all of theirs stand for those that have not. So they do where an event
is missing for another reason, such as a CUDA graph that is being captured.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, TypeVar

from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log
from torchperfd.steps.device_times import DeviceTime, EndedSteps, StepTimes
from torchperfd.steps.phases import NO_CUDA_EVENT

NO_PHASE: Final = -1

MARKS: Final = 64
"""Events per flush, to begin with: enough for some whole steps."""

_LIMIT: Final = 10
_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

EventT = TypeVar("EventT", bound="Event")


class Event(Protocol):
    """A point in the work of a device, as ``torch.cuda.Event(enable_timing=True)`` is once recorded."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to another; the device has passed both."""


class DeviceTimes:
    """Times the phases of one thread's steps on one device.

    :meth:`mark` belongs to the training thread, everything else to the thread that reads its events;
    the two share plain integers and a deque, and no lock. The replay reports steps with the
    recorder's methods: :meth:`close`, :meth:`hold`, :meth:`rejoin`, :meth:`release`.

    Args:
        record: Puts an event behind all work of the calling thread's current stream.
        capturing: Returns whether the calling thread's current stream is capturing a graph.
        apart: Makes a context, given an event that was recorded, in which events may be queried
            whatever other threads capture; it yields whether it could.
        capacity: Events that may be under way at once; they are made as they are needed.

    Attributes:
        lost: Intervals charged to no phase: an event was missing or could not be read.
        spent: Called on the training thread when the number of events is used up: no mark is needed until
            :meth:`allow`.
        failure: The newest error, in one line. After ten, nothing is marked or read any more.
    """

    def __init__(
        self,
        make: Callable[[], EventT],
        record: Callable[[EventT], None],
        capturing: Callable[[], bool] = lambda: False,
        apart: Callable[[EventT], AbstractContextManager[bool]] = lambda _: nullcontext(True),
        capacity: int = 4096,
    ) -> None:
        self.capacity = capacity
        self.spent: Callable[[], object] = lambda: None
        self.lost = 0
        self.failure = ""
        self._make: Callable[[], Event] = make
        self._record: Callable[[Any], None] = record
        self._capturing = capturing
        self._apart: Callable[[Any], AbstractContextManager[bool]] = apart
        self._failures = 0
        self._budget = self._allowed = MARKS
        # Events with ids from freed to marked are under way; they lie in a ring.
        self._marked = 0
        self._freed = 0
        self._events: list[Any] = [None] * capacity
        self._spare: deque[Event] = deque()
        # Of the replay: its newest event id, its newest missing one, and the intervals to read.
        self._last = NO_CUDA_EVENT
        self._seen = NO_CUDA_EVENT
        self._pending: deque[tuple[StepTimes, int, int, int]] = deque()
        # The newest event that the device is known to have passed.
        self._passed = NO_CUDA_EVENT
        self._step = StepTimes()
        self._held: StepTimes | None = None
        self._ended = EndedSteps()

    # The training thread's side.

    def mark(self) -> int:
        """Record an event on the current stream.

        Returns:
            The event's id, larger than all before; ``NO_CUDA_EVENT`` where none was recorded.
        """
        cuda_event_id = self._marked
        if self._allowed <= 0:
            self.spent()
            return NO_CUDA_EVENT
        if cuda_event_id - self._freed >= self.capacity or self._failures >= _LIMIT:
            return NO_CUDA_EVENT
        self._allowed -= 1
        try:
            if self._capturing():
                return NO_CUDA_EVENT
            event = self._spare.pop() if self._spare else self._make()
            self._record(event)
        except Exception as error:
            if is_from_script(error):
                raise
            self._fail(error)
            return NO_CUDA_EVENT
        self._events[cuda_event_id % self.capacity] = event
        self._marked = cuda_event_id + 1
        return cuda_event_id

    # The replay's side.

    def allow(self) -> None:
        """Allow another number of marks: more of them than before if that was too few for one whole step."""
        if self._allowed <= 0 and not self._ended.had_whole:
            self._budget = max(self._budget, min(2 * self._budget, self.capacity // 2))
        self._allowed, self._ended.had_whole = self._budget, False

    @property
    def work(self) -> tuple[int, int, float]:
        """Whole training steps that were read, their ns without waits for ranks, the sum of its squares."""
        return self._ended.work_steps, self._ended.work_ns, self._ended.work_squares

    def boundary(self, phase: int, cuda_event_id: int) -> None:
        """Since the boundary before this one, the innermost open phase was ``phase``.

        Args:
            phase: Slot of the phase; ``NO_PHASE`` when no step was open.
            cuda_event_id: What :meth:`mark` returned at this boundary. Two boundaries may share it.
                After ``NO_CUDA_EVENT`` nothing is known until the next id but one.
        """
        first, self._last = self._last, cuda_event_id
        self._seen = max(self._seen, cuda_event_id)
        if phase != NO_PHASE:
            if NO_CUDA_EVENT in (first, cuda_event_id):
                self.lost += 1
                self._step.is_whole = False
            elif first != cuda_event_id:
                self._step.running.add(phase)
                self._step.pending += 1
                self._pending.append((self._step, phase, first, cuda_event_id))
        if not self._pending:
            self._free()

    def call(self, phase: int) -> None:
        """A call of ``phase`` has ended; one that had no interval on the device does not count.

        A phase that is still open when its step ends counts as a call by itself.
        """
        if phase in self._step.running:
            self._step.running.discard(phase)
            self._step.count(phase)

    def close(self, kind: int) -> None:
        """The step ended at the newest boundary; ``NO_KIND`` when it is to be forgotten."""
        self._ended.add(self._step, kind)
        self._step = StepTimes()

    def pass_over(self, kind: int, count: int) -> None:
        """Steps have ended of which nothing else is reported: none of their events was marked."""
        self._ended.pass_over(kind, count)
        self._step = StepTimes()
        self._step.is_whole = False
        self._last = NO_CUDA_EVENT

    def hold(self) -> None:
        """The step may have ended at the newest boundary."""
        self._held, self._step = self._step, StepTimes()

    def rejoin(self) -> None:
        """The step had not ended where it was held."""
        held, self._held = self._held, None
        if held is not None:
            held.absorb(self._step)
            self._step = held

    def release(self, kind: int) -> None:
        """The step had ended where it was held; ``NO_KIND`` when it is to be forgotten."""
        held, self._held = self._held, None
        if held is not None:
            self._ended.add(held, kind)

    def collect(self) -> list[DeviceTime]:
        """Read what the device has passed, oldest first, and return what that has added.

        What belongs to steps that have not ended is kept until they have.
        """
        self._ended.weigh()
        if self._pending and self._failures < _LIMIT:
            try:
                with self._apart(self._event(self._pending[0][3])) as apart:
                    if apart and not self._capturing():
                        self._read()
            except Exception as error:  # noqa: BLE001 - costs device times, and nothing else
                self._fail(error)
            self._free()
        return self._ended.give_out()

    def _read(self) -> None:
        pending = self._pending
        while pending:
            part, phase, first, last = pending[0]
            begin, end = self._event(first), self._event(last)
            # Both: on streams of their own, the later one may be passed first. Mostly an interval begins
            # where the one before has ended, and then it is known.
            if not ((first == self._passed or begin.query()) and end.query()):
                return
            self._passed = last
            pending.popleft()
            if part.into is not None:
                part = part.into
            part.pending -= 1
            ns = self._between(begin, end)
            if ns < 0:
                self.lost += 1
                part.is_whole = False
            else:
                part.ns[phase] = part.ns.get(phase, 0) + ns

    def _between(self, begin: Event, end: Event) -> int:
        try:
            return round(begin.elapsed_time(end) * 1e6)
        except Exception as error:  # noqa: BLE001 - of two devices, for example
            self._fail(error)
            return -1

    def _event(self, cuda_event_id: int) -> Event:
        event: Event = self._events[cuda_event_id % self.capacity]
        return event

    def _free(self) -> None:
        """Return the events that no interval needs, to come or to be read, to the pool."""
        if self._pending:
            needed = self._pending[0][2]
        else:
            needed = self._seen + 1 if self._last == NO_CUDA_EVENT else self._last
        for cuda_event_id in range(self._freed, needed):
            self._spare.append(self._event(cuda_event_id))
        # Only now may the training thread use these places again.
        self._freed = needed

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._failures == _LIMIT:
            log.warning("device times are off: %s", self.failure)


@contextmanager
def apart_from_captures(
    exchange: Callable[[Any], int], device: AbstractContextManager[Any]
) -> Iterator[bool]:
    """Keep what this thread does from failing a CUDA graph that another one captures.

    By default a capture of a graph fails if any thread makes a call that is unsafe in one, such as a query
    of an event. A thread may declare that its calls do not concern the captures of other threads.

    Args:
        exchange: The driver's ``cuThreadExchangeStreamCaptureMode``: puts in a thread's mode,
            hands back the one before, returns 0.
        device: Makes a device current. Without one, CUDA would make a context on the first.

    Yields:
        Whether it has worked.
    """
    with device:
        mode = ctypes.c_int(_THREAD_LOCAL)
        if exchange(ctypes.byref(mode)):
            yield False
            return
        try:
            yield True
        finally:
            exchange(ctypes.byref(mode))
