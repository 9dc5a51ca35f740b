"""The phases of each step, as far as a trace shows them: exclusive host time of the thread that trains.

torch names some phases itself: the DataLoader's draw, the optimizer's step and its zero_grad. An annotation
(``record_function("forward")``) that is named as a phase is that phase: torchperfd's captures have them for
all phases, scripts may have some. What is in none of ``forward``, ``loss`` and ``backward`` is derived:

- ``backward``: from the start of one of autograd's nodes, on any thread, to the end of the last node before
  the training thread does something else: an operator outside all nodes, or another phase.
- ``forward``: from the first operator of the training thread that one of those nodes goes back to (they have
  one sequence number), to the last before another phase begins; the loss is part of it.

With ``with_stack=True`` the calls of ``torch.autograd.backward`` and ``torch.save`` are phases too.
Where phases lie within each other, the one that began last has the time. The rest of the step is ``other``.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from torchperfd.v1.contract import PHASES
from torchperfd_daemon.analysis.callers import PYTHON
from torchperfd_daemon.analysis.spans import Spans, outermost
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_OTHER: Final = PHASES.index("other")
_DERIVED: Final = [PHASES.index(phase) for phase in ("forward", "loss", "backward")]
_ANNOTATION: Final = "user_annotation"
_OPERATOR: Final = "cpu_op"
_NODE: Final = "autograd::engine::evaluate_function: "
_STEP: Final = "ProfilerStep#"
_BY_TORCH: Final = {
    "enumerate(DataLoader)#": "data",
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "zero_grad",
}
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
    thread = _training_thread(trace) if thread is None else thread
    start, end, phase = _spans(trace, thread, steps)
    firsts = np.array([step.host_start_ns for step in steps], dtype=np.int64)
    lasts = firsts + np.array([step.host_duration_ns for step in steps], dtype=np.int64)
    edges = np.unique(np.concatenate((start, end, firsts, lasts)))
    innermost = Spans(start, end).innermost(edges)
    running = np.append(phase, _OTHER)[innermost]
    lengths = np.append(np.diff(edges), 0)
    table = np.zeros((len(steps), len(PHASES)), dtype=np.int64)
    for number in np.unique(running).tolist():
        before = np.concatenate(([0], np.cumsum(np.where(running == number, lengths, 0))))
        table[:, number] = before[np.searchsorted(edges, lasts)] - before[np.searchsorted(edges, firsts)]
    return [
        {name: ns for name, ns in zip(PHASES, row, strict=True) if ns or name == "other"}
        for row in table.tolist()
    ]


def drawing(trace: Trace) -> Int64:
    """Return the rows in which a host thread draws a batch: the phase ``data``, on any thread."""
    rows, phase = _named(trace)
    draws: Int64 = rows[phase == PHASES.index("data")]
    return draws


def _training_thread(trace: Trace) -> int:
    """Return the thread that most steps are marked on."""
    rows = np.flatnonzero(trace.of_categories({_ANNOTATION, _OPERATOR}))
    marks = trace.named(rows, lambda name: name.startswith(_STEP))
    return int(np.bincount(trace.thread[marks]).argmax()) if len(marks) else -1


def _spans(trace: Trace, thread: int, steps: Sequence[Step]) -> tuple[Int64, Int64, Int64]:
    """Return start, end and phase of all phases' spans on the training thread, named or derived."""
    rows, phase = _named(trace)
    mine = trace.thread[rows] == thread
    rows, phase = rows[mine], phase[mine]
    operators = np.flatnonzero(trace.of_categories({_OPERATOR}))
    nodes = trace.named(operators, lambda name: name.startswith(_NODE))
    calls = operators[trace.thread[operators] == thread]
    outer = calls[outermost(trace.start[calls], trace.end[calls])]
    own = outer[~np.isin(outer, nodes)]
    said = rows[np.isin(phase, _DERIVED) & trace.of_categories({_ANNOTATION})[rows]]
    firsts = np.array([step.host_start_ns for step in steps], dtype=np.int64)
    edges = np.concatenate((trace.start[rows], trace.end[said], firsts))
    backward = _joined(trace.start[nodes], trace.end[nodes], np.concatenate((edges, trace.start[own])))
    makers = own[_made_nodes(trace, own, calls, nodes)]
    forward = _joined(trace.start[makers], trace.end[makers], np.concatenate((edges, backward[0])))
    annotated = Spans(trace.start[said], trace.end[said])
    backward, forward = _outside(annotated, *backward), _outside(annotated, *forward)
    parts = [
        (trace.start[rows], trace.end[rows], phase),
        (*backward, np.full(len(backward[0]), PHASES.index("backward"))),
        (*forward, np.full(len(forward[0]), PHASES.index("forward"))),
    ]
    start, end, phase = (np.concatenate(column) for column in zip(*parts, strict=True))
    return start, end, phase


def _named(trace: Trace) -> tuple[Int64, Int64]:
    """Return the rows whose name is a phase's, and the phase of each."""
    parts = [
        _of_phase(trace, {_ANNOTATION}, lambda name: name if name in PHASES else _by_torch(name)),
        _of_phase(trace, {_OPERATOR}, _by_torch),
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


def _outside(annotated: Spans, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Leave out the spans that begin within an annotation of a phase."""
    outside = annotated.innermost(start) < 0
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
