"""Estimates the cost of the recording itself, so that rules apply to the steps of an unrecorded run.

The profiler's cost lies between its events, mostly outside the spans that it measures. So leaf operators show
nearly their true time, while a span with other events in it is too long by about `EVENT_NS` for each of them.
The rules correct every span for the events in it. A little more, `AFTER_NS`, is lost elsewhere in the step:
events are written to new memory, and displace the model's data from the caches.

If torchperfd's client has written the unrecorded step time into the trace, it shows the speed of the machine:
all costs are scaled so that the corrected steps have that length. The rest is time by which operators
themselves took longer, because the profiler's data displaces theirs from the caches.

Sometimes the profiler must get memory from the system. A step then takes several times as long although
nothing in it is the cause: one operator of hundreds pauses for 30 ms. If neither recording nor waiting for a
loader explains the time of a step, it does not belong to the step, so the longest of such steps are left out.
If most steps are affected, the kept ones are as well, and hardly show the cost of recording an event.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.categories import PYTHON
from torchperfd_daemon.analysis.host_activity import CAUSES, Cause
from torchperfd_daemon.analysis.idle import Idle
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

# The part of an operator's own time that is dispatch, whatever its inputs' size.
DISPATCH_NS: Final = 2_000
# Longer times between two operators contain more than the Python around them.
MAX_BETWEEN_NS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Calls:
    """The operators within steps as parallel columns, thread after thread, a parent before its children.

    Attributes:
        own_ns: Its time less that of the operators in it.
        between_ns: Of a call within no other, the Python until the next one.
    """

    row: Int64
    depth: Int64
    own_ns: Int64
    between_ns: Int64
    gap_ns: Int64

    @property
    def work_ns(self) -> Int64:
        """Each one's own time beyond dispatch."""
        return np.maximum(self.own_ns - DISPATCH_NS, 0)

    @property
    def overhead_ns(self) -> Int64:
        """The rest of its own time, and the Python after it."""
        # An estimate of overhead may be negative for one call; it is their sum that counts.
        return self.own_ns - self.work_ns + self.between_ns

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Outer:
    """The operators that are in no other, as parallel columns.

    Attributes:
        at: Its place among the calls; those in it follow.
    """

    row: Int64
    at: Int64
    work_ns: Int64
    overhead_ns: Int64


def kinds_of(trace: Trace, rows: Int64) -> Int64:
    """Return one number for each name and shape of inputs: the name times the shapes, plus the shape."""
    kinds: Int64 = trace.name[rows].astype(np.int64) * len(trace.shapes) + trace.shape[rows]
    return kinds


def decoded(texts: list[str]) -> Callable[[int], list[Any]]:
    """Return a function that decodes the ``shapes`` or ``types`` of a trace by number, each once.

    Anything but a list is decoded as an empty list.
    """

    @functools.cache
    def decode(number: int) -> list[Any]:
        try:
            value = json.loads(texts[number] or "[]")
        except ValueError:
            return []
        return value if isinstance(value, list) else []

    return decode


# The cost of recording one event, as benchmarks/advice measures it: the time of steps with the profiler less
# that of steps without it, divided by the number of events.
EVENT_NS: Final = 230
SHAPES_NS: Final = 220
AFTER_NS: Final = 250
# More for an operator called from Python: the profiler's data is no longer in the caches.
OUTERMOST_NS: Final = 300
FRAME_NS: Final = 250
MEMORY_NS: Final = 100

# The standard deviation of the scale between machines; a scale beyond the second number is implausible.
_MACHINES: Final = 0.5
_MAX_FACTOR: Final = 3.0
# The means of a few unrecorded and a few recorded steps differ by this much anyway.
_UNEVEN: Final = 0.03
# At least this share of the steps is kept.
_MIN_KEPT: Final = 0.25
# A step that waits this share of its time for workers is as long as they take.
_WORKERS_DECIDE: Final = 0.2
_MAX_INFLATED: Final = 2.0
# Without a measurement of unrecorded steps, a step longer than the median by the first factor is unusual if
# at most one in the second number is, or just one. With fewer steps than the last number none is
# distinguished.
_UNUSUAL: Final = 1.5
_RARE: Final = 8
_MIN_TO_COMPARE: Final = 3


