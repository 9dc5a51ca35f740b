"""One pass over the graph of `replay`: when each device run ends and each node of the host, in order.

This is the longest loop of the analysis, so the C module does it if there is one. Python does the same.
"""

from dataclasses import dataclass

import numpy as np

from torchperfd_daemon.analysis.native_batches import NATIVE
from torchperfd_daemon.analysis.trace import Float64, Int64


@dataclass(frozen=True, slots=True)
class Graph:
    """Runs of device events and nodes of the host, and what each depends on.

    Attributes:
        order: The runs, numbered from 0, and the nodes, downward from -1, each after what it depends on.
        stream: The stream of each run.
        segment: How many nodes are before the launch of each run.
        cause: The run of another stream that held each run up, -1 for none.
        target: The run that ends the wait of each node, -1 for none.
    """

    order: Int64
    stream: Int64
    segment: Int64
    cause: Int64
    target: Int64


@dataclass(frozen=True, slots=True)
class Durations:
    """How long all takes in one replay, in ns.

    Attributes:
        through: From the end of the run before on its stream to the end of each run.
        by_launch: From the host's time without work to the end of each run.
        by_cause: From the end of the run that held each run up to its end.
        call: The own time of each node.
        lag: From the end of its target to the end of each node.
        fixed: When each node ends at the earliest in a first pass; -inf for any time.
        work_start: The host's work up to the start of each node.
        work_end: The same up to its end.
    """

    through: Float64
    by_launch: Float64
    by_cause: Float64
    call: Float64
    lag: Float64
    fixed: Float64
    work_start: Float64
    work_end: Float64


def sweep(
    graph: Graph, durations: Durations, streams: Float64, offset: float, *, is_first: bool
) -> tuple[Float64, Float64]:
    """Return when the nodes of the host and the runs of the device end, in ns.

    Args:
        streams: When each stream is free; changed to when it is after the pass.
        offset: When the host begins.
        is_first: Nodes whose end is fixed have it.
    """
    nodes, ends = np.zeros(len(durations.call)), np.full(len(durations.through), -np.inf)
    if NATIVE is None:
        _pass(graph, durations, streams, offset, nodes, ends, is_first=is_first)
    else:
        columns = (
            *(graph.order, graph.stream, graph.segment, graph.cause, graph.target),
            *(durations.through, durations.by_launch, durations.by_cause),
            *(durations.call, durations.lag, durations.fixed, durations.work_start, durations.work_end),
            *(streams, nodes, ends),
        )
        NATIVE.sweep(columns, offset, is_first)
    return nodes, ends


def _pass(
    graph: Graph,
    durations: Durations,
    streams: Float64,
    offset: float,
    nodes: Float64,
    ends: Float64,
    *,
    is_first: bool,
) -> None:
    stream_of, segment_of, cause_of, target_of = (
        each.tolist() for each in (graph.stream, graph.segment, graph.cause, graph.target)
    )
    through, by_launch, by_cause = (
        each.tolist() for each in (durations.through, durations.by_launch, durations.by_cause)
    )
    call, lag, fixed = (each.tolist() for each in (durations.call, durations.lag, durations.fixed))
    work_start, work_end = durations.work_start.tolist(), durations.work_end.tolist()
    free, found, ended = streams.tolist(), nodes.tolist(), ends.tolist()
    offsets = [offset] * (len(found) + 1)
    for number in graph.order.tolist():
        # Comparing takes half as long as max().
        if number >= 0:
            stream = stream_of[number]
            end = free[stream] + through[number]
            if (launched := offsets[segment_of[number]] + by_launch[number]) > end:
                end = launched
            if (cause := cause_of[number]) >= 0 and (held := ended[cause] + by_cause[number]) > end:
                end = held
            free[stream] = ended[number] = end
        else:
            node = -1 - number
            now = offset + work_start[node] + call[node]
            if (target := target_of[node]) >= 0:
                if (waited := ended[target] + lag[node]) > now:
                    now = waited
            elif is_first and fixed[node] > now:
                now = fixed[node]
            found[node] = now
            offset = now - work_end[node]
            offsets[node + 1] = offset
    streams[:], nodes[:], ends[:] = free, found, ended
