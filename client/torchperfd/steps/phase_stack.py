"""The stack of open phases of one thread, which makes their times exclusive.

Entering a phase stops the clock of the one around it. The bottom is the *gap*, the time of no phase, so that
a step's phases always sum to its duration exactly.
"""

from typing import Final, Protocol

from torchperfd.steps.phases import (
    AFTER_EVALUATION,
    BACKWARD,
    CALLS,
    COLLECTIVE_WAIT,
    DATA,
    FORWARD,
    LOSS,
    NO_CUDA_EVENT,
    NS,
    OPTIMIZER,
    OTHER,
    SQUARES,
    ZERO_GRAD,
    DeviceClock,
)
from torchperfd.steps.step_series import ArrivalRecorder

MAX_DEPTH: Final = 64

_HOOKED: Final = frozenset((DATA, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD))


class Clock(Protocol):
    """Time of the event that is being handled, monotonic nanoseconds."""

    now: int


class PhaseStack:
    """Times the open phases of one thread, and adds those that end to a step's row."""

    def __init__(self, clock: Clock, row: list[int]) -> None:
        self.is_open = False
        self.is_paused = False
        """Whether the time since the newest phase boundary is no step's, unless it turns out to be."""
        self.depth = 0
        self.last = 0
        """When the newest phase boundary was, on the monotonic clock."""
        self.samples = 0
        self.arrivals = ArrivalRecorder()
        """When the steps' collectives were come to."""
        self.device: DeviceClock | None = None
        self.cuda_event_id = NO_CUDA_EVENT
        """CUDA event id of the event that is being handled; -1 for none."""
        self._clock = clock
        self._start = 0
        self._row = row
        # Down to which depth the phases that were open at the edge that is held still are.
        self._held_depth = 0
        self._stack = [OTHER] * (MAX_DEPTH + 1)
        self._exclusive = [0] * (MAX_DEPTH + 1)
        self.wall_offset = 0
        """By how many nanoseconds the wall clock is ahead of the monotonic one."""

    @property
    def innermost(self) -> int:
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
