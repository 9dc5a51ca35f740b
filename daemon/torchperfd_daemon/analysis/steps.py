"""The training steps of a trace: their marks, and their times on the host and on the device."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from torchperfd_daemon.analysis.device_steps import on_the_device
from torchperfd_daemon.analysis.links import Links, find_links
from torchperfd_daemon.analysis.step_marks import Mark, infer_marks
from torchperfd_daemon.analysis.trace import Int64, Trace

StepSource = Literal["profiler", "optimizer", "loader", "annotation", "none"]
TimedBy = Literal["host", "device"]

_STEP: Final = re.compile(r"ProfilerStep#(\d{1,18})")
# Kineto repeats each step on the GPU's timeline; host time is the step's own.
_GPU_COPY: Final = "gpu_user_annotation"
_OPERATOR: Final = "cpu_op"
# The last step is a stub if it has at most this share of the median step's operators and launches.
_STUB: Final = 0.1
_FEWEST_WITH_STUB: Final = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its number, and its times in ns since the trace's start.

    Attributes:
        index: The profiler's own number for it; of inferred steps their count, from 1.
        start_ns: When it begins: on the device where the host runs ahead of it, else on the host.
        duration_ns: How long it takes there.
        host_ns: Start and duration on the host, where these are times of the device; else None.
        is_stub: The profiler began it with the last ``step()`` of the loop, and nothing of a step is in it.
    """

    index: int
    start_ns: int
    duration_ns: int
    host_ns: tuple[int, int] | None = None
    is_stub: bool = False

    @property
    def host_start_ns(self) -> int:
        """When the host begins it."""
        return self.host_ns[0] if self.host_ns else self.start_ns

    @property
    def host_duration_ns(self) -> int:
        """How long the host takes for it."""
        return self.host_ns[1] if self.host_ns else self.duration_ns

    @property
    def window(self) -> tuple[int, int]:
        """Its start and end."""
        return self.start_ns, self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one trace.

    Attributes:
        source: What marks them: ``profiler.step()``, the optimizer's updates, the loader's draws or an
            annotation that repeats; ``none`` without steps.
        mark: The mark's name in the trace; empty for ``none``.
        timed_by: Whose times they are: the device's where its work outlasts the host's steps.
        thread: The host thread that they are marked on, an index into ``Trace.threads``; -1 without steps.
    """

    steps: tuple[Step, ...]
    source: StepSource
    mark: str
    timed_by: TimedBy
    thread: int


def steps(trace: Trace) -> list[Step]:
    """Return the steps of a trace, in order of start."""
    return list(find_steps(trace, find_links(trace)).steps)


def find_steps(trace: Trace, links: Links) -> Steps:
    """Return the steps and their marks.

    Args:
        links: The launches of its device events.
    """
    marked, thread = _marked(trace)
    source: StepSource = "profiler"
    mark = "ProfilerStep#"
    if not marked:
        inferred = infer_marks(trace)
        if inferred is None:
            return Steps((), "none", "", "host", -1)
        source, mark, thread, marked = inferred.source, inferred.name, inferred.thread, _numbered(inferred)
    has_stub = source == "profiler" and _is_stub(trace, links, marked)
    stub = [replace(each, is_stub=True) for each in marked[-1:] if has_stub]
    marked = marked[: len(marked) - len(stub)]
    windows = on_the_device(trace, links, _column(marked, 0), _column(marked, 1))
    if windows is None:
        return Steps((*marked, *stub), source, mark, "host", thread)
    timed = [
        replace(step, start_ns=start, duration_ns=end - start, host_ns=(step.start_ns, step.duration_ns))
        for step, start, end in zip(marked, *(each.tolist() for each in windows), strict=True)
    ]
    return Steps((*timed, *stub), source, mark, "device", thread)


def _is_stub(trace: Trace, links: Links, marked: Sequence[Step]) -> bool:
    """Return whether the last step launched nothing and called almost nothing, unlike those before it.

    Without a device, a step that calls little may be a step of another kind; one that calls nothing is none.
    """
    if len(marked) < _FEWEST_WITH_STUB:
        return False
    moments = links.launched_at(trace)
    begin, until = marked[-1].window
    if ((moments >= begin) & (moments < until)).any():
        return False
    edges = np.array([*(step.start_ns for step in marked), until], dtype=np.int64)
    begun = np.concatenate((moments, trace.start[trace.of_categories({_OPERATOR})]))
    *others, last = np.diff(np.searchsorted(np.sort(begun), edges)).tolist()
    most = _STUB * statistics.median(others) if len(moments) else 0
    return bool(last <= most) and max(others) > 0


def whole_recording(trace: Trace, window: tuple[int, int]) -> Step:
    """Return the whole recording as one step: of a device's work if there is any, else of the host's.

    Args:
        window: Start and end of the device's work in ns; equal without any.
    """
    start, end = window
    if start == end:
        return Step(0, 0, trace.duration_ns)
    return Step(0, start, end - start, (0, trace.duration_ns))


def _marked(trace: Trace) -> tuple[list[Step], int]:
    """Return the steps that the profiler marked, and their thread; of a step recorded twice, the earlier."""
    numbers = {
        name: int(match[1]) for name, text in enumerate(trace.names) if (match := _STEP.fullmatch(text))
    }
    rows = np.flatnonzero(np.isin(trace.name, list(numbers)) & ~trace.of_categories({_GPU_COPY}))
    found: dict[int, Step] = {}
    for row in rows.tolist():
        index, start = numbers[int(trace.name[row])], int(trace.start[row])
        if index not in found or start < found[index].start_ns:
            found[index] = Step(index, start, int(trace.end[row]) - start)
    thread = int(np.bincount(trace.thread[rows]).argmax()) if len(rows) else -1
    return sorted(found.values(), key=lambda step: step.start_ns), thread


def _numbered(marks: Mark) -> list[Step]:
    spans = zip(marks.start.tolist(), marks.end.tolist(), strict=True)
    return [Step(number, start, end - start) for number, (start, end) in enumerate(spans, 1)]


def _column(found: Sequence[Step], place: int) -> Int64:
    return np.array([step.window[place] for step in found], dtype=np.int64)
