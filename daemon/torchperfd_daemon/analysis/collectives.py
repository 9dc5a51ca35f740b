"""The collectives of traces as columns, with the data that finds each in the other ranks' traces.

One collective has several events: the operator (``c10d::allreduce_``), its arguments
(``record_param_comms``), a span of the backend (``gloo:all_reduce``) and a kernel. It counts once, by the
event that covers its whole time: the kernel; without a device gloo's span; and in a file with neither,
``record_param_comms``, which is only the host's call. Sends and receives are left out.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec
import numpy as np

from torchperfd_daemon.analysis.breakdown import communicates
from torchperfd_daemon.analysis.categories import KERNEL
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.trace import Flags, Int32, Int64, Trace

Source = Literal["kernel", "span", "call"]

_KERNEL: Final = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
# Kernels of engines for inference that exchange by themselves, without arguments.
_CUSTOM: Final = (
    (
        re.compile(r"cross_device_reduce|quick_?reduce|(?:one|two)_?shot_all_?reduce", re.IGNORECASE),
        "all_reduce",
    ),
    (re.compile(r"(?:::|_)all_?reduce", re.IGNORECASE), "all_reduce"),
    (re.compile(r"(?:::|_)reduce_?scatter", re.IGNORECASE), "reduce_scatter"),
    (re.compile(r"(?:::|_)all_?gather(?!_copy)", re.IGNORECASE), "all_gather"),
)
_SPAN: Final = "gloo:"
_CALL: Final = "record_param_comms"
# Recorded by c10d and the backends too, but not every rank of the group takes part, or no rank waits.
# A "Generic" kernel of RCCL may be any of them.
_NO_COLLECTIVES: Final = frozenset(
    {"send", "recv", "recvanysource", "sendrecv", "pointtopoint", "wait", "init", "generic"}
)
# For these the recorded input is no smaller than the output. Of a gathering one the output is not recorded.
_SIZED_BY_INPUT: Final = frozenset({"all_reduce", "broadcast", "reduce", "all_to_all", "reduce_scatter"})
# Bytes of one element, by c10's names of types and by those of C++, which the operators' inputs have.
_ELEMENT_BYTES: Final = {
    "bool": 1, "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "short": 2, "short int": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8,
    "complexfloat": 8, "c10::complex<float>": 8, "complexdouble": 16, "c10::complex<double>": 16,
}  # fmt: skip
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError)
_DIMS: Final = msgspec.json.Decoder(list[list[int]])
_TYPES: Final = msgspec.json.Decoder(list[str])


@dataclass(frozen=True, slots=True)
class Kind:
    """The function of a collective, and its process group.

    Attributes:
        name: The collective, as the backend names it: ``allreduce``, ``_allgather_base``, ``all_reduce`` …
        group: The process group's name; empty if the file does not distinguish groups.
        ranks: The group's ranks, as written in the file; empty without them.
    """

    name: str
    group: str
    ranks: str
    source: Source


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one trace as parallel columns, in order of start; small, and it pickles.

    Attributes:
        world_size: The number of ranks of the run; None if the file does not contain it.
        steps: The profiler's numbers of the training steps in the trace.
        sequence: The group's count of its collectives, equal on all ranks; -1 for none.
        bytes: Of the input or the output, whichever is larger; -1 if the file does not contain them.
    """

    origin_ns: int
    duration_ns: int
    world_size: int | None
    steps: tuple[int, ...]
    kinds: tuple[Kind, ...]
    kind: Int32
    sequence: Int64
    start: Int64
    end: Int64
    bytes: Int64

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class _Found:
    """Collectives found in one way: rows of the trace, and columns parallel to them."""

    row: Int64
    kinds: list[Kind]
    kind: Int32
    sequence: Int64
    bytes: Int64


def collectives(trace: Trace, steps: Sequence[Step]) -> Collectives:
    """Return the collectives of a trace, which has these steps, each of them once."""
    kernels = trace.of_categories({KERNEL})
    found = [_by_arguments(trace, kernels, "kernel"), _by_kernel(trace, kernels), _by_span(trace)]
    if not any(len(each.row) for each in found):
        found = [_by_arguments(trace, trace.of_names(lambda name: name == _CALL), "call")]
    kinds = {kind: None for each in found for kind in each.kinds}
    number = {kind: at for at, kind in enumerate(kinds)}
    renumbered = [np.array([number[kind] for kind in each.kinds], np.int32)[each.kind] for each in found]
    row = np.concatenate([each.row for each in found])
    kind, start, end, sequence, size = _once(
        np.concatenate(renumbered),
        trace.start[row],
        trace.end[row],
        np.concatenate([each.sequence for each in found]),
        np.concatenate([each.bytes for each in found]),
    )
    order = np.argsort(start, kind="stable")
    return Collectives(
        origin_ns=trace.origin_ns,
        duration_ns=trace.duration_ns,
        world_size=trace.world_size,
        steps=tuple(step.index for step in steps),
        kinds=tuple(kinds),
        kind=kind[order],
        sequence=sequence[order],
        start=start[order],
        end=end[order],
        bytes=size[order],
    )