class RecordingCost:
    """The cost of recording in the steps of one trace.

    Args:
        overhead: The rows of the profiler's own work, which the exporter timed.
        disturbed: The time that single steps lost to something else.
        on_device: Whether anything ran on a device, beside which the host's cost may not show.

    Attributes:
        scale: The cost of an event here, as a multiple of the constants above.
        undisturbed: Which steps are no longer than recording them explains.
    """

    def __init__(
        self,
        trace: Trace,
        starts: Int64,
        ends: Int64,
        host: Flags,
        waited: Int64,
        overhead: Int64,
        disturbed: Cover,
        *,
        on_device: bool,
    ) -> None:
        self._overhead = Cover(trace.start[overhead], trace.end[overhead])
        self._event_ns = EVENT_NS + (SHAPES_NS if len(trace.shapes) > 1 else 0)
        kinds = [
            (trace.start[host], self._event_ns + AFTER_NS),
            (trace.start[trace.of_categories({PYTHON})], FRAME_NS),
            (trace.memory.time, MEMORY_NS),
        ]
        self._kinds = [(np.sort(times), cost) for times, cost in kinds if len(times)]
        self.scale = 1.0
        self._unrecorded = 0 if on_device else trace.unrecorded_step_ns
        self.undisturbed: Flags = _usual(ends - starts, waited)
        if self._unrecorded:
            costs = self.up_to(ends) - self.up_to(starts)
            lengths = ends - starts - (disturbed.up_to(ends) - disturbed.up_to(starts))
            least = float((lengths - costs / _MAX_FACTOR).mean())
            # Unrecorded steps that are longer than these have the disturbances as well.
            if least >= (1 - _UNEVEN) * self._unrecorded:
                self._overhead |= disturbed
            lengths = ends - starts - self.overhead(starts, ends)
            usual = float(np.median(lengths - waited))
            self.undisturbed = _undisturbed(lengths - waited, costs, self._unrecorded)
            lengths, costs, waited = (each[self.undisturbed] for each in (lengths, costs, waited))
            self.scale = _scale(
                self._unrecorded, float(lengths.mean()), float(costs.mean()), float(waited.mean()), usual
            )
        self._waited = float(waited.mean())

    @property
    def event_ns(self) -> float:
        """Of an event within another."""
        return self.scale * self._event_ns

    @property
    def outermost_ns(self) -> float:
        """Of an operator within no other."""
        return self.scale * (self._event_ns + OUTERMOST_NS)

    def inflation(self, step_ns: float) -> float:
        """Return the factor by which recorded operators take longer than unrecorded ones."""
        if not self._unrecorded or self._waited > _WORKERS_DECIDE * step_ns:
            return 1.0
        return min(max(step_ns / self._unrecorded, 1 / _MAX_INFLATED), _MAX_INFLATED)

    def within(self, starts: Int64, ends: Int64) -> Int64:
        """Return the cost within each span, in ns."""
        return self.up_to(ends) - self.up_to(starts) + self.overhead(starts, ends)

    def up_to(self, moments: Int64) -> Int64:
        """Return the cost of recording by each moment, without `overhead`, in ns."""
        total = np.zeros(len(moments), dtype=np.int64)
        for times, cost in self._kinds:
            total += cost * np.searchsorted(times, moments)
        scaled: Int64 = np.rint(self.scale * total).astype(np.int64)
        return scaled

    def overhead(self, starts: Int64, ends: Int64) -> Int64:
        """Return the profiler's own work and the disturbances within each span, in ns."""
        return self._overhead.up_to(ends) - self._overhead.up_to(starts)


def _undisturbed(lengths: Int64, costs: Int64, unrecorded: float) -> Flags:
    """Return which steps to keep: all but the longest that make the mean longer than can be explained.

    Args:
        lengths: Each step, less its waits for workers, which recording does not slow down.
    """
    explained = (1 + _UNEVEN) * unrecorded + (1 + _MACHINES) * costs
    order = np.argsort(lengths - explained, kind="stable")
    excess = np.cumsum((lengths - explained)[order])
    count = max(int(np.count_nonzero(excess <= 0)), round(_MIN_KEPT * len(lengths)), 1)
    kept = np.zeros(len(lengths), dtype=np.bool_)
    kept[order[:count]] = True
    return kept


