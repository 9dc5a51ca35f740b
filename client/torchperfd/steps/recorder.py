"""The recorder: exclusive phase times of one thread, step by step, in fixed memory.

The reader of the ring buffer writes, the flusher drains. Both sides are plain assignments under
the GIL, and the rows are made once and reused. When the ring is full, new steps are dropped
and counted.

A stack of open phases makes times exclusive: entering a phase stops the clock
of the one around it. The bottom of the stack is the *gap*, the time of no
phase, so that a step's phases always sum to its duration exactly.
"""

from array import array
from operator import mul
from typing import Final, Protocol

from torchperfd.steps.arrivals import ArrivalRecorder
from torchperfd.steps.step_batch import PhaseColumns, StepBatch
from torchperfd.v1.contract import MAX_USER_PHASES, PHASES

PHASE_SLOTS: Final = len(PHASES) + MAX_USER_PHASES
DATA: Final = PHASES.index("data")
FORWARD: Final = PHASES.index("forward")
LOSS: Final = PHASES.index("loss")
BACKWARD: Final = PHASES.index("backward")
OPTIMIZER: Final = PHASES.index("optimizer")
ZERO_GRAD: Final = PHASES.index("zero_grad")
COLLECTIVE_WAIT: Final = PHASES.index("collective_wait")
CHECKPOINT: Final = PHASES.index("checkpoint")
OTHER: Final = PHASES.index("other")

TRAIN: Final = 1
VALIDATE: Final = 2

# Columns of a row: a header, then per phase slot exclusive nanoseconds, calls, and squares of the calls'
# nanoseconds, which outgrow 64 bits.
_INDEX, _KIND, _START, _DURATION, _SAMPLES, _NS = range(6)
_CALLS: Final = _NS + PHASE_SLOTS
_SQUARES: Final = _CALLS + PHASE_SLOTS

_HOOKED: Final = frozenset((DATA, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD))

MAX_DEPTH: Final = 64
_ZERO_ROW: Final = (0,) * (_SQUARES + PHASE_SLOTS)


class DeviceClock(Protocol):
    """Times the same phases on a device; its methods match those of the recorder."""

    def boundary(self, phase: int, cuda_event_id: int) -> None:
        """Since the last boundary ``phase`` was the innermost; -1 for no step, or for no event id."""

    def call(self, phase: int) -> None:
        """A call of ``phase`` has ended."""

    def close(self, kind: int) -> None:
        """The step has ended; 0 when it is to be forgotten."""

    def hold(self) -> None:
        """The step may have ended."""

    def rejoin(self) -> None:
        """It had not."""

    def release(self, kind: int) -> None:
        """It had; 0 when it is to be forgotten."""


class Clock(Protocol):
    """Time of the event that is being handled, monotonic nanoseconds."""

    now: int


