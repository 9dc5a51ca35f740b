"""Exposed communication by kind of collective and type of its elements."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.categories import COPY
from torchperfd_daemon.analysis.trace import Int64, Trace

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "point-to-point", "unknown"
]

_KINDS: Final[tuple[tuple[re.Pattern[str], CollectiveKind], ...]] = (
    (re.compile(r"reduce_?scatter", re.IGNORECASE), "reduce-scatter"),
    (re.compile(r"all_?gather", re.IGNORECASE), "all-gather"),
    (re.compile(r"all_?reduce|quick_?reduce", re.IGNORECASE), "all-reduce"),
    (re.compile(r"all_?to_?all", re.IGNORECASE), "all-to-all"),
    (re.compile(r"broadcast", re.IGNORECASE), "broadcast"),
    (re.compile(r"send|recv|point_?to_?point", re.IGNORECASE), "point-to-point"),
    (re.compile(r"cross_device_reduce", re.IGNORECASE), "all-reduce"),
)
# Types of elements by the words that exporters and kernels' names have for them.
_TYPES: Final = (
    (re.compile(r"(?:^|_|<|::)(?:bfloat16|bf16|__nv_bfloat16|hip_bfloat16)", re.IGNORECASE), "bfloat16"),
    (re.compile(r"(?:^|_|<|::|\b)(?:half|f16|float16|__half)", re.IGNORECASE), "float16"),
    (re.compile(r"(?:^|_|<)(?:float8|fp8|e4m3|e5m2)", re.IGNORECASE), "float8"),
    (re.compile(r"(?:^|_|<|\b)(?:double|f64|float64)", re.IGNORECASE), "float64"),
    (re.compile(r"(?:^|_|<|\b)(?:float|f32|float32)\b|_f32|_float", re.IGNORECASE), "float32"),
)

_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Exposed:
    """Communication kernels of one kind and element type that run while nothing is computed.

    Attributes:
        dtype: The elements' type, as torch names it; empty if the file does not show it.
    """

    kind: CollectiveKind
    dtype: str
    ns: float
    rows: Int64

    @property
    def text(self) -> str:
        """What they are, in words."""
        name = "exchanges of unknown kind" if self.kind == "unknown" else f"{self.kind} collectives"
        return f"{name} in {self.dtype}" if self.dtype else name


def exposed_exchanges(context: AdviceContext) -> list[Exposed]:
    """Return the exposed communication of a step, most first; together no more than the breakdown's."""
    trace, rows = context.trace, context.communication
    if not len(rows):
        return []
    exposed_ns = context.per_step(sum(each.exposed_comm_ns for each in context.breakdowns))
    computing = context.device_rows[~np.isin(context.device_rows, rows, kind="table")]
    computing = computing[~trace.of_categories({COPY})[computing]]
    groups: dict[tuple[CollectiveKind, str], list[int]] = {}
    for row, key in zip(rows.tolist(), _keys(context), strict=True):
        groups.setdefault(key, []).append(row)
    found = [
        Exposed(kind, dtype, context.exposed(context.in_steps(those), computing), those)
        for (kind, dtype), members in groups.items()
        for those in [np.array(members, dtype=np.int64)]
    ]
    # Collectives of two kinds at once are exposed once.
    whole = sum(each.ns for each in found)
    share = min(exposed_ns / whole, 1.0) if whole else 0.0
    scaled = [replace(each, ns=each.ns * share) for each in found if each.ns]
    return sorted(scaled, key=lambda each: -each.ns)


def _keys(context: AdviceContext) -> list[tuple[CollectiveKind, str]]:
    """Return the kind and type of each communication kernel.

    Its own arguments decide, then those of the operator that launched it, then its name.
    """
    trace, rows, args = context.trace, context.communication, context.trace.collective_args
    operators = context.operator_of(rows)
    # The last place is for the operator -1, which is none.
    described = np.full(len(trace) + 1, _NONE)
    described[args.row] = np.arange(len(args.row))
    columns = [
        np.append(each, _NONE)[described[events]]
        for events in (rows, operators)
        for each in (args.name, args.dtype)
    ]
    columns += [np.where(operators >= 0, trace.name[operators], _NONE), trace.name[rows]]
    # Thousands of kernels share a few dozen of these.
    distinct, which = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    keys = [_key(trace, *numbers) for numbers in distinct.tolist()]
    return [keys[at] for at in which.ravel().tolist()]


def _key(
    trace: Trace, own: int, own_type: int, asked: int, asked_type: int, operator: int, kernel: int
) -> tuple[CollectiveKind, str]:
    """Return the kind and type by the words of a kernel and of its operator, and by their names."""
    words = trace.collective_args.words
    names = [words[each] for each in (own, asked) if each != _NONE]
    types = [words[each] for each in (own_type, asked_type) if each != _NONE]
    # NCCL makes an all-to-all of sends and receives.
    texts = [trace.names[each] for each in (operator, kernel) if each != _NONE]
    return _first_kind([*names, *texts]), _first_type([*types, texts[-1]])


def _first_kind(texts: Iterable[str]) -> CollectiveKind:
    return next((kind for text in texts for names, kind in _KINDS if names.search(text)), "unknown")


def _first_type(texts: Iterable[str]) -> str:
    return next((dtype for text in texts for names, dtype in _TYPES if names.search(text)), "")
