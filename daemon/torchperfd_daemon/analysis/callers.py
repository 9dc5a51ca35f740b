"""The caller of each event of a trace.

A device event was launched by a runtime call and an operator; an operator was called from a Python frame.
Frames that are not the script's are recognized here.
"""

import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from torchperfd_daemon.analysis.categories import ANNOTATION, DEVICE, LAUNCHES, OPERATOR, PYTHON
from torchperfd_daemon.analysis.intervals import ByThread, Nesting, Spans, nest
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

# Inductor marks what it runs with an annotation, which replaces the operator if there is none.
_COMPILED: Final = ("## Call CompiledFxGraph", "Torch-Compiled Region")
# Older exporters cut times to whole microseconds, so that a launch may seem to follow its operator by one.
_ROUNDING_NS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Links:
    """The launch of each device event, as parallel columns in file order.

    Attributes:
        event: The row of each kernel, copy and fill.
        launch: The row of the runtime or driver call that launched it, -1 where the file has none.
        operator: The row of the operator that launched it, -1 for none.
    """

    event: Int64
    launch: Int64
    operator: Int64

    def launched_at(self, trace: Trace) -> Int64:
        """Return when the host launched each event, in ns; -1 if unknown."""
        rows = np.where(self.launch >= 0, self.launch, self.operator)
        return np.where(rows >= 0, trace.start[rows], -1)


def find_links(trace: Trace) -> Links:
    """Return the launch of each device event of a trace."""
    events = np.flatnonzero(trace.of_categories(DEVICE))
    calls = np.flatnonzero(trace.of_categories(LAUNCHES) & (trace.correlation >= 0))
    launch = _latest(trace, calls, trace.correlation[calls], trace.correlation[events], trace.start[events])
    around = _around(trace, launch)
    launchers = np.flatnonzero(trace.of_categories({OPERATOR, ANNOTATION}) & (trace.external > 0))
    known = launch >= 0
    moment = np.where(known, trace.start[launch], trace.start[events])
    external = trace.external[events]
    named = _latest(trace, launchers, trace.external[launchers], external, moment)
    believed = _believed(trace, events, launch, around, named)
    return Links(events, launch, np.where(believed, named, around))


def _believed(trace: Trace, events: Int64, launch: Int64, around: Int64, named: Int64) -> Flags:
    """Return for which events the operator that ``External id`` names may have made the launch."""
    external, known = trace.external[events], launch >= 0
    is_own = (external > 0) & (external != trace.correlation[events])
    moment = trace.start[launch]
    covers = (trace.start[named] <= moment) & (moment <= trace.end[named] + _ROUNDING_NS)
    covers &= (trace.thread[named] == trace.thread[launch]) | (around < 0)
    believed: Flags = is_own & (named >= 0) & (covers | ~known)
    judged = is_own & known
    # Where most ids name no operator that ran at the launch, the others do so by chance.
    if 2 * int((believed & judged).sum()) < int(judged.sum()):
        believed[:] = False
    return believed


def _around(trace: Trace, launch: Int64) -> Int64:
    """Return the row of the innermost operator around each launch, -1 for none."""
    finished = ~trace.unfinished
    operators = np.flatnonzero(trace.of_categories({OPERATOR}) & finished)
    found = _innermost(trace, operators, launch)
    missing = np.flatnonzero((found < 0) & (launch >= 0))
    if len(missing):
        annotations = np.flatnonzero(trace.of_categories({ANNOTATION}) & finished)
        compiled = trace.named(annotations, lambda name: name.startswith(_COMPILED))
        found[missing] = _innermost(trace, compiled, launch[missing])
    return found


def _innermost(trace: Trace, rows: Int64, launch: Int64) -> Int64:
    """Return which of ``rows`` is the innermost around each launch, -1 for none."""
    found = np.full(len(launch), -1, dtype=np.int64)
    known = np.flatnonzero(launch >= 0)
    if not len(rows) or not len(known):
        return found
    candidates = ByThread(trace, rows)
    threads = trace.thread[launch[known]]
    for thread in np.unique(threads).tolist():
        chosen, mine = known[threads == thread], candidates.on(thread)
        innermost = Spans(trace.start[mine], trace.end[mine]).innermost(trace.start[launch[chosen]])
        found[chosen] = np.append(mine, -1)[innermost]
    return found


