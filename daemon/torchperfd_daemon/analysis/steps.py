"""The training steps of a trace (marks, times on the host and on the device) and the phases of each step.

Phases are exclusive host time of the thread that trains, as far as a trace shows them.
torch names some phases itself: the DataLoader's draw, the optimizer's step and its zero_grad. An annotation
(``record_function("forward")``) that is named as a phase is that phase: torchperfd's captures have them for
all phases, scripts may have some. What is in none of ``forward``, ``loss`` and ``backward`` is derived:

- ``backward``: from the start of one of autograd's nodes, on any thread, to the end of the last node before
  the training thread does something else: an operator outside all nodes, or another phase.
- ``forward``: from the first operator of the training thread that one of those nodes goes back to (they have
  one sequence number), to the last before another phase begins; the loss is part of it.

With ``with_stack=True`` the calls of ``torch.autograd.backward`` and ``torch.save`` are phases too.
Where phases lie within each other, the one that began last has the time.
The rest of the step is ``other``.
"""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from torchperfd.v1.contract import PHASES
from torchperfd_daemon.analysis.callers import Links, find_links
from torchperfd_daemon.analysis.categories import (
    ANNOTATION,
    DRAW,
    GPU_ANNOTATION,
    OPERATOR,
    PYTHON,
    STEP_MARK,
    UPDATE,
    ZERO_GRAD,
)
from torchperfd_daemon.analysis.intervals import Cover, Spans, outermost
from torchperfd_daemon.analysis.step_marks import Mark, infer_marks, on_the_device
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

StepSource = Literal["profiler", "optimizer", "loader", "annotation", "none"]
TimedBy = Literal["host", "device"]

_STEP: Final = re.compile(r"ProfilerStep#(\d{1,18})")
# Kineto repeats each step on the GPU's timeline; host time is the step's own.
# The last step is a stub if it has at most this share of the median step's operators and launches.
_STUB: Final = 0.1
_MIN_WITH_STUB: Final = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its number, and its times in ns since the trace's start.

    Attributes:
        index: The profiler's own number for it; of inferred steps their count, from 1.
        start_ns: When it begins: on the device where the host runs ahead of it, else on the host.
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
        return self.start_ns, self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one trace.

    Attributes:
        source: What marks them: ``profiler.step()``, the optimizer's updates, the loader's draws or an
            annotation that repeats; ``none`` without steps.
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
    """Return the steps and their marks."""
    marked, thread = _marked(trace)
    source: StepSource = "profiler"
    mark = STEP_MARK
    if not marked:
        inferred = infer_marks(trace)
        if inferred is None:
            return Steps((), "none", "", "host", -1)
        source, mark, thread, marked = inferred.source, inferred.name, inferred.thread, _numbered(inferred)
    has_stub = source == "profiler" and _is_stub(trace, links, marked)
    stub = [replace(each, is_stub=True) for each in marked[-1:] if has_stub]
    marked = marked[: len(marked) - len(stub)]
    windows = on_the_device(trace, links, *edges(marked))
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
    if len(marked) < _MIN_WITH_STUB:
        return False
    moments = links.launched_at(trace)
    begin, until = marked[-1].window
    if ((moments >= begin) & (moments < until)).any():
        return False
    begun = np.concatenate((moments, trace.start[trace.of_categories({OPERATOR})]))
    *others, last = np.diff(np.searchsorted(np.sort(begun), np.append(edges(marked)[0], until))).tolist()
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
    rows = np.flatnonzero(np.isin(trace.name, list(numbers)) & ~trace.of_categories({GPU_ANNOTATION}))
    found: dict[int, Step] = {}
    for row in rows.tolist():
        index, start = numbers[int(trace.name[row])], int(trace.start[row])
        if index not in found or start < found[index].start_ns:
            found[index] = Step(index, start, int(trace.end[row]) - start)
    return sorted(found.values(), key=lambda step: step.start_ns), trace.busiest_thread(rows)


def _numbered(marks: Mark) -> list[Step]:
    spans = zip(marks.start.tolist(), marks.end.tolist(), strict=True)
    return [Step(number, start, end - start) for number, (start, end) in enumerate(spans, 1)]


def edges(steps: Sequence[Step], *, host: bool = False) -> tuple[Int64, Int64]:
    """Return when the steps begin and end, in ns; on the host if that is asked for."""
    starts = [step.host_start_ns if host else step.start_ns for step in steps]
    lengths = [step.host_duration_ns if host else step.duration_ns for step in steps]
    begin = np.array(starts, dtype=np.int64)
    return begin, begin + np.array(lengths, dtype=np.int64)


_OTHER: Final = PHASES.index("other")
_DERIVED: Final = [PHASES.index(phase) for phase in ("forward", "loss", "backward")]
_NODE: Final = "autograd::engine::evaluate_function: "
_BY_TORCH: Final = {DRAW: "data", UPDATE: "optimizer", ZERO_GRAD: "zero_grad"}
_PYTHON: Final = re.compile(
    r"(?:.*/)?torch/(?:autograd/__init__\.py\(\d+\): (?P<backward>backward)|serialization\.py\(\d+\): save)"
)


