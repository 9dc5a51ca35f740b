"""The cost of torchperfd for training, and the detail that it gives up to stay within a limit.

The cost of one event is calibrated when the client attaches, and again every ten minutes. The overhead is
that cost times the number of events, the cost of device marks, and the CPU time of the flusher and of the
sampler of waits, which need the interpreter; all of it divided by the time of the steps.
"""

import time
from collections.abc import Callable
from typing import Final

from torchperfd.events import EventBuffer, Timed, codes
from torchperfd.safety.logs import log
from torchperfd.steps.step_series import median

CHECK_EVERY_S: Final = 30.0
"""Seconds of training time over which the overhead is averaged."""
CALIBRATE_EVERY_S: Final = 600.0

DEGRADATIONS: Final = ("device times", "the phases within a step", "everything")
"""The detail given up, level by level, while the limit is exceeded."""

_MIN_S: Final = 1.0
"""Of training time, before which the overhead is unknown."""
_PAIRS: Final = 32
_EVICTING_BYTES: Final = 8 * 2**20
"""More than a second-level cache holds: between two hooks torch runs, and evicts what they need."""
_MARKS_PER_TIMED: Final = 32

_WITHIN_A_STEP: Final = (codes.ZERO, codes.FORWARD, codes.BACKWARD, codes.COLLECTIVE)


def event_seconds() -> float:
    """Measure the time to write one event, in seconds, with cold caches.

    Takes some 30 ms of CPU time, and lets other threads run after each half millisecond.
    """
    buffer = EventBuffer(64)
    timed = Timed(buffer, _nothing, codes.BACKWARD, codes.BACKWARD_END)
    evicting = bytes(_EVICTING_BYTES)
    differences = []
    for _ in range(_PAIRS):
        differences.append(_cold_ns(timed, evicting) - _cold_ns(_nothing, evicting))
        buffer.skip(len(buffer))
    return max(0.0, median(differences)) / 2 / 1e9


def _cold_ns(call: Callable[[], object], evicting: bytes) -> int:
    time.sleep(0)  # training may want the interpreter
    bytearray(evicting)
    began = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - began


class Overhead:
    """Estimates the client's part of training time.

    Args:
        limit: The part of training time that may be spent on us; None for any.
        clock: Monotonic seconds.
        thread_clock: CPU seconds of the thread that calls :meth:`on_flush`, and of others that sample.
        calibrate: Measures what one event takes, in seconds.

    Attributes:
        degradation_level: How many of ``DEGRADATIONS`` have been given up.
        allows_extra_flushes: Whether to flush more often while a live page shows the run. Given up before
            any detail, since a page that is open must not cost a run its measurements.
    """

    def __init__(
        self,
        buffer: EventBuffer,
        limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
        calibrate: Callable[[], float] = event_seconds,
    ) -> None:
        self.limit = limit
        self.degradation_level = 0
        self.allows_extra_flushes = True
        self._buffer = buffer
        self._clock = clock
        self._thread_clock = thread_clock
        self._calibrate = calibrate
        self._calibrate_at = clock()
        self._event_seconds: float | None = None
        self._events = self._counted_events = 0
        self._marks = self._counted_marks = 0
        self._is_timing = False
        self._timed_marks = self._timed_marks_ns = 0
        self._thread_seconds = 0.0
        # Since the last check.
        self._spent = 0.0
        self._trained_before = self._trained = 0.0
        self._checked_ratio: float | None = None
        self._had_extra_flush = False

    @property
    def ratio(self) -> float | None:
        """The client's part of training time, 0 to 1; None while it is not known."""
        trained = self._trained - self._trained_before
        if self._checked_ratio is None and trained >= _MIN_S:
            return self._spent / trained
        return self._checked_ratio

    def count(self, events: int) -> None:
        """Add events that hooks have written."""
        self._events += events

    def timing(self, mark: Callable[[], int]) -> Callable[[], int]:
        """Return what to call instead of a device's mark, so that its cost is known."""
        self._is_timing = True

        def timed() -> int:
            self._marks += 1
            if self._marks % _MARKS_PER_TIMED:
                return mark()
            began = time.perf_counter_ns()
            cuda_event_id = mark()
            self._timed_marks_ns += time.perf_counter_ns() - began
            self._timed_marks += 1
            return cuda_event_id

        return timed

    def on_flush(self, trained_seconds: float, *, extra: bool = False) -> None:
        """Add the time spent since the last call; called on the flusher's thread.

        Args:
            trained_seconds: The time of all steps so far.
            extra: Whether the flush was one for a live page only.
        """
        self._had_extra_flush |= extra
        if self._clock() >= self._calibrate_at:
            self._recalibrate()
        self._add_spent()
        self._trained = trained_seconds
        trained = trained_seconds - self._trained_before
        if trained >= CHECK_EVERY_S:
            self._checked_ratio = self._spent / trained
            self._keep_within(self._checked_ratio)
            self._begin_period()

    def _recalibrate(self) -> None:
        is_first = self._event_seconds is None
        self._event_seconds = self._calibrate()
        self._calibrate_at = self._clock() + CALIBRATE_EVERY_S
        if is_first:
            # No step has paid for what was done before it.
            self._thread_seconds = self._thread_clock()

    def _add_spent(self) -> None:
        events, marks, thread_seconds = self._events, self._marks, self._thread_clock()
        mark_seconds = self._timed_marks_ns / self._timed_marks / 1e9 if self._timed_marks else 0.0
        self._spent += (events - self._counted_events) * (self._event_seconds or 0.0)
        self._spent += (marks - self._counted_marks) * mark_seconds
        self._spent += thread_seconds - self._thread_seconds
        self._counted_events, self._counted_marks, self._thread_seconds = events, marks, thread_seconds

    def _begin_period(self) -> None:
        self._trained_before, self._spent = self._trained, 0.0
        self._had_extra_flush = False

    def _keep_within(self, ratio: float) -> None:
        """Give up extra flushes, or else raise the degradation level, if the overhead is above the limit."""
        if self.limit is None or ratio <= self.limit or self.degradation_level == len(DEGRADATIONS):
            return
        if self._had_extra_flush:
            self.allows_extra_flushes = False
            self._warn(ratio, "frequent reports for the live page")
            return
        if self.degradation_level == 0 and not self._is_timing:
            self.degradation_level = 1  # there are no device times
        given_up = DEGRADATIONS[self.degradation_level]
        self.degradation_level += 1
        if self.degradation_level == 1:
            self._buffer.cuda_event_id = None
        elif self.degradation_level == 2:
            self._buffer.muted |= sum(1 << code for code in _WITHIN_A_STEP)
        else:
            self._buffer.thread = 0
        self._warn(ratio, given_up)

    def _warn(self, ratio: float, given_up: str) -> None:
        log.warning(
            "torchperfd takes %.2f %% of training time, above max_overhead (%.2f %%): it gives up %s",
            100 * ratio,
            100 * (self.limit or 0.0),
            given_up,
        )


def _nothing() -> None:
    pass