def _latest(trace: Trace, rows: Int64, keys: Int64, wanted: Int64, moments: Int64) -> Int64:
    """Return the row of each wanted key, -1 for none.

    Of several rows with one key (traces of several processes in one file) it is the last that began by the
    moment, or else the first.
    """
    if not len(rows):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    first = np.searchsorted(keys, wanted)
    if (np.diff(keys) == 0).any():
        starts = np.sort(trace.start[rows])
        width = len(rows) + 1
        number = np.concatenate(([0], np.cumsum(np.diff(keys) != 0)))
        place = number * width + np.searchsorted(starts, trace.start[rows], side="right")
        by_place = np.argsort(place, kind="stable")
        rows = rows[by_place]
        key = number[np.minimum(first, len(rows) - 1)]
        latest = key * width + np.searchsorted(starts, moments, side="right")
        found = np.maximum(first, np.searchsorted(place[by_place], latest, side="right") - 1)
    else:
        found = first
    last = len(rows) - 1
    is_known = keys[np.minimum(first, last)] == wanted
    return np.where(is_known, rows[np.minimum(found, last)], -1)


_MODULE: Final = "nn.Module: "
_Label = TypeVar("_Label", bound=Hashable)


class Callers:
    """The Python frames around the calls of one trace."""

    def __init__(self, trace: Trace, host: Flags) -> None:
        self._trace = trace
        python = trace.of_categories({PYTHON})
        self._calls = calls = nest(trace, np.flatnonzero(host | python))
        self._caller = _first(calls.parent.copy(), python[calls.row], calls.parent)
        self._caller = self._with_forward_callers()

    def stacks(self, frames: int) -> tuple[Int64, list[tuple[str, ...]]]:
        """Return for each event of the trace an index into the table of stacks, innermost frame first."""

        def stack(call: int) -> tuple[str, ...]:
            names: list[str] = []
            while call >= 0 and len(names) < frames:
                names.append(self._name(call))
                call = int(self._caller[call])
            return tuple(names)

        return self._labels(stack, ())

    def modules(self) -> tuple[Int64, list[str]]:
        """Return for each event of the trace an index into the table of innermost modules."""

        def module(call: int) -> str:
            while call >= 0 and not self._name(call).startswith(_MODULE):
                call = int(self._caller[call])
            return self._name(call).removeprefix(_MODULE) if call >= 0 else ""

        return self._labels(module, "")

    def _labels(self, label: Callable[[int], _Label], none: _Label) -> tuple[Int64, list[_Label]]:
        """Return each event's index into the table of labels, and the table; 0 is ``none``, for no caller."""
        table = {none: 0}
        used, inverse = np.unique(self._caller, return_inverse=True)
        numbers = [table.setdefault(label(caller), len(table)) for caller in used.tolist()]
        labels = np.zeros(len(self._trace), dtype=np.int64)
        labels[self._calls.row] = np.array(numbers, dtype=np.int64)[inverse]
        return labels, list(table)

    def _name(self, call: int) -> str:
        return self._trace.names[int(self._trace.name[self._calls.row[call]])]

    def _with_forward_callers(self) -> Int64:
        """Return the callers, those of backward calls replaced by their forward calls' own."""
        trace, calls = self._trace, self._calls
        marked = trace.backward[calls.row]
        if not marked.any():
            return self._caller
        node = _first(np.where(marked, np.arange(len(calls)), calls.parent), marked, calls.parent)
        sequence = trace.sequence[calls.row]
        forward = np.flatnonzero((node < 0) & (sequence >= 0))
        # An operator that makes no node shows the next node's number; the last to show it made the node.
        forward = forward[np.argsort(-trace.start[calls.row[forward]], kind="stable")]
        numbers, last = np.unique(sequence[forward], return_index=True)
        backward = np.flatnonzero(node >= 0)
        wanted = sequence[node[backward]]
        caller = self._caller.copy()
        caller[backward] = -1
        known = np.isin(wanted, numbers)
        places = forward[last[np.searchsorted(numbers, wanted[known])]]
        caller[backward[known]] = self._caller[places]
        return caller