def phases(trace: Trace, steps: Sequence[Step], thread: int | None = None) -> list[dict[str, int]]:
    """Return each step's phases that took any time, in ns, in the order of the closed set.

    A step's phases sum to the host's time for it; ``other`` is always among them.

    Args:
        thread: The thread that trains; None for the one that the profiler marks its steps on.
    """
    if not steps:
        return []
    thread = _marked(trace)[1] if thread is None else thread
    start, end, phase = _spans(trace, thread, steps)
    firsts, lasts = edges(steps, host=True)
    moments = np.unique(np.concatenate((start, end, firsts, lasts)))
    innermost = Spans(start, end).innermost(moments)
    running = np.append(phase, _OTHER)[innermost]
    lengths = np.append(np.diff(moments), 0)
    table = np.zeros((len(steps), len(PHASES)), dtype=np.int64)
    for number in np.unique(running).tolist():
        before = np.concatenate(([0], np.cumsum(np.where(running == number, lengths, 0))))
        table[:, number] = before[np.searchsorted(moments, lasts)] - before[np.searchsorted(moments, firsts)]
    return [
        {name: ns for name, ns in zip(PHASES, row, strict=True) if ns or name == "other"}
        for row in table.tolist()
    ]


def drawing(trace: Trace) -> Int64:
    """Return the rows in which a host thread draws a batch: the phase ``data``, on any thread."""
    rows, phase = _named(trace)
    draws: Int64 = rows[phase == PHASES.index("data")]
    return draws


def _spans(trace: Trace, thread: int, steps: Sequence[Step]) -> tuple[Int64, Int64, Int64]:
    """Return start, end and phase of all phases' spans on the training thread, named or derived."""
    rows, phase = _named(trace)
    mine = trace.thread[rows] == thread
    rows, phase = rows[mine], phase[mine]
    operators = np.flatnonzero(trace.of_categories({OPERATOR}))
    nodes = trace.named(operators, lambda name: name.startswith(_NODE))
    calls = operators[trace.thread[operators] == thread]
    outer = calls[outermost(trace.start[calls], trace.end[calls])]
    own = outer[~np.isin(outer, nodes)]
    said = rows[np.isin(phase, _DERIVED) & trace.of_categories({ANNOTATION})[rows]]
    breaks = np.concatenate((trace.start[rows], trace.end[said], edges(steps, host=True)[0]))
    backward = _joined(trace.start[nodes], trace.end[nodes], np.concatenate((breaks, trace.start[own])))
    makers = own[_made_nodes(trace, own, calls, nodes)]
    forward = _joined(trace.start[makers], trace.end[makers], np.concatenate((breaks, backward[0])))
    annotated = Cover(trace.start[said], trace.end[said])
    backward, forward = _outside(annotated, *backward), _outside(annotated, *forward)
    parts = [
        (trace.start[rows], trace.end[rows], phase),
        (*backward, np.full(len(backward[0]), PHASES.index("backward"))),
        (*forward, np.full(len(forward[0]), PHASES.index("forward"))),
    ]
    start, end, phase = (np.concatenate(column) for column in zip(*parts, strict=True))
    return start, end, phase


def _named(trace: Trace) -> tuple[Int64, Int64]:
    parts = [
        _of_phase(trace, {ANNOTATION}, lambda name: name if name in PHASES else _by_torch(name)),
        _of_phase(trace, {OPERATOR}, _by_torch),
        _of_phase(trace, {PYTHON}, _python),
    ]
    rows, phase = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, phase


def _of_phase(trace: Trace, categories: set[str], phase_of: Callable[[str], str]) -> tuple[Int64, Int64]:
    """Return the rows of some categories whose name is a phase's, and the phase of each; '' is no phase."""
    rows = np.flatnonzero(trace.of_categories(categories))
    rows = trace.named(rows, lambda name: phase_of(name) != "")
    phases = [PHASES.index(phase_of(trace.names[name])) for name in trace.name[rows].tolist()]
    return rows, np.array(phases, dtype=np.int64)


def _by_torch(name: str) -> str:
    return next((phase for start, phase in _BY_TORCH.items() if name.startswith(start)), "")


def _python(name: str) -> str:
    match = _PYTHON.fullmatch(name)
    return "" if match is None else match["backward"] or "checkpoint"


def _made_nodes(trace: Trace, own: Int64, calls: Int64, nodes: Int64) -> Flags:
    """Return which of the outermost operators in ``own`` made one of the nodes.

    An operator that makes no node shows the next node's number; the last to show it made the node.
    """
    forward = calls[(trace.sequence[calls] >= 0) & ~trace.backward[calls]]
    forward = forward[np.isin(trace.sequence[forward], trace.sequence[nodes])]
    forward = forward[np.argsort(-trace.start[forward], kind="stable")]
    _, last = np.unique(trace.sequence[forward], return_index=True)
    around = Spans(trace.start[own], trace.end[own]).innermost(trace.start[forward[last]])
    made = np.zeros(len(own), dtype=np.bool_)
    made[around[around >= 0]] = True
    return made


def _outside(annotated: Cover, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Leave out the spans that begin within an annotation of a phase."""
    outside = ~annotated.contains(start)
    return start[outside], end[outside]


def _joined(start: Int64, end: Int64, breaks: Int64) -> tuple[Int64, Int64]:
    """Join spans to their successors unless something breaks in between."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    breaks = np.sort(breaks)
    between = np.searchsorted(breaks, start[1:], side="right") > np.searchsorted(
        breaks, reached[:-1], side="left"
    )
    opens = np.concatenate(([True], between & (start[1:] >= reached[:-1])))[: len(start)]
    return start[opens], reached[np.concatenate((opens[1:], [True]))[: len(start)]]
