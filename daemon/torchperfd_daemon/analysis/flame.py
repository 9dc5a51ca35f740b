"""Host calls added up by call path: what a flame graph shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.names import in_use
from torchperfd_daemon.analysis.nesting import Nesting
from torchperfd_daemon.analysis.timeline import Place
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_STEP: Final = "ProfilerStep#"


@dataclass(frozen=True, slots=True, eq=False)
class Flame:
    """Calls by call path, as parallel columns, a parent before its children.

    Attributes:
        names: Table of names; every ``ProfilerStep#N`` is one.
        parent: The position of each node's parent, -1 for a thread: under it are its outermost calls.
        name: An index into ``names``.
        total_ns: Time of its calls, children included.
        calls: How many; 1 for a thread.
        left_out: Nodes left out because they took least time.
    """

    names: tuple[str, ...]
    parent: Int64
    name: Int64
    total_ns: Int64
    calls: Int64
    left_out: int


def flame(trace: Trace, calls: Nesting, depth: Int64, threads: Sequence[Place], nodes: int) -> Flame:
    """Add up the calls of some threads by call path.

    Args:
        calls: Nested calls, of these threads and others.
        depth: How many calls contain each of them.
    """
    texts, renamed = _with_one_step(trace.names)
    texts += [place.label for place in threads]
    root = np.full(len(trace.threads), -1, dtype=np.int64)
    root[[place.number for place in threads]] = np.arange(len(threads))
    of_thread = root[trace.thread[calls.row]]
    name = renamed[trace.name[calls.row]]
    length = (trace.end - trace.start)[calls.row].astype(np.float64)
    order = np.argsort(depth, kind="stable")
    order = order[of_thread[order] >= 0]
    edges = np.flatnonzero(np.diff(depth[order])) + 1
    node = np.empty(len(calls), dtype=np.int64)
    outermost = order[: edges[0]] if len(edges) else order
    columns = [
        (
            np.full(len(threads), -1),
            np.arange(len(trace.names), len(texts)),
            np.bincount(of_thread[outermost], length[outermost], len(threads)),
            np.ones(len(threads), dtype=np.int64),
        )
    ]
    known = len(threads)
    for level, at in enumerate(np.split(order, edges)):
        parents = node[calls.parent[at]] if level else of_thread[at]
        keys, group = np.unique(parents * len(texts) + name[at], return_inverse=True)
        node[at] = known + group
        known += len(keys)
        # Sums of ns are exact in doubles up to a hundred days.
        columns.append((*np.divmod(keys, len(texts)), np.bincount(group, length[at]), np.bincount(group)))
    parent, names, total, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    kept = _largest(parent, total, len(threads), nodes)
    place = np.cumsum(kept) - 1
    parent = parent[kept]
    table, names = in_use(texts, names[kept])
    return Flame(
        names=table,
        parent=np.where(parent >= 0, place[parent], -1),
        name=names,
        total_ns=total[kept].astype(np.int64),
        calls=count[kept],
        left_out=len(kept) - int(kept.sum()),
    )


def _with_one_step(names: Sequence[str]) -> tuple[list[str], Int64]:
    """Return the names with one for all steps, and what each counts as."""
    texts, renamed = list(names), np.arange(len(names))
    steps = [number for number, text in enumerate(names) if text.startswith(_STEP)]
    for number in steps[:1]:
        texts[number] = f"{_STEP[:-1]}*"
        renamed[steps] = number
    return texts, renamed


def _largest(parent: Int64, total: Int64, threads: int, nodes: int) -> Flags:
    """Return which nodes to keep: the threads, and those with most time whose parents stay."""
    kept = np.zeros(len(parent), dtype=np.bool_)
    kept[:threads] = True
    rest = np.argsort(-total[threads:], kind="stable")[:nodes] + threads
    for node in np.sort(rest).tolist():
        kept[node] = kept[parent[node]]
    return kept