def _first(start: Int64, good: Flags, parent: Int64) -> Int64:
    """Climb from each call in ``start`` to the nearest good one at or above it, -1 where there is none."""
    found = start
    climbing = np.flatnonzero(found >= 0)
    while len(climbing := climbing[~good[found[climbing]]]):
        found[climbing] = parent[found[climbing]]
        climbing = climbing[found[climbing] >= 0]
    return found


_RUNNER: Final = re.compile(
    r"(<frozen runpy>|(.*/)?runpy\.py"
    r"|(.*/)?torchperfd/(__main__|(model/)?own_commands|launch|script|launch/\w+)\.py)\(\d+\)"
    r"|<built-in (function|method) exec\b"
)
_OF_EVERY_THREAD: Final = re.compile(r"(.*/)?threading\.py\(\d+\)")
_OWN: Final = re.compile(r"(.*/)?(torchperfd|torchperfd_cli|grpc)/[\w/]+\.py\(\d+\)")
# Names of events, and parts of Python frames, that belong to a profiler, a tracer or the start of a thread.
_TOOL: Final = re.compile(
    r"^profiler::|^PyTorch Profiler|^\[pytorch\|profiler\||torch::unwind|CapturedTraceback|_record_function_"
    r"|(?:^|/)(?:torch/(?:autograd/)?profiler|torchperfd|torchperfd_daemon|torchperfd_cli|grpc)(?:/|_|\.py|::)"
    r"|(?:^|/)threading\.py\(\d+\)|_bootstrap(?:_inner)?$|^torchperfd[.:]"
)
_PACKAGES: Final = frozenset(
    (
        *("accelerate", "apex", "datasets", "deepspeed", "einops", "fastai", "ignite", "lightning", "numpy"),
        *("pandas", "peft", "PIL", "pytorch_lightning", "safetensors", "scipy", "sklearn", "timm", "torch"),
        *("torchaudio", "torchdata", "torchmetrics", "torchperfd", "torchvision", "tqdm"),
        *("transformers", "triton"),
        *sys.stdlib_module_names,
    )
)
"""First parts of paths as torch writes them: relative to the folders that Python imports from."""
_INSTALLED: Final = re.compile(r"(.*/)?(site-packages|dist-packages|lib/python\d[\d.]*)/")
_FRAME: Final = re.compile(r"(?P<path>[^()]*?)(\.py)?\(\d+\)")


def is_library(name: str) -> bool:
    """Return whether a name is that of a Python frame in a library, the standard one or a built-in."""
    if name.startswith(("<built-in ", "<frozen ")):
        return True
    frame = _FRAME.match(name)
    if frame is None:
        return False
    path = frame["path"]
    return _INSTALLED.match(path) is not None or path.split("/")[0] in _PACKAGES


def is_tools(name: str) -> bool:
    """Return whether an event is a tool's own: a profiler's, torchperfd's, or the start of a thread."""
    return _TOOL.search(name) is not None


def runner_rows(trace: Trace, calls: Nesting) -> Int64:
    """Return the rows of the frames of ``torchperfd run`` and runpy above the user's first frame."""
    return calls.row[np.flatnonzero(_outermost(calls, trace.are_named(calls.row, _RUNNER.match)))]


def own_threads(trace: Trace, calls: Nesting, python: Flags) -> set[int]:
    """Return the threads that were begun in torchperfd or in its gRPC, by the frames they begin with."""
    begins = _outermost(calls, trace.are_named(calls.row, _OF_EVERY_THREAD.match))
    # The first frame of the thread's own, below those of threading.
    below = np.where(calls.parent >= 0, begins[calls.parent], True)
    first = below & ~begins & python[calls.row]
    own = trace.are_named(calls.row, _OWN.match)
    thread = trace.thread[calls.row]
    ours = set(np.unique(thread[first & own]).tolist())
    return ours - set(np.unique(thread[first & ~own]).tolist())


def _outermost(calls: Nesting, such: Flags) -> Flags:
    """Return which of such calls have no other call above them than such ones."""
    found = np.zeros(len(calls), dtype=np.bool_)
    for position in np.flatnonzero(such).tolist():
        parent = int(calls.parent[position])
        found[position] = parent < 0 or found[parent]
    return found
