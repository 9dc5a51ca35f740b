"""The times of steps on the device, for a host that runs ahead of it.

A host that only launches finishes a step long before the device does. Then only the device shows the length
of the step: from the first kernel that the step launched to the first one of the next step.
"""

from typing import Final

import numpy as np

from torchperfd_daemon.analysis.breakdown import KERNEL
from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.trace import Int64, Trace

# The device's steps must be longer than the host's by this factor, all together or in the median. The last
# kernels always outlast the host.
_OUTLASTS: Final = 1.05
# A host runs ahead of the median step if kernels wait for so much of one after they were launched.
_QUEUED: Final = 0.5


def on_the_device(trace: Trace, links: Links, starts: Int64, ends: Int64) -> tuple[Int64, Int64] | None:
    """Return starts and ends of the steps on the device, in ns; None where the device keeps up with the host.

    If a host waits for the device every so often, to read a loss, its steps take as long as the device's on
    average, but one step contains the wait of many. So the median is compared too, where kernels queue.

    Kernels of one stream run in the order of their launches, so the stream with most kernel time shows where
    a step begins. A step that launches nothing there keeps the host's times.

    Args:
        starts: When each step begins on the host, in order.
        ends: When it ends there.
    """
    moments = links.launched_at(trace)
    step = np.searchsorted(starts, moments, side="right") - 1
    mine = np.flatnonzero((step >= 0) & (moments < ends[step]))
    events, step = links.event[mine], step[mine]
    kernels = trace.of_categories({KERNEL})[events]
    if not kernels.any():
        return None
    stream = trace.thread[events]
    busy = np.bincount(stream[kernels], (trace.end - trace.start)[events[kernels]])
    # Of the streams that run kernels: those of a trace may all be too short to have a duration.
    main = stream == max(stream[kernels].tolist(), key=busy.__getitem__)
    none = np.iinfo(np.int64).max
    first = np.full(len(starts), none, dtype=np.int64)
    np.minimum.at(first, step[main], trace.start[events[main]])
    last = np.full(len(starts), -1, dtype=np.int64)
    np.maximum.at(last, step, trace.end[events])
    active = np.flatnonzero(first < none)
    begin, own_end = first[active], last[active]
    if (np.diff(begin) < 0).any():
        return None
    end = np.append(begin[1:], own_end[-1])
    usual = float(np.median(ends - starts))
    queued = trace.start[events[main]] - moments[mine[main]]
    lags = int(queued.max()) >= _QUEUED * usual and float(np.median(end - begin)) > _OUTLASTS * usual
    if own_end.max() - begin[0] <= _OUTLASTS * (ends[-1] - starts[0]) and not lags:
        return None
    # After a pause of the host's (steps that were not recorded) a step ends with its own last event.
    pause = usual / 2
    paused = np.flatnonzero(starts[active][1:] - ends[active][:-1] > pause)
    end[paused] = np.minimum(own_end[paused], end[paused])
    device_starts, device_ends = starts.copy(), ends.copy()
    device_starts[active], device_ends[active] = begin, np.maximum(end, begin)
    return device_starts, device_ends
