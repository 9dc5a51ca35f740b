"""The collectives of one trace as columns, with the data that finds each in the other ranks' traces.

One collective has several events: the operator (``c10d::allreduce_``), its arguments
(``record_param_comms``), a span of the backend (``gloo:all_reduce``) and a kernel. It counts once, by the
event that covers its whole time: the kernel; without a device gloo's span; and in a file with neither,
``record_param_comms``, which is only the host's call. Sends and receives are left out.
"""

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec
import numpy as np

from torchperfd_daemon.analysis.comm_kernels import communicates
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
        source: The kind of event that gives its time.
    """

    name: str
    group: str
    ranks: str
    source: Source


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one trace as parallel columns, in order of start; small, and it pickles.

    Attributes:
        origin_ns: The origin of all times, in ns on the clock of the rank's host.
        duration_ns: From the trace's earliest start to its latest end.
        world_size: The number of ranks of the run; None if the file does not contain it.
        steps: The profiler's numbers of the training steps in the trace.
        kind: The collective's kind, an index into ``kinds``.
        sequence: The group's count of its collectives, equal on all ranks; -1 for none.
        start: When the rank entered it, in ns since the origin.
        end: When the rank left it, likewise.
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
    kernels = trace.of_categories({"kernel"})
    found = [_by_arguments(trace, kernels, "kernel"), _by_kernel(trace, kernels), _by_span(trace)]
    if not any(len(each.row) for each in found):
        found = [_by_arguments(trace, _named(trace, {_CALL}), "call")]
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


def _named(trace: Trace, wanted: Set[str]) -> Flags:
    return np.array([name in wanted for name in trace.names], dtype=np.bool_)[trace.name]


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
