"""Which Python frames are not the script's: torchperfd's threads and runner, and those of libraries."""

import re
import sys
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.nesting import Nesting
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_RUNNER: Final = re.compile(
    r"(<frozen runpy>|(.*/)?runpy\.py"
    r"|(.*/)?torchperfd/(__main__|own_commands|launch|script|launch/\w+)\.py)\(\d+\)"
    r"|<built-in (function|method) exec\b"
)
_OF_EVERY_THREAD: Final = re.compile(r"(.*/)?threading\.py\(\d+\)")
_OWN: Final = re.compile(r"(.*/)?(torchperfd|grpc)/[\w/]+\.py\(\d+\)")
# Names of events, and parts of Python frames, that belong to a profiler, a tracer or the start of a thread.
_TOOL: Final = re.compile(
    r"^profiler::|^PyTorch Profiler|^\[pytorch\|profiler\||torch::unwind|CapturedTraceback|_record_function_"
    r"|(?:^|/)(?:torch/(?:autograd/)?profiler|torchperfd|torchperfd_daemon|grpc)(?:/|_|\.py|::)"
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