def _usual(lengths: Int64, waited: Int64) -> Flags:
    """Return which steps to keep if the unrecorded step time is unknown: all but a few long ones.

    A step that takes half as long again as the median, without its waits for workers, is unusual if it is the
    only such step, or one of few. More frequent long steps belong to the loop. Waits for workers are
    frequent: with several workers, every so many steps wait for all of them. So only a single step with such
    a wait is left out.
    """
    kept = np.ones(len(lengths), dtype=np.bool_)
    for each, most in ((lengths - waited, max(1, len(lengths) // _RARE)), (lengths, 1)):
        if kept.sum() < _MIN_TO_COMPARE:
            break
        long = kept & (each > _UNUSUAL * float(np.median(each[kept])))
        if long.sum() <= most:
            kept &= ~long
    return kept


def _scale(unrecorded: float, recorded: float, cost: float, waited: float, usual: float) -> float:
    """Return the cost of recording as a multiple of the expected cost, between the measured value and 1.

    Each of two uncertain values is weighted by its inverse variance. All times are of one step.

    Args:
        waited: Its wait for workers, which hides some of the cost because they go on meanwhile.
        usual: The median step less its waits, over all steps, those left out included.
    """
    if cost <= 0:
        return 1.0
    measured = (recorded - unrecorded) / cost
    # If most steps are longer than those kept, or these are implausibly long, these are affected, too.
    disturbed = max(usual - (recorded - waited), 0.0)
    disturbed += max(recorded - waited - (1 + _UNEVEN) * unrecorded - _MAX_FACTOR * cost, 0.0)
    uncertainty = (_UNEVEN * recorded + waited + disturbed) / cost
    weight = _MACHINES**2 / (_MACHINES**2 + uncertainty**2)
    return min(max(1 + weight * (measured - 1), 1 / _MAX_FACTOR), _MAX_FACTOR)


# The cost of recording is taken off these causes first: the profiler's own work in the gaps, then launches,
# which recording slows down.
_FIRST: Final[tuple[Cause, ...]] = ("profiler", "launch")


def unrecorded_idle(
    idle: Idle | None, kept: Sequence[int], most_ns: float, recording_ns: float
) -> dict[Cause, float]:
    """Return the idle time of the mean step by cause, in ns, as it is when nothing is recorded.

    Recording lengthens a step and its gaps by the same time. So what the step is shortened by is taken off
    the gaps as well: off the profiler's own work and launches first, off the others in proportion.

    Args:
        most_ns: The most that one step can idle: its length when nothing is recorded, less its busy time.
        recording_ns: What recording costs a step.
    """
    if idle is None:
        return dict.fromkeys(CAUSES, 0.0)
    by_cause = {cause: sum(idle.steps[step][cause] for step in kept) / len(kept) for cause in CAUSES}
    whole = sum(by_cause.values())
    excess = whole - max(min(whole - recording_ns, most_ns), 0.0)
    for cause in _FIRST:
        taken = min(excess, by_cause[cause])
        by_cause[cause] -= taken
        excess -= taken
    # The profiler's own work in gaps is no part of a step that is not recorded.
    by_cause["profiler"] = 0.0
    others = sum(ns for cause, ns in by_cause.items() if cause not in _FIRST)
    left = max(1 - excess / others, 0.0) if others else 1.0
    return {cause: ns if cause in _FIRST else ns * left for cause, ns in by_cause.items()}


# A place is disturbed if it takes this much longer than in half of the steps, and so many times as long.
_LONGER_NS: Final = 20_000
_TIMES: Final = 2
# With fewer steps no time of a place is the usual one.
_MIN_STEPS: Final = 3


def find_disturbances(trace: Trace, rows: Int64, starts: Int64) -> Cover:
    """Return the time by which places of a step take far longer than in half of the steps.

    Steps of one loop make the same calls, so each place of a step, between two neighbouring begins or ends of
    operators, has its like in the other steps. A place is known by the operators around it, and by how often
    the two came before in its step. Where it takes far longer, the rest of the time has another cause than
    the loop: another process had the CPU, or the profiler waited for memory. Such times are in the mean step,
    but not in most calls: without them the cost of recording a call is the mean step's excess, divided by the
    calls.

    Args:
        rows: The operators in the steps, of which those of the busiest thread count.
        starts: When each step begins, in ns, in order.
    """
    rows = rows[trace.thread[rows] == trace.busiest_thread(rows)]
    if not len(rows) or len(starts) < _MIN_STEPS:
        return Cover(starts[:0], starts[:0])
    moments = np.concatenate((trace.start[rows], trace.end[rows]))
    edges = np.concatenate((trace.name[rows], trace.name[rows] + len(trace.names))).astype(np.int64)
    order = np.argsort(moments, kind="stable")
    moments, edges = moments[order], edges[order]
    begin, lasted = moments[:-1], np.diff(moments)
    step = np.searchsorted(starts, begin, side="right") - 1
    pairs = 4 * len(trace.names) ** 2
    pair = edges[:-1] * 2 * len(trace.names) + edges[1:]
    order, first, sizes = _groups(np.argsort(step * pairs + pair, kind="stable"), step * pairs + pair)
    before = np.empty(len(pair), dtype=np.int64)
    before[order] = np.arange(len(pair)) - np.repeat(first, sizes)
    order, first, sizes = _groups(np.lexsort((lasted, before * pairs + pair)), before * pairs + pair)
    usual, count = np.empty_like(lasted), np.empty_like(lasted)
    usual[order] = np.repeat(lasted[order[first + (sizes - 1) // 2]], sizes)
    count[order] = np.repeat(sizes, sizes)
    disturbed = (lasted - usual >= _LONGER_NS) & (lasted >= _TIMES * usual) & (count >= _MIN_STEPS)
    return Cover((begin + usual)[disturbed], (begin + lasted)[disturbed])


def _groups(order: Int64, keys: Int64) -> tuple[Int64, Int64, Int64]:
    """Return an order in which equal keys are neighbours, where each group begins in it, and its size."""
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    return order, first, np.diff(np.append(first, len(keys)))
