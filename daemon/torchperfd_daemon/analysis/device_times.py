"""Corrects impossible times: lost ones, device starts far outside the recording, and ends after all else.

Exporters convert a device's clock to the host's, and now and then get a start or an end wrong by seconds
or years. One such event would make a recording of milliseconds idle or busy for years.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.trace import Flags, Int32, Int64

# An event farther from the recording than this, and than ten times its length, does not belong to it.
_APART_NS: Final = 100_000_000
_APART: Final = 10
# Below this a wrong end does little harm, and cannot be distinguished from a correct one.
_LONG_NS: Final = 1_000_000
# Of the device events no more than one in so many can be left out; if more are apart, the clocks are.
_FEW: Final = 10


@dataclass(frozen=True, slots=True)
class Outliers:
    """Device events that start far outside the recording.

    Attributes:
        clock_apart: Whether most device events are far away. Then the clocks differ, and no event is left
            out.
    """

    rows: Int64
    clock_apart: bool


def timeless(start: Int64, end: Int64) -> Flags:
    """Return which events of any kind have time 0 and no duration, while all others are far from 0.

    Exporters write these for records that they have lost.

    Args:
        start: Starts in ns, as in the file.
        end: Ends in ns.
    """
    at_zero: Flags = (start == 0) & (end == 0)
    if not at_zero.any() or at_zero.all() or int(start[~at_zero].min()) <= _APART_NS:
        return np.zeros(len(start), dtype=np.bool_)
    return at_zero


def far_away(start: Int64, end: Int64, on_device: Flags) -> Outliers:
    """Return the device events that lie far outside of the recording.

    The recording is the stretch with most events between gaps that are too long for it.

    Args:
        start: Starts in ns, in any order.
        end: Ends in ns.
        on_device: Which events ran on a device.
    """
    none = Outliers(np.zeros(0, dtype=np.int64), clock_apart=False)
    if not on_device.any() or int(start.max() - start.min()) <= _APART_NS:
        return none
    if not on_device.all():
        begun, over = int(start[~on_device].min()), int(end[~on_device].max())
        device = start[on_device]
        if begun - int(device.min()) <= _APART_NS and int(device.max()) - over <= _APART_NS:
            return none
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[order][1:] - reached[:-1] > _APART_NS))
    part = np.cumsum(opens) - 1
    if part[-1] == 0:
        return none
    sizes = np.bincount(part)
    first = np.flatnonzero(opens)
    begin, until = start[order][first], reached[np.append(first[1:], len(order)) - 1]
    hosts = np.bincount(part, weights=~on_device[order])
    main = int(np.lexsort((sizes, hosts))[-1])
    low, high = int(begin[main]), int(until[main])
    apart = max(_APART_NS, _APART * (high - low))
    outside = ((begin - high > apart) | (low - until > apart)) & (hosts == 0)
    rows = order[outside[part]]
    if not len(rows):
        return none
    if _FEW * len(rows) > int(on_device.sum()) and len(rows) > 1:
        return Outliers(none.rows, clock_apart=True)
    return Outliers(np.sort(rows), clock_apart=False)


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Device events of one stream that ran at once, which a stream does not do by itself.

    Attributes:
        events: How many began before an earlier one of their stream had ended.
    """

    events: int
    ns: int


def shorten(start: Int64, end: Int64, stream: Int32, on_device: Flags) -> tuple[int, int]:
    """Shorten device events that outlast the recording to the start of the next event of their stream.

    Returns:
        How many were shortened, and how many last as long, but have none after them on their stream.

    Args:
        start: Starts in ns.
        end: Ends in ns, changed in place.
        on_device: Which events ran on a device.
    """
    rows = np.flatnonzero(on_device)
    if not len(rows) or len(rows) == len(start) == 1:
        return 0, 0
    rows = rows[np.lexsort((start[rows], stream[rows]))]
    # The recording ends with the host's last event, or the device's last that does not run over another.
    following = _next_start(start[rows], stream[rows])
    over = end[rows] > following
    others = np.ones(len(start), dtype=np.bool_)
    others[rows[over]] = False
    longest = rows[np.argmax(end[rows] - start[rows])]
    others[longest] = False
    if not others.any():
        return 0, 0
    began, latest = int(start.min()), int(end[others].max())
    allowed = latest + (latest - began)
    impossible = over & (end[rows] > allowed) & (end[rows] - start[rows] >= _LONG_NS)
    shortened = rows[impossible]
    end[shortened] = following[impossible]
    far = (end[rows] > max(allowed, began + _APART * (latest - began))) & (
        end[rows] - start[rows] > _APART_NS
    )
    return len(shortened), int(far.sum())


def overlaps(start: Int64, end: Int64, stream: Int32) -> Overlaps:
    """Return how much of the device events given overlaps on a stream."""
    order = np.lexsort((start, stream))
    start, end, stream = start[order], end[order], stream[order]
    if not len(order):
        return Overlaps(0, 0)
    edges = np.concatenate(([True], np.diff(stream) != 0))
    first = np.flatnonzero(edges)
    # Made to rise from stream to stream, so that one running maximum serves all of them.
    lift = (np.cumsum(edges) - 1) * (int(end.max() - start.min()) + 1)
    reached = np.maximum.accumulate(end + lift) - lift
    before = np.concatenate(([0], reached[:-1]))
    before[first] = start[first]
    shared = np.minimum(before, end) - start
    return Overlaps(int((shared > 0).sum()), int(shared[shared > 0].sum()))


def _next_start(start: Int64, stream: Int32) -> Int64:
    """Return when the next event of the same stream begins; the end of time for the last."""
    following = np.full(len(start), np.iinfo(np.int64).max, dtype=np.int64)
    same = np.diff(stream) == 0
    following[:-1][same] = start[1:][same]
    return following