def _by_arguments(trace: Trace, wanted: Flags, source: Source) -> _Found:
    """Take the wanted events whose arguments identify their collective."""
    args = trace.collective_args
    collective = np.array([word.lower() not in _NO_COLLECTIVES for word in args.words], dtype=np.bool_)
    element_bytes = np.array([_ELEMENT_BYTES.get(word.lower(), 0) for word in args.words], dtype=np.int64)
    at = np.flatnonzero(wanted[args.row] & collective[args.name])
    words, kind = np.unique(
        np.column_stack([args.name[at], args.group[at], args.ranks[at]]), axis=0, return_inverse=True
    )
    each = element_bytes[args.dtype[at]]
    return _Found(
        row=args.row[at],
        kinds=[
            Kind(args.words[name], args.words[group], args.words[ranks], source)
            for name, group, ranks in words.tolist()
        ],
        kind=kind.reshape(-1).astype(np.int32),
        sequence=args.sequence[at],
        bytes=np.where((args.elements[at] >= 0) & (each > 0), args.elements[at] * each, -1),
    )


def _by_kernel(trace: Trace, kernels: Flags) -> _Found:
    """Take kernels without such arguments: NCCL's and RCCL's in older exports and graphs, and custom ones."""
    silent = kernels.copy()
    silent[trace.collective_args.row] = False
    is_communication = communicates()
    names = [""] * len(trace.names)
    for number in np.unique(trace.name[silent]).tolist():
        name = trace.names[number]
        if match := _KERNEL.search(name):
            names[number] = match[1]
        elif is_communication(name):
            names[number] = _custom(name)
    return _by_name(trace, silent, names, "kernel")


def _custom(kernel: str) -> str:
    """Return the collective that a communication kernel with this name makes; empty if the name has none."""
    if "nccl" in kernel.lower():
        return ""
    return next((name for pattern, name in _CUSTOM if pattern.search(kernel)), "")


def _by_span(trace: Trace) -> _Found:
    """Take gloo's spans; the shapes of their inputs, if recorded, give the bytes."""
    names = [name.removeprefix(_SPAN) if name.startswith(_SPAN) else "" for name in trace.names]
    found = _by_name(trace, np.ones(len(trace), dtype=np.bool_), names, "span")
    inputs, which = np.unique(
        np.column_stack([trace.shape[found.row], trace.type[found.row]]), axis=0, return_inverse=True
    )
    moved = [_input_bytes(trace.shapes[shape], trace.types[kind]) for shape, kind in inputs.tolist()]
    sized = np.array([kind.name in _SIZED_BY_INPUT for kind in found.kinds], dtype=np.bool_)[found.kind]
    size = np.array(moved, dtype=np.int64)[which.reshape(-1)]
    return replace(found, bytes=np.where(sized, size, -1))


def _by_name(trace: Trace, wanted: Flags, names: Sequence[str], source: Source) -> _Found:
    """Take the wanted events by ``names``: a collective, or none, for each of the trace's names."""
    is_collective = [name != "" and name.lower() not in _NO_COLLECTIVES for name in names]
    row = np.flatnonzero(wanted & np.array(is_collective, dtype=np.bool_)[trace.name])
    used, kind = np.unique(trace.name[row], return_inverse=True)
    return _Found(
        row=row,
        kinds=[Kind(names[name], "", "", source) for name in used.tolist()],
        kind=kind.astype(np.int32),
        sequence=np.full(len(row), -1, dtype=np.int64),
        bytes=np.full(len(row), -1, dtype=np.int64),
    )


def _once(
    kind: Int32, start: Int64, end: Int64, sequence: Int64, size: Int64
) -> tuple[Int32, Int64, Int64, Int64, Int64]:
    """Make one of events that have the same kind and number: the kernels of one collective."""
    # An event without a number is a collective of its own: it gets a unique number below all others.
    number = np.where(sequence >= 0, sequence, -1 - np.arange(len(sequence)))
    order = np.lexsort((number, kind))
    kind, number = kind[order], number[order]
    first = np.flatnonzero(
        np.diff(kind, prepend=-1).astype(np.bool_) | np.diff(number, prepend=0).astype(np.bool_)
    )
    if not len(first):
        return kind, start, end, sequence, size
    return (
        kind[first],
        np.minimum.reduceat(start[order], first),
        np.maximum.reduceat(end[order], first),
        sequence[order][first],
        # They repeat the collective's arguments.
        np.maximum.reduceat(size[order], first),
    )


