"""What a replay of steps is made of: device events and waits, and the edits that take time away."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Flags, Float64, Int64, Trace

NO_EVENT: Final = -1
# A host without a call that was silent for so many times the time since the device's last work waited for it.
_WORKED: Final = 3
# The clocks of host and device agree to this; a wait may seem to end before the event that ends it.
CLOCKS_NS: Final = 2_000


@dataclass(frozen=True, slots=True)
class DeviceEvents:
    """Device events as parallel columns, in any order.

    Attributes:
        called: When the host began to launch it, in ns, which decides on its step.
        launched: The moment of the host from which it could begin, in ns.
    """

    row: Int64
    stream: Int64
    called: Int64
    launched: Int64
    start: Int64
    end: Int64


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of host time, as parallel columns."""

    row: Int64
    start: Int64
    end: Int64

    @classmethod
    def of(cls, trace: Trace, rows: Int64) -> Self:
        return cls(rows, trace.start[rows], trace.end[rows])

    def __len__(self) -> int:
        return len(self.row)

    def around(self, trace: Trace, rows: Int64) -> Flags:
        """Return which events begin within one of the spans and on its thread."""
        inside = np.zeros(len(rows), dtype=np.bool_)
        threads = trace.thread[self.row]
        for thread in np.unique(threads).tolist():
            cover = Cover(self.start[threads == thread], self.end[threads == thread])
            inside |= (trace.thread[rows] == thread) & cover.contains(trace.start[rows])
        return inside


@dataclass(frozen=True, slots=True)
class HostTime:
    """Spans of the host's time, in ns, of which the part ``keep`` (0 to 1) remains."""

    start: Int64
    end: Int64
    keep: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Device events, by row, of whose duration the part ``keep`` (0 to 1) remains.

    Attributes:
        joined: They become parts of one event, so that no time passes between them.
    """

    row: Int64
    keep: float = 0.0
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of what a step does.

    Attributes:
        host: Host time that is removed or shortened; where spans overlap the shortest counts.
        device: Device events that are removed or shortened, likewise.
        host_share: The part of all host work that is removed besides, 0 to 1.
    """

    host: tuple[HostTime, ...] = ()
    waits: tuple[Int64, ...] = ()
    device: tuple[DeviceWork, ...] = ()
    host_share: float = 0.0

    def __add__(self, other: "Edit") -> "Edit":
        return Edit(
            self.host + other.host,
            self.waits + other.waits,
            self.device + other.device,
            min(self.host_share + other.host_share, 1.0),
        )


NOTHING: Final = Edit()


@dataclass(frozen=True, slots=True)
class HostCost:
    """What is taken off the host's recorded time before any edit.

    Attributes:
        up_to: Returns what recording has cost by each moment, in ns; None for nothing.
        scaled: Spans that take another part of their time when nothing is recorded.
        speed: The part of all other host work that remains when nothing is recorded.
    """

    up_to: Callable[[Int64], Int64] | None = None
    scaled: tuple[HostTime, ...] = ()
    speed: float = 1.0


def with_silent(waits: Spans, silent: HostTime, events: DeviceEvents) -> Spans:
    """Return the waits, and those silent spans in which the device's last work ended late."""
    if not len(events.row) or not len(silent.start):
        return waits
    order = np.argsort(events.start, kind="stable")
    reached = np.append(0, np.maximum.accumulate(events.end[order]))
    # The device is idle at the end of the span.
    last = reached[np.searchsorted(events.start[order], silent.end)]
    late = (last <= silent.end + CLOCKS_NS) & (last > silent.start)
    late &= _WORKED * (silent.end - last) <= silent.end - silent.start
    start, end = silent.start[late], silent.end[late]
    # They have no row, so that no edit names them.
    none = np.full(len(start), NO_EVENT, dtype=np.int64)
    return Spans(
        *(np.concatenate(pair) for pair in ((waits.row, none), (waits.start, start), (waits.end, end)))
    )


def disjoint_waits(waits: Spans, begin: int, end: int) -> Spans:
    """Return the waits that lie between two moments, in order; of overlapping ones the first."""
    chosen = np.flatnonzero((waits.start >= begin) & (waits.end <= end))
    chosen = chosen[np.lexsort((-waits.end[chosen], waits.start[chosen]))]
    start, stop = waits.start[chosen], waits.end[chosen]
    while len(start) > 1:
        reached = np.maximum.accumulate(stop)
        clear = np.append(True, start[1:] >= reached[:-1])
        if clear.all():
            break
        chosen, start, stop = chosen[clear], start[clear], stop[clear]
    return Spans(waits.row[chosen], start, stop)


def wait_around(moments: Int64, waits: Spans) -> Int64:
    """Return the wait in which each moment lies, its ends not included; -1 for none."""
    at = np.searchsorted(waits.start, moments) - 1
    return np.where(moments < np.append(waits.end, np.iinfo(np.int64).min)[at], at, NO_EVENT)


def distinct(moments: Int64) -> Int64:
    """Return the moments in order, each once; faster than numpy's, which hashes them."""
    moments = np.sort(moments)
    distinct: Int64 = moments[np.append(True, np.diff(moments) > 0)[: len(moments)]]
    return distinct


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one replay.

    Attributes:
        step_ns: The mean length of the steps once they follow each other in this way.
        marks: When the host comes to each step mark in the first pass, in ns.
        ends: When each device event that ends a node ends in the first pass, by ``Timeline.ending``.
    """

    step_ns: float
    marks: Float64
    ends: Float64