class Recorder:
    """Times the phases of the steps of one thread.

    Args:
        capacity: Steps the ring holds; about 1.5 kB each.
        clock: Time of the event that is being handled.
    """

    __slots__ = (
        "_bound",
        "_clock",
        "_exclusive",
        "_held",
        "_held_depth",
        "_held_phases",
        "_held_within",
        "_read",
        "_ring",
        "_row",
        "_stack",
        "_start",
        "_taken",
        "_written",
        "arrivals",
        "capacity",
        "cuda_event_id",
        "depth",
        "device",
        "dropped",
        "is_open",
        "last",
        "recorded",
        "samples",
        "wall_offset",
    )

    def __init__(
        self,
        clock: Clock,
        capacity: int = 4096,
    ) -> None:
        self.capacity = capacity
        self.is_open = False
        self.depth = 0
        self.last = 0
        """When the newest phase boundary was, on the monotonic clock."""
        self.samples = 0
        self.recorded = 0
        self.dropped = 0
        self.arrivals = ArrivalRecorder()
        """When the steps' collectives were come to."""
        self.device: DeviceClock | None = None
        self.cuda_event_id = -1
        """CUDA event id of the event that is being handled; -1 for none."""
        self._clock = clock
        self._start = 0
        # Lists, not arrays: adding to an element is three times as fast. The live row is the
        # slot of the ring that comes next, so nothing is copied when a step ends.
        self._ring = [list(_ZERO_ROW) for _ in range(capacity + 1)]
        self._row = self._ring[0]
        self._held = list(_ZERO_ROW)
        self._held_within = False
        # What was open at the edge that is held; and down to which depth it still is.
        self._held_phases: list[tuple[int, int]] = []
        self._held_depth = 0
        self._stack = [OTHER] * (MAX_DEPTH + 1)
        self._exclusive = [0] * (MAX_DEPTH + 1)
        self._written = 0
        self._read = 0
        self._taken: list[StepBatch] = []
        # Steps that may be written until somebody drains.
        self._bound = capacity
        self.wall_offset = 0
        """By how many nanoseconds the wall clock is ahead of the monotonic one."""

    @property
    def innermost(self) -> int:
        """The phase that the open step is in."""
        return self._stack[min(self.depth, MAX_DEPTH)]

    def open_phases(self) -> list[int]:
        """Return the phases that the open step is in, outermost first; none outside a step."""
        if not self.is_open:
            return []
        first = 1 if self._stack[0] == OTHER else 0
        return self._stack[first : min(self.depth, MAX_DEPTH) + 1]

    # The writing side.

    def open(self) -> None:
        """Start a step now; does nothing inside one."""
        if not self.is_open:
            self._mark_boundary()
            self.last = self._start = self._clock.now
            self._stack[0] = OTHER
            self.is_open = True

    def enter(self, phase: int) -> None:
        """Enter a phase, inside the one that is open; starts a step when none is."""
        now = self._clock.now
        if self.device is not None:
            self._mark_boundary()
        if not self.is_open:
            self.last = self._start = now
            self._stack[0] = OTHER
            self.is_open = True
        depth = self.depth
        self.depth = inner = depth + 1
        if depth < MAX_DEPTH:
            exclusive = self._exclusive
            exclusive[depth] += now - self.last
            exclusive[inner] = 0
            self.last = now
            self._stack[inner] = phase

    def push(self, phase: int) -> None:
        """Enter a phase that starts no step: between steps its time is not recorded."""
        if self.is_open:
            self.enter(phase)
            return
        if self.depth < MAX_DEPTH:
            self._stack[self.depth + 1] = phase
            self._exclusive[self.depth + 1] = 0
        self.depth += 1

    def arrive(self, ago: int = 0) -> None:
        """Enter ``collective_wait``: the rank has come to a collective, ``ago`` ns ago. Starts no step."""
        if not self.is_open:
            self.push(COLLECTIVE_WAIT)
            return
        now, depth = self._clock.now, self.depth
        # Phases that were recorded since then keep their times.
        waited = min(ago, now - self.last)
        self.arrivals.arrive(now - ago + self.wall_offset)
        self.enter(COLLECTIVE_WAIT)
        if depth < MAX_DEPTH:
            self._exclusive[depth] -= waited
            self.last = now - waited

    def exit(self) -> None:
        """Leave the innermost phase; ignored when none is open."""
        depth = self.depth
        if depth == 0:
            return
        if self.device is not None:
            self._mark_boundary()
        self.depth = outer = depth - 1
        if outer < self._held_depth:
            self._held_depth = outer
        if depth > MAX_DEPTH or not self.is_open:
            return
        now = self._clock.now
        spent = self._exclusive[depth] + now - self.last
        self.last = now
        stack = self._stack
        phase = stack[depth]
        if stack[outer] == phase:
            # A phase inside itself (ZeRO steps an optimizer within a step) is one call.
            self._exclusive[outer] += spent
            return
        row = self._row
        row[_NS + phase] += spent
        row[_CALLS + phase] += 1
        row[_SQUARES + phase] += spent * spent
        if self.device is not None:
            self.device.call(phase)

    def name_gap(self, phase: int) -> None:
        """Charge the time of no phase to ``phase`` from the newest boundary on."""
        if self.is_open:
            self._charge_gap()
            self._stack[0] = phase

    def inside(self, phase: int) -> bool:
        """Return whether ``phase`` is open, at any depth."""
        return phase in self._stack[1 : self.depth + 1]

    def idle(self) -> bool:
        """Return whether no hooked phase is open; the script's own may be, around whole loops."""
        return not self.depth or _HOOKED.isdisjoint(self._stack[1 : self.depth + 1])

    def unwind(self) -> None:
        """Leave every open phase: a hook's other half never came."""
        while self.depth:
            self.exit()

    def close(self, kind: int, index: int, *, at_last: bool = False) -> None:
        """End the step and start the next at the same instant.

        Args:
            kind: ``TRAIN`` or ``VALIDATE``.
            index: The step's number within its kind.
            at_last: End the step at its newest phase boundary instead of now, and leave
                no step open.
        """
        self.open()
        now = self.last if at_last else self._clock.now
        if self.device is not None and not at_last:
            self._mark_boundary()
        exclusive, row = self._exclusive, self._row
        depth = min(self.depth, MAX_DEPTH)
        exclusive[depth] += now - self.last
        if depth:
            self._charge_open_phases(depth)
        self._charge_gap()
        other = row[_NS + OTHER]
        row[_CALLS + OTHER] = 1
        row[_SQUARES + OTHER] = other * other
        row[_INDEX] = index
        row[_KIND] = kind
        row[_START] = self._start + self.wall_offset
        row[_DURATION] = now - self._start
        row[_SAMPLES] = self.samples
        if kind == TRAIN:
            self.arrivals.close(index)
        else:
            self.arrivals.forget()
        self.samples = 0
        self.recorded += 1
        written = self._written
        if written < self._bound:
            self._written = written = written + 1
            self._row = self._ring[written % (self.capacity + 1)]
        else:
            self.dropped += 1
            row[:] = _ZERO_ROW
        self.last = self._start = now
        self._stack[0] = OTHER
        self.is_open = not at_last
        if self.device is not None:
            self.device.close(kind)

    def hold(self, *, at_last: bool = False) -> None:
        """Note that the open step may end now: what it has so far is held.

        Made for steps that go on in the end: then noting it has cost a copy. :meth:`rejoin`,
        :meth:`release` or :meth:`discard` decides which it was.

        Args:
            at_last: It may have ended at its newest phase boundary instead of now.
        """
        # Where no step is open, an empty one is held: a start that belongs to an older step is no start.
        self.open()
        now = self.last if at_last else self._clock.now
        if self.device is not None:
            if not at_last:
                self._mark_boundary()
            self.device.hold()
        depth = min(self.depth, MAX_DEPTH)
        exclusive, held = self._exclusive, self._held
        exclusive[depth] += now - self.last
        self.last = now
        self._charge_gap()
        self._stack[0] = OTHER
        held[:] = self._row
        held[_START] = self._start + self.wall_offset
        held[_DURATION] = now - self._start
        held[_SAMPLES] = self.samples
        self.arrivals.hold()
        self._held_within = True
        self._held_phases = [*zip(self._stack[1 : depth + 1], exclusive[1:], strict=False)] if depth else []
        self._held_depth = depth

    def rejoin(self) -> None:
        """The step did not end where it was held: that and the open one are a single step."""
        if self.device is not None:
            self.device.rejoin()
        self.arrivals.rejoin()
        if self._held_within:
            self._held_within = False
            return
        self.open()
        held, row = self._held, self._row
        self._start -= held[_DURATION]
        self.samples += held[_SAMPLES]
        for column in range(_NS, len(row)):
            row[column] += held[column]

    def release(self, kind: int, index: int) -> None:
        """The step did end where it was held; the open one is what followed."""
        self.separate()
        self.arrivals.release(index)
        if self.device is not None:
            self.device.release(kind)
        held, ring, written = self._held, self._ring, self._written
        held[_KIND], held[_INDEX] = kind, index
        other = held[_NS + OTHER]
        held[_CALLS + OTHER] = 1
        held[_SQUARES + OTHER] = other * other
        self.recorded += 1
        if written < self._bound:
            # The live row moves on by a slot; the row that was there is the next to hold.
            following = (written + 1) % (self.capacity + 1)
            ring[written % (self.capacity + 1)] = held
            self._held, ring[following] = ring[following], self._row
            self._written = written + 1
        else:
            self.dropped += 1

    def discard(self) -> None:
        """Forget what is held: it belongs to no step."""
        self.separate()
        self.arrivals.discard()
        if self.device is not None:
            self.device.release(0)

    def separate(self) -> None:
        """Take what is held out of the open step."""
        if not self._held_within:
            return
        self._held_within = False
        held, row, exclusive = self._held, self._row, self._exclusive
        for column in range(_NS, len(row)):
            row[column] -= held[column]
        self._start += held[_DURATION]
        self.samples -= held[_SAMPLES]
        # A phase of the script's own around the edge is one call on either side.
        phases = [OTHER, *(phase for phase, _ in self._held_phases)]
        within = ended = 0
        for depth, (phase, spent) in reversed([*enumerate(self._held_phases, start=1)]):
            within += spent
            ended += spent
            if depth <= self._held_depth:
                exclusive[depth] -= ended
                ended = 0
            if phases[depth - 1] == phase:
                continue
            row[_NS + phase] -= ended
            held[_NS + phase] += within
            held[_CALLS + phase] += 1
            held[_SQUARES + phase] += within * within
            within = ended = 0
        # A phase of the gap's own name, outermost, is part of the gap.
        row[_NS + OTHER] -= ended
        held[_NS + OTHER] += within

    def abandon(self) -> None:
        """Forget the open step: its time belongs to no step. The script's own phases stay open.

        What is held stays held.
        """
        self.separate()
        if self.device is not None:
            self.device.close(0)
        self._row[:] = _ZERO_ROW
        self.arrivals.forget()
        self.samples = 0
        if not self.idle():
            self.depth = 0
        for depth in range(min(self.depth, MAX_DEPTH) + 1):
            self._exclusive[depth] = 0
        self.is_open = False

    def skip(self, now: int) -> None:
        """Move the start of a step that has just begun, if one has, to ``now``."""
        if self.is_open:
            self.last = self._start = now
            # What the event goes on to begin, begins now, too: not before its own step.
            self._clock.now = now
            if self.device is not None:
                self.device.boundary(-1, -1)

    def leave_out(self, ns: int) -> None:
        """The thread did work of ours until now, for so many ns at most: it is no part of the step."""
        if self.is_open:
            ns = max(0, min(ns, self._clock.now - self.last))
            self.last += ns
            self._start += ns

    # Steps that were recorded by a template; called under the lock of the drain.

    def state_key(self) -> tuple[int, ...] | None:
        """Return the open phases at a step edge: equal keys lead to equal steps for equal events.

        None if there is no such key: no step is open, or its state is more than its open phases.
        """
        depth = self.depth
        if not self.is_open or self.device is not None or self._held_within or depth > MAX_DEPTH:
            return None
        if self.samples or self.arrivals.pending or any(self._row):
            return None
        return tuple(self._stack[: depth + 1])

    def packed_state(self) -> "array[int]":
        """Return the state at a step edge: last, start, depth; exclusive ns, phase by depth."""
        return array("q", (self.last, self._start, self.depth, *self._exclusive, *self._stack))

    def reset_to(self, state_key: "array[int]", batch: StepBatch) -> None:
        """Append a batch of steps and continue from the edge after it, whose state is ``state_key``."""
        self.last, self._start, depth = state_key[:3]
        self._exclusive[: depth + 1] = state_key[3 : 4 + depth]
        self.recorded += batch.count
        self.make_room()
        self._taken.append(batch)

    def make_room(self) -> None:
        """Put aside what was recorded so far, to be drained; under the same lock as that."""
        self._taken += self._take()
        self._bound = self._read + self.capacity

    def _charge_open_phases(self, depth: int) -> None:
        """Count a phase that is open across an edge as one call on either side."""
        exclusive, stack, row = self._exclusive, self._stack, self._row
        for inner in range(depth, 0, -1):
            phase, spent = stack[inner], exclusive[inner]
            exclusive[inner] = 0
            if stack[inner - 1] == phase:
                exclusive[inner - 1] += spent
                continue
            row[_NS + phase] += spent
            row[_CALLS + phase] += 1
            row[_SQUARES + phase] += spent * spent

    def _charge_gap(self) -> None:
        spent = self._exclusive[0]
        self._exclusive[0] = 0
        phase = self._stack[0]
        row = self._row
        row[_NS + phase] += spent
        if phase != OTHER:
            row[_CALLS + phase] += 1
            row[_SQUARES + phase] += spent * spent
            if self.device is not None:
                self.device.call(phase)

    def _mark_boundary(self) -> None:
        """Report to the device clock the phase that was the innermost until now."""
        if self.device is not None:
            phase = self._stack[min(self.depth, MAX_DEPTH)] if self.is_open else -1
            self.device.boundary(phase, self.cuda_event_id)

    # The draining side.

    def drain(self) -> list[StepBatch]:
        """Take the finished steps, oldest first."""
        self.make_room()
        taken, self._taken = self._taken, []
        return taken

    def _take(self) -> list[StepBatch]:
        read, written = self._read, self._written
        rows = [self._ring[number % (self.capacity + 1)] for number in range(read, written)]
        batches, start = [], 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or not _follows(rows[stop - 1], rows[stop]):
                batches.append(_batch(rows[start:stop]))
                start = stop
        for row in rows:
            row[:] = _ZERO_ROW
        # Only now may these rows be used again.
        self._read = written
        return batches