def _input_bytes(shapes: str, types: str) -> int:
    """Return the bytes of inputs with these ``Input Dims`` and ``Input type``; -1 if they do not show it."""
    try:
        dims, names = _DIMS.decode(shapes), _TYPES.decode(types)
    except _UNREADABLE:
        return -1
    sizes = [_ELEMENT_BYTES.get(name.lower(), 0) for name in names]
    if len(dims) != len(names) or not all(sizes):
        return -1
    return sum(math.prod(each) * size for each, size in zip(dims, sizes, strict=True))


# Collectives from or to one rank: some ranks leave before others arrive, so ends do not show the clocks.
_ROOTED: Final = frozenset(
    {"broadcast", "_broadcast_oop", "Broadcast", "reduce", "_reduce_oop", "Reduce", "gather", "scatter"}
)
# In these every rank of the group moves equally many bytes, which distinguishes collectives without numbers.
_ALIKE: Final = frozenset(
    {"allreduce", "all_reduce", "AllReduce", "broadcast", "Broadcast", "reduce", "Reduce"}
)
# Ends of one collective on two ranks are no farther apart than this, or little.
TOGETHER_NS: Final = 1_000_000


class CollectiveEvents:
    """All ranks' collectives as columns, ordered by rank and start, and which of them are one.

    Attributes:
        sort: Equal for events that may be one collective, by kind and bytes.
        match: Equal for the events of one collective; -1 if not matched.
        ends_together: Whether all ranks end it at about the same time.
        matches: How many matches there are by sequence, by order and by end.
    """

    def __init__(self, traces: Mapping[int, Collectives]) -> None:
        self.ranks = sorted(traces)
        each = [traces[rank] for rank in self.ranks]
        numbers = {kind: at for at, kind in enumerate(dict.fromkeys(k for one in each for k in one.kinds))}
        self.kinds = list(numbers)
        renumbered = [np.array([numbers[kind] for kind in one.kinds], np.int64)[one.kind] for one in each]
        self.origin_ns = [one.origin_ns for one in each]
        self.place = np.repeat(np.arange(len(each)), [len(one) for one in each])
        self.kind = np.concatenate(renumbered)
        self.start = np.concatenate([one.start for one in each])
        self.end = np.concatenate([one.end for one in each])
        self.bytes = np.concatenate([one.bytes for one in each])
        alike = np.array([kind.name in _ALIKE for kind in self.kinds], dtype=np.bool_)[self.kind]
        by_size = np.column_stack([self.kind, np.where(alike, self.bytes, -1)])
        self.sorts, sort = np.unique(by_size, axis=0, return_inverse=True)
        self.sort = sort.reshape(-1)
        self.match = np.full(len(self.kind), -1, dtype=np.int64)
        self.matches = [0, 0, 0]
        self.sequence = np.concatenate([one.sequence for one in each])
        rooted = np.array([kind.name in _ROOTED for kind in self.kinds], dtype=np.bool_)
        self.ends_together = ~rooted[self.kind]

    def table(self, values: Int64) -> Int64:
        """Spread a column over matches (rows) and places (columns); 0 where a rank takes no part."""
        table = np.zeros((sum(self.matches), len(self.ranks)), dtype=np.int64)
        matched = self.match >= 0
        table[self.match[matched], self.place[matched]] = values[matched]
        return table

    def settle(self, way: int) -> None:
        """Renumber the matches from 0, earlier ones first; an event without a partner becomes unmatched."""
        found = np.flatnonzero(self.match >= 0)
        _, match, ranks = np.unique(self.match[found], return_inverse=True, return_counts=True)
        kept = ranks > 1
        number = np.where(kept, np.cumsum(kept) - 1, -1)
        self.match[found] = number[match.reshape(-1)]
        self.matches[way] = int(kept.sum()) - sum(self.matches)


def nearest(sorted_moments: Int64, moments: Int64) -> Int64:
    """Return for each moment the index of the nearest among ``sorted_moments``, of which there is one."""
    after = np.searchsorted(sorted_moments, moments).clip(1, max(1, len(sorted_moments) - 1))
    before = after - 1
    after = np.minimum(after, len(sorted_moments) - 1)
    closer = np.abs(sorted_moments[after] - moments) < np.abs(moments - sorted_moments[before])
    return np.where(closer, after, before)


def median(values: Int64) -> int:
    """Return the median of times that may be too large for a float."""
    return int(np.median(values - values[0])) + int(values[0])
