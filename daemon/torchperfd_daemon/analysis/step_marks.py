"""Where steps begin: the marks of a loop that does not call ``profiler.step()``, and steps on the device.

The first of these that repeats decides: the updates of an optimizer, the draws of a DataLoader, annotations
of the user's own that come around in the same order. Where a batch has several updates (two optimizers), its
draw marks the step.

A host that only launches finishes a step long before the device does. Then only the device shows the length
of the step: from the first kernel that the step launched to the first one of the next step.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from torchperfd_daemon.analysis.callers import Links
from torchperfd_daemon.analysis.categories import ANNOTATION, DRAW, KERNEL, OPERATOR, STEP_MARK, UPDATE
from torchperfd_daemon.analysis.intervals import outermost
from torchperfd_daemon.analysis.operator_sums import ASYNC_PREFIXES
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


_HOST: Final = frozenset({OPERATOR, ANNOTATION})
# Annotations that torch makes itself, at any rate.
_TORCHS_OWN: Final = (
    *("Optimizer.", DRAW, STEP_MARK, "## Call CompiledFxGraph", "Torch-Compiled Region"),
    *("autograd::", "torch::", "torch.distributed", "c10d::", "record_param_comms", "PyTorch Profiler"),
    *("DistributedDataParallel.", "DataParallel.", "FullyShardedDataParallel.", "FSDP::", "nccl", "Pregraph"),
)
_NUMBER: Final = re.compile(r"\d+")
_MIN_MARKS: Final = 2
# An annotation must come around so often to be one of a loop.
_MIN_ANNOTATED: Final = 3
# The first step begins at the first event, unless that makes it longer than so many usual steps.
_FIRST_STEP: Final = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """Steps and their marks.

    Attributes:
        thread: The host thread, an index into ``Trace.threads``.
    """

    source: Literal["optimizer", "loader", "annotation"]
    name: str
    thread: int
    start: Int64
    end: Int64


def infer_marks(trace: Trace) -> Mark | None:
    """Return the marks of the steps of a trace without ``ProfilerStep#``; None if nothing repeats."""
    updates, draws = (_outermost_on_one_thread(trace, prefix) for prefix in (UPDATE, DRAW))
    several_a_batch = len(draws) >= _MIN_MARKS and 3 * len(draws) <= 2 * len(updates)
    if len(updates) >= _MIN_MARKS and not several_a_batch:
        return _by_update(trace, updates)
    if len(draws) >= _MIN_MARKS and (mark := _by_draw(trace, draws)):
        return mark
    return _by_annotation(trace)


def _outermost_on_one_thread(trace: Trace, prefix: str) -> Int64:
    """Return the outermost spans whose names begin so, in order, of the thread that has most of them."""
    rows = trace.named(np.flatnonzero(trace.of_categories(_HOST)), lambda name: name.startswith(prefix))
    return _outermost(trace, _of_busiest_thread(trace, rows))


def _of_busiest_thread(trace: Trace, rows: Int64) -> Int64:
    busiest: Int64 = rows[trace.thread[rows] == trace.busiest_thread(rows)]
    return busiest


def _outermost(trace: Trace, rows: Int64) -> Int64:
    return rows[outermost(trace.start[rows], trace.end[rows])]


def _calls_on(trace: Trace, thread: int) -> Int64:
    return np.flatnonzero(trace.of_categories(_HOST) & (trace.thread == thread))


def _by_update(trace: Trace, updates: Int64) -> Mark:
    """Steps that end with an update; of two alternating optimizers, with the update of the last one."""
    counts = np.bincount(trace.name[updates])
    kinds = np.flatnonzero(counts)
    if len(kinds) > 1 and len(set(counts[kinds].tolist())) == 1:
        updates = updates[trace.name[updates] == trace.name[updates[-1]]]
    thread = int(trace.thread[updates[0]])
    ends = trace.end[updates]
    begun = int(trace.start[_calls_on(trace, thread)].min())
    if len(ends) > 1:
        usual = int(np.median(np.diff(ends)))
        begun = begun if ends[0] - begun <= _FIRST_STEP * usual else int(ends[0]) - usual
    starts = np.concatenate(([begun], ends[:-1]))
    return Mark("optimizer", trace.names[int(trace.name[updates[0]])], thread, starts, ends)


def _by_draw(trace: Trace, draws: Int64) -> Mark | None:
    """Steps that begin with a draw; a last draw with nothing after it found the loader exhausted."""
    thread = int(trace.thread[draws[0]])
    calls = _calls_on(trace, thread)
    after = calls[trace.start[calls] >= trace.end[draws[-1]]]
    starts = trace.start[draws]
    last = int(trace.end[after].max()) if len(after) else -1
    starts, ends = (starts, np.append(starts[1:], last)) if len(after) else (starts[:-1], starts[1:])
    name = trace.names[int(trace.name[draws[0]])]
    return Mark("loader", name, thread, starts, ends) if len(starts) >= _MIN_MARKS else None


def _by_annotation(trace: Trace) -> Mark | None:
    """Steps that begin with the first of the annotations which come around equally often and in one order."""
    rows = np.flatnonzero(trace.of_categories({ANNOTATION}))
    rows = trace.named(rows, lambda name: not name.startswith((*_TORCHS_OWN, *ASYNC_PREFIXES)))
    rows = _of_busiest_thread(trace, rows)
    if not len(rows):
        return None
    plain = trace.name[rows].astype(np.int64)
    numbers: dict[str, int] = {}
    unnumbered = {
        name: numbers.setdefault(_NUMBER.sub("#", trace.names[name]), len(numbers))
        for name in set(plain.tolist())
    }
    alike = np.array([unnumbered[name] for name in plain.tolist()], dtype=np.int64)
    # Layers have numbers, and so may steps: what takes more time in rounds is the step.
    found = [_rounds(trace, rows, plain), _rounds(trace, rows, alike)]
    mark, _ = max(found, key=lambda pair: pair[1])
    return mark


def _rounds(trace: Trace, rows: Int64, kind: Int64) -> tuple[Mark | None, int]:
    """Return the steps of those annotations of one count that take most time, and that time in ns.

    None and 0 where they do not come in rounds.

    Args:
        kind: A number for each that those of one kind share.
    """
    often = np.bincount(kind)[kind] >= _MIN_ANNOTATED
    rows, kind = rows[often], kind[often]
    outer = outermost(trace.start[rows], trace.end[rows])
    rows, kind = rows[outer], kind[outer]
    times = np.bincount(kind)[kind]
    spans = trace.end[rows] - trace.start[rows]
    counts = set(times[times >= _MIN_ANNOTATED].tolist())
    if not counts:
        return None, 0
    count = max(counts, key=lambda each: int(spans[times == each].sum()))
    members = np.flatnonzero(times == count)
    order = kind[members]
    size = len(members) // count
    if (order != np.tile(order[:size], count)).any():
        return None, 0
    starts = trace.start[rows[members[::size]]]
    ends = np.append(starts[1:], trace.end[rows[members]].max())
    name = trace.names[int(trace.name[rows[members[0]]])]
    mark = Mark("annotation", name, int(trace.thread[rows[0]]), starts, ends)
    return mark, int(spans[members].sum())
