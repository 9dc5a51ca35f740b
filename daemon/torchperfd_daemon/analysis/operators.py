"""The operator table: how often each operator ran, and its own and inclusive time.

The numbers are those of ``torch.profiler``'s ``key_averages()``, to the nanosecond; the rules are
read from ``torch/autograd/profiler_util.py`` (``_populate_cpu_children``, ``_remove_dup_nodes``).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.analysis.trace import Trace

_PYTHON: Final = "python_function"
_ANNOTATION: Final = "user_annotation"
_HOST: Final = frozenset(
    {"cpu_op", _ANNOTATION, "cuda_runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "overhead"}
)
_LAUNCHERS: Final = frozenset({"cpu_op", _ANNOTATION})
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# torch leaves these out before it nests.
_HIDDEN: Final = frozenset(
    {
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
    }
)
# c10d's Work objects open a span on one thread and close it on another. torch marks such spans as
# asynchronous, outside all nesting and without self time; the trace shows them only by their name.
_ASYNC_PREFIXES: Final = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")


@dataclass(frozen=True, slots=True)
class Operator:
    """One row, over all calls of one name. Times in ns.

    Attributes:
        name: The operator; every ``ProfilerStep#N`` counts as ``ProfilerStep*``.
        category: Kineto's category, such as ``cpu_op`` or ``user_annotation``.
        calls: How often it ran.
        self_cpu_ns: Host time outside its children. Negative where children on record outlast it.
        total_cpu_ns: Host time, children included.
        self_device_ns: Time of the kernels, copies and fills it launched itself.
        total_device_ns: The same, children included.
    """

    name: str
    category: str
    calls: int
    self_cpu_ns: int
    total_cpu_ns: int
    self_device_ns: int
    total_device_ns: int


def operators(trace: Trace, *, python_functions: bool = False) -> list[Operator]:
    """Return the table, most self CPU time first.

    Args:
        trace: The loaded trace.
        python_functions: Whether Python frames (``with_stack=True``) are rows and parents, as in
            torch's own table, or are left out so that self time stays with the operators.
    """
    device_ns = _device_time_by_external(trace)
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for rows in _by_thread(trace, python_functions):
        _Nesting(trace, rows, device_ns).add_to(sums)
    for row in _asynchronous(trace):
        entry = sums[trace.names[row], trace.categories[row]]
        entry[0] += 1
        entry[2] += trace.ends[row] - trace.starts[row]
    table = [Operator(name, category, *entry) for (name, category), entry in sums.items()]
    return sorted(table, key=lambda row: (-row.self_cpu_ns, row.name, row.category))


class _Nesting:
    """The calls of one thread, each under the innermost call that contains it.

    All columns are parallel to ``rows``, which is sorted so that a parent precedes its children.
    """

    def __init__(self, trace: Trace, rows: list[int], device_ns: dict[int, int]) -> None:
        self._categories = [trace.categories[row] for row in rows]
        self._names = [_table_name(trace.names[row]) for row in rows]
        self._totals = [trace.ends[row] - trace.starts[row] for row in rows]
        self._device = [
            device_ns.get(trace.externals[row], 0) if trace.categories[row] in _LAUNCHERS else 0
            for row in rows
        ]
        self._parents = _parents([trace.starts[row] for row in rows], [trace.ends[row] for row in rows])
        self._children = [0] * len(rows)
        self._children_total = [0] * len(rows)
        for call, parent in enumerate(self._parents):
            if parent >= 0:
                self._children[parent] += 1
                self._children_total[parent] += self._totals[call]
        self._kept = self._merge_repeats()

    def _merge_repeats(self) -> list[bool]:
        """Fold an only child with its parent's name into the parent, which takes over its children.

        torch does so because a redispatched operator records itself again. The parent's own kernels
        are replaced by the child's, as in torch.
        """
        kept = [True] * len(self._names)
        for call, written_parent in enumerate(self._parents):
            if written_parent < 0:
                continue
            # A parent that was itself folded left its index of the survivor here.
            parent = written_parent if kept[written_parent] else self._parents[written_parent]
            self._parents[call] = parent
            if self._children[parent] == 1 and self._names[parent] == self._names[call]:
                kept[call] = False
                self._children[parent] = self._children[call]
                self._children_total[parent] = self._children_total[call]
                self._device[parent] = self._device[call]
        return kept

    def add_to(self, sums: defaultdict[tuple[str, str], list[int]]) -> None:
        device_totals = self._device.copy()
        for call in range(len(self._names) - 1, -1, -1):
            if not self._kept[call]:
                continue
            parent = self._parents[call]
            if parent >= 0:
                device_totals[parent] += device_totals[call]
            entry = sums[self._names[call], self._categories[call]]
            entry[0] += 1
            entry[1] += self._totals[call] - self._children_total[call]
            entry[2] += self._totals[call]
            entry[3] += self._device[call]
            entry[4] += device_totals[call]


def _parents(starts: list[int], ends: list[int]) -> list[int]:
    """Return each call's innermost container among the calls before it, -1 for none.

    Calls are in order of (start, -end). A call that outlasts an open one closes it: torch gives no
    parent to calls that overlap without containment.
    """
    parents: list[int] = []
    stack: list[int] = []
    for call, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while stack and (start >= ends[stack[-1]] or end > ends[stack[-1]]):
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(call)
    return parents


def _by_thread(trace: Trace, python_functions: bool) -> list[list[int]]:
    """Return the nesting rows of each thread, in order of (start, -end), ties as in the file."""
    wanted = _HOST | {_PYTHON} if python_functions else _HOST
    threads: defaultdict[tuple[int | str, int | str], list[int]] = defaultdict(list)
    for row, category in enumerate(trace.categories):
        if category in wanted and trace.names[row] not in _HIDDEN and not _is_asynchronous(trace, row):
            threads[trace.threads[row]].append(row)
    for rows in threads.values():
        rows.sort(key=lambda row: (trace.starts[row], -trace.ends[row]))
    return list(threads.values())


def _asynchronous(trace: Trace) -> list[int]:
    return [row for row in range(len(trace)) if _is_asynchronous(trace, row)]


def _is_asynchronous(trace: Trace, row: int) -> bool:
    return trace.categories[row] == _ANNOTATION and trace.names[row].startswith(_ASYNC_PREFIXES)


def _device_time_by_external(trace: Trace) -> dict[int, int]:
    totals: defaultdict[int, int] = defaultdict(int)
    for row, category in enumerate(trace.categories):
        if category in _DEVICE and trace.externals[row]:
            totals[trace.externals[row]] += trace.ends[row] - trace.starts[row]
    return dict(totals)


def _table_name(name: str) -> str:
    return "ProfilerStep*" if name.startswith("ProfilerStep#") else name