def _follows(row: list[int], following: list[int]) -> bool:
    """Return whether two rows belong to one stretch."""
    kind, index = row[_KIND], row[_INDEX]
    if (following[_KIND], following[_INDEX]) != (kind, index + 1):
        return False
    return index > 0 or kind != TRAIN


def _batch(rows: list[list[int]]) -> StepBatch:
    columns = [*zip(*rows, strict=True)]
    duration = columns[_DURATION]
    phases = {}
    for slot in range(PHASE_SLOTS):
        calls = columns[_CALLS + slot]
        if any(calls):
            ns = columns[_NS + slot]
            phases[slot] = PhaseColumns(
                ns=_column(ns),
                calls=_column(calls),
                total_ns=sum(ns),
                total_calls=sum(calls),
                squares=float(sum(columns[_SQUARES + slot])),
            )
    return StepBatch(
        index=_column(columns[_INDEX]),
        kind=_column(columns[_KIND]),
        start=_column(columns[_START]),
        duration=_column(duration),
        samples=_column(columns[_SAMPLES]),
        phases=phases,
        total_ns=sum(duration),
        squares=float(sum(map(mul, duration, duration))),
        total_samples=sum(columns[_SAMPLES]),
    )


def _column(values: tuple[int, ...]) -> "memoryview[int]":
    return memoryview(array("q", values))
