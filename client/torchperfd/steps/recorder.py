"""The recorder: exclusive phase times of one thread, step by step, in fixed memory.

The reader of the ring buffer writes into the live row of the ring of steps
(:mod:`torchperfd.steps.step_ring`), which the flusher drains. Dropped steps are counted.

A stack of open phases makes times exclusive: entering one stops the clock of the one around it. The bottom is
the *gap*, the time of no phase, so that a step's phases always sum to its duration exactly.
"""

from array import array
from typing import Final, Protocol

from torchperfd.steps.phases import (
    AFTER_EVALUATION,
    BACKWARD,
    COLLECTIVE_WAIT,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    TRAIN,
    ZERO_GRAD,
    StepBatch,
)
from torchperfd.steps.step_ring import (
    CALLS,
    DURATION,
    INDEX,
    KIND,
    NO_CUDA_EVENT,
    NS,
    SAMPLES,
    SQUARES,
    START,
    ZERO_ROW,
    DeviceClock,
    HeldStep,
    StepRing,
    split,
)
from torchperfd.steps.step_series import ArrivalRecorder

MAX_DEPTH: Final = 64

_HOOKED: Final = frozenset((DATA, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD))


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
        "_clock",
        "_exclusive",
        "_held",
        "_held_depth",
        "_row",
        "_stack",
        "_start",
        "arrivals",
        "cuda_event_id",
        "depth",
        "device",
        "dropped",
        "is_open",
        "is_paused",
        "last",
        "recorded",
        "ring",
        "samples",
        "wall_offset",
    )

    def __init__(self, clock: Clock, capacity: int = 4096) -> None:
        self.is_open = False
        self.is_paused = False
        """Whether the time since the newest phase boundary is no step's, unless it turns out to be."""
        self.depth = 0
        self.last = 0
        """When the newest phase boundary was, on the monotonic clock."""
        self.samples = 0
        self.recorded = 0
        self.dropped = 0
        self.arrivals = ArrivalRecorder()
        """When the steps' collectives were come to."""
        self.device: DeviceClock | None = None
        self.cuda_event_id = NO_CUDA_EVENT
        """CUDA event id of the event that is being handled; -1 for none."""
        self._clock = clock
        self._start = 0
        self.ring = StepRing(capacity)
        self._row = self.ring.live_row
        self._held = HeldStep()
        # Down to which depth the phases that were open at the edge that is held still are.
        self._held_depth = 0
        self._stack = [OTHER] * (MAX_DEPTH + 1)
        self._exclusive = [0] * (MAX_DEPTH + 1)
        self.wall_offset = 0
        """By how many nanoseconds the wall clock is ahead of the monotonic one."""

    @property
    def innermost(self) -> int:
        """The phase that the open step is in."""
        phase = self._stack[min(self.depth, MAX_DEPTH)]
        return OTHER if phase == AFTER_EVALUATION else phase

    @property
    def gap(self) -> int:
        """What the time of no phase is charged to."""
        return self._stack[0]

    def open_phases(self) -> list[int]:
        """Return the phases that the open step is in, outermost first; none outside a step."""
        if not self.is_open:
            return []
        first = 0 if self._stack[0] == LOSS else 1
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
        if self.is_paused:
            self.resume()
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
        if self.is_paused:
            self.resume()
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
        row[NS + phase] += spent
        row[CALLS + phase] += 1
        row[SQUARES + phase] += spent * spent
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
        if not self.is_open:
            self.open()
        row = self._row
        start, duration = self._end_step(kind, index, at_last=at_last)
        self.recorded += 1
        self._row = self.ring.advance(kind, index, start, duration, self.samples)
        if self._row is row:
            self.dropped += 1
        self._begin_step(kind, at_last=at_last)

    def close_several(self, kind: int, index: int, count: int, *, at_last: bool = False) -> None:
        """End the step, which was so many; only now that is known. See :meth:`close`."""
        start, duration = self._end_step(kind, index, at_last=at_last)
        row = self._row
        row[START], row[DURATION], row[SAMPLES] = start, duration, self.samples
        self._record_several(row, kind, index, count)
        self._begin_step(kind, at_last=at_last)

    def _record_several(self, row: list[int], kind: int, index: int, count: int) -> None:
        row[INDEX], row[KIND] = index, kind
        self.recorded += count
        for batch in split(row, count):
            self.ring.append(batch)
        row[:] = ZERO_ROW

    def _end_step(self, kind: int, index: int, *, at_last: bool) -> tuple[int, int]:
        """Charge all time until the end; return when the step began, Unix time, and its duration, ns."""
        if self.is_paused and not at_last:
            self.resume()
        self.is_paused = False
        now = self.last if at_last else self._clock.now
        if self.device is not None and not at_last:
            self._mark_boundary()
        exclusive = self._exclusive
        depth = min(self.depth, MAX_DEPTH)
        exclusive[depth] += now - self.last
        if depth:
            self._charge_open_phases(depth)
        self._charge_gap()
        if kind == TRAIN:
            self.arrivals.close(index)
        else:
            self.arrivals.forget()
        start, duration = self._start + self.wall_offset, now - self._start
        self.last = self._start = now
        return start, duration

    def _begin_step(self, kind: int, *, at_last: bool) -> None:
        self.samples = 0
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
        if self.is_paused and not at_last:
            self.resume()
        self.is_paused = False
        now = self.last if at_last else self._clock.now
        if self.device is not None:
            if not at_last:
                self._mark_boundary()
            self.device.hold()
        depth = min(self.depth, MAX_DEPTH)
        exclusive = self._exclusive
        exclusive[depth] += now - self.last
        self.last = now
        self._charge_gap()
        self._stack[0] = OTHER
        phases = [*zip(self._stack[1 : depth + 1], exclusive[1 : depth + 1], strict=True)]
        self._held.take(self._row, self._start + self.wall_offset, now - self._start, self.samples, phases)
        self._held_depth = depth
        self.arrivals.hold()

    def rejoin(self) -> None:
        """The step did not end where it was held: that and the open one are a single step."""
        if self.device is not None:
            self.device.rejoin()
        self.arrivals.rejoin()
        held = self._held
        if held.is_within:
            held.is_within = False
            return
        self.open()
        self._start -= held.row[DURATION]
        self.samples += held.row[SAMPLES]
        held.add_to(self._row)

    def release(self, kind: int, index: int) -> None:
        """The step did end where it was held; the open one is what followed."""
        self.separate()
        self.arrivals.release(index)
        if self.device is not None:
            self.device.release(kind)
        held = self._held
        self.recorded += 1
        spare = self.ring.insert(held.row, kind, index)
        if spare is held.row:
            self.dropped += 1
        held.row, self._row = spare, self.ring.live_row

    def release_several(self, kind: int, index: int, count: int) -> None:
        """The step did end where it was held, and was so many. See :meth:`release`."""
        self.separate()
        self.arrivals.release(index)
        if self.device is not None:
            self.device.release(kind)
        self._record_several(self._held.row, kind, index, count)

    def pause(self) -> None:
        """From now on time is no step's, until the next phase begins or :meth:`resume`."""
        if self.is_open and not self.is_paused:
            if self.device is not None:
                self._mark_boundary()
            now = self._clock.now
            self._exclusive[min(self.depth, MAX_DEPTH)] += now - self.last
            self.last = now
            self.is_paused = True

    def resume(self) -> None:
        """From now on it is the open step's again."""
        if self.is_paused:
            self.is_paused = False
            self.leave_out(self._clock.now - self.last)
            if self.device is not None:
                self.device.boundary(-1, self.cuda_event_id)

    def leave_in(self) -> None:
        """What has passed since the pause is the open step's after all."""
        self.is_paused = False

    def discard(self) -> None:
        """Forget what is held: it belongs to no step."""
        self.separate()
        self.arrivals.discard()
        if self.device is not None:
            self.device.release(0)

    def separate(self) -> None:
        """Take what is held out of the open step."""
        held = self._held
        if held.is_within:
            self._start += held.row[DURATION]
            self.samples -= held.row[SAMPLES]
            held.take_out(self._row, self._exclusive, self._held_depth)

    def abandon(self) -> None:
        """Forget the open step: its time belongs to no step. The script's own phases stay open.

        What is held stays held.
        """
        self.separate()
        if self.device is not None:
            self.device.close(0)
        self._row[:] = ZERO_ROW
        self.arrivals.forget()
        self.samples = 0
        self.is_paused = False
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
                self.device.boundary(-1, NO_CUDA_EVENT)

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
        if not self.is_open or self.is_paused or self._held.is_within or depth > MAX_DEPTH:
            return None
        if self.cuda_event_id != NO_CUDA_EVENT:
            return None  # events are marked for the device
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
        self.ring.append(batch)
        if self.device is not None:
            self.device.pass_over(batch.kind[0], batch.count)

    def make_room(self) -> None:
        """Put aside what was recorded so far, to be drained; under the same lock as that."""
        self.ring.make_room()

    def _charge_open_phases(self, depth: int) -> None:
        """Count a phase that is open across an edge as one call on either side."""
        exclusive, stack, row = self._exclusive, self._stack, self._row
        for inner in range(depth, 0, -1):
            phase, spent = stack[inner], exclusive[inner]
            exclusive[inner] = 0
            if stack[inner - 1] == phase:
                exclusive[inner - 1] += spent
                continue
            row[NS + phase] += spent
            row[CALLS + phase] += 1
            row[SQUARES + phase] += spent * spent

    def _charge_gap(self) -> None:
        spent = self._exclusive[0]
        self._exclusive[0] = 0
        phase = self._stack[0]
        row = self._row
        row[NS + phase] += spent
        if phase != OTHER:
            row[CALLS + phase] += 1
            row[SQUARES + phase] += spent * spent
            if self.device is not None:
                self.device.call(phase)

    def _mark_boundary(self) -> None:
        """Report to the device clock the phase that was the innermost until now."""
        if self.device is not None:
            phase = self._stack[min(self.depth, MAX_DEPTH)] if self.is_open else -1
            self.device.boundary(phase, self.cuda_event_id)

    def drain(self) -> list[StepBatch]:
        """Take the finished steps, oldest first; called by the flusher."""
        return self.ring.drain()
