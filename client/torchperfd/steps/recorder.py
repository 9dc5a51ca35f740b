"""The recorder: exclusive phase times of one thread, step by step, in fixed memory.

The reader of the ring buffer writes into the live row of the ring of steps
(:mod:`torchperfd.steps.phases`), which the flusher drains. Dropped steps are counted.
"""

from array import array

from torchperfd.steps.phase_stack import MAX_DEPTH, Clock, PhaseStack
from torchperfd.steps.phases import (
    CALLS,
    DURATION,
    INDEX,
    KIND,
    NO_CUDA_EVENT,
    NS,
    OTHER,
    SAMPLES,
    SQUARES,
    START,
    TRAIN,
    ZERO_ROW,
    HeldStep,
    StepBatch,
    StepRing,
    split,
)


class Recorder(PhaseStack):
    """Times the phases of the steps of one thread."""

    def __init__(self, clock: Clock, capacity: int = 4096) -> None:
        self.ring = StepRing(capacity)
        super().__init__(clock, self.ring.live_row)
        self.recorded = 0
        self.dropped = 0
        self._held = HeldStep()

    def close(self, kind: int, index: int, *, count: int = 1, at_last: bool = False) -> None:
        """End the step and start the next at the same instant.

        Args:
            kind: ``TRAIN`` or ``VALIDATE``.
            index: The step's number within its kind.
            count: How many steps it was, where only now that is known.
            at_last: End the step at its newest phase boundary instead of now, and leave
                no step open.
        """
        if not self.is_open:
            self.open()
        row = self._row
        start, duration = self._end_step(kind, index, at_last=at_last)
        if count > 1:
            row[START], row[DURATION], row[SAMPLES] = start, duration, self.samples
            self._record_several(row, kind, index, count)
        else:
            self.recorded += 1
            self._row = self.ring.advance(kind, index, start, duration, self.samples)
            if self._row is row:
                self.dropped += 1
        self.samples = 0
        self._stack[0] = OTHER
        self.is_open = not at_last
        if self.device is not None:
            self.device.close(kind)

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

    def release(self, kind: int, index: int, *, count: int = 1) -> None:
        """The step did end where it was held, and was so many; the open one is what followed."""
        self.separate()
        self.arrivals.release(index)
        if self.device is not None:
            self.device.release(kind)
        held = self._held
        if count > 1:
            self._record_several(held.row, kind, index, count)
            return
        self.recorded += 1
        spare = self.ring.insert(held.row, kind, index)
        if spare is held.row:
            self.dropped += 1
        held.row, self._row = spare, self.ring.live_row

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

    def drain(self) -> list[StepBatch]:
        """Take the finished steps, oldest first; called by the flusher."""
        return self.ring.drain()
