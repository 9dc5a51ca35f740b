"""Python frames in a trace: the caller of each operator, and the frames that are not the script's.

The callers of an operator are its Python stack and module, from the frames of ``with_stack=True``. A backward
operator gets the caller of its forward operator, as in torch: both have the same sequence number. During a
backward pass the model's own code is not on the stack. Frames of torchperfd's threads and runner, and those
of libraries, are not the script's.
"""

import re
import sys
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

import numpy as np

from torchperfd_daemon.analysis.intervals import Nesting, nest
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

PYTHON: Final = "python_function"
_MODULE: Final = "nn.Module: "
_Label = TypeVar("_Label", bound=Hashable)


class Callers:
    """The Python frames around the calls of one trace.

    Args:
        host: Which of its events are calls on the host, Python frames aside.
    """

    def __init__(self, trace: Trace, host: Flags) -> None:
        self._trace = trace
        python = trace.of_categories({PYTHON})
        self._calls = calls = nest(trace, np.flatnonzero(host | python))
        self._caller = _first(calls.parent.copy(), python[calls.row], calls.parent)
        self._caller = self._with_forward_callers()

    def stacks(self, frames: int) -> tuple[Int64, list[tuple[str, ...]]]:
        """Return for each event of the trace an index into the table of stacks, innermost frame first.

        Args:
            frames: How many frames count, from the innermost.
        """

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
    r"|(?:^|/)threading\.py\(\d+\)|_bootstrap(?:_inner)?$|^torchperfd[.:]",
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
    """Return the rows of the frames of ``torchperfd run`` and runpy above the user's first frame.

    Args:
        calls: Its nested calls, Python frames among them.
    """
    return calls.row[np.flatnonzero(_outermost(calls, _matching(trace, _RUNNER)[trace.name[calls.row]]))]


def own_threads(trace: Trace, calls: Nesting, python: Flags) -> set[int]:
    """Return the threads that were begun in torchperfd or in its gRPC, by the frames they begin with.

    Args:
        calls: Its nested calls, Python frames among them.
        python: Which events are Python frames.
    """
    name = trace.name[calls.row]
    begins = _outermost(calls, _matching(trace, _OF_EVERY_THREAD)[name])
    # The first frame of the thread's own, below those of threading.
    below = np.where(calls.parent >= 0, begins[calls.parent], True)
    first = below & ~begins & python[calls.row]
    own = _matching(trace, _OWN)[name]
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


def _matching(trace: Trace, pattern: re.Pattern[str]) -> Flags:
    """Return which names of a trace begin like a pattern."""
    return np.array([pattern.match(name) is not None for name in trace.names], dtype=np.bool_)
