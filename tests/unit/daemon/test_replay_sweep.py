"""A pass over the graph of a replay: in C and in Python the same, to the last bit."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.analysis.advice import sweep as module
from torchperfd_daemon.analysis.advice.sweep import Durations, Graph, sweep
from torchperfd_daemon.analysis.native_batches import NATIVE
from torchperfd_daemon.analysis.trace import Float64, Int64

needs_native = pytest.mark.skipif(NATIVE is None, reason="the C module is not compiled")

STREAMS = 3


def indexes(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def times(*values: float) -> Float64:
    return np.array(values, dtype=np.float64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Durations, Float64, float]:
    """Return a graph in which everything depends on what is before it in the order, and its times."""
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=24))
    order: list[int] = []
    columns: dict[str, list[int]] = {name: [] for name in ("stream", "segment", "cause", "target")}
    runs = nodes = 0
    for is_run in kinds:
        if is_run:
            order.append(runs)
            columns["stream"].append(draw(st.integers(0, STREAMS - 1)))
            columns["segment"].append(draw(st.integers(0, nodes)))
            columns["cause"].append(draw(st.integers(-1, runs - 1)))
            runs += 1
        else:
            order.append(-1 - nodes)
            columns["target"].append(draw(st.integers(-1, runs - 1)))
            nodes += 1
    value = st.floats(-1e6, 1e12) | st.just(-math.inf)

    def values(count: int) -> Float64:
        return times(*draw(st.lists(value, min_size=count, max_size=count)))

    graph = Graph(indexes(*order), **{name: indexes(*column) for name, column in columns.items()})
    durations = Durations(*(values(runs) for _ in range(3)), *(values(nodes) for _ in range(5)))
    return graph, durations, values(STREAMS), draw(st.floats(0, 1e15))


@needs_native
@given(cases(), st.booleans())
def test_sweep_in_c_equals_python(case: tuple[Graph, Durations, Float64, float], is_first: bool) -> None:
    graph, durations, streams, offset = case
    answers = []
    for native in (NATIVE, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "NATIVE", native)
            free = streams.copy()
            with np.errstate(invalid="ignore"):
                found = sweep(graph, durations, free, offset, is_first=is_first)
        answers.append([np.where(np.isnan(each), 0.5, each).tobytes() for each in (*found, free)])
    assert answers[0] == answers[1]


def small() -> tuple[Graph, Durations, Float64]:
    """Return a run that a wait is for, and a run that is launched after the wait."""
    graph = Graph(indexes(0, -1, 1), indexes(0, 1), indexes(0, 1), indexes(-1, 0), indexes(0))
    durations = Durations(
        times(7, 3), times(10, 5), times(0, 40), times(2), times(1), times(-math.inf), times(1), times(4)
    )
    return graph, durations, times(0, 0)


@pytest.mark.parametrize("native", [pytest.param(NATIVE, marks=needs_native), None], ids=["c", "python"])
def test_sweep_small_graph_follows_dependencies(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NATIVE", native)
    graph, durations, streams = small()
    nodes, ends = sweep(graph, durations, streams, 100.0, is_first=True)
    # The launch at 100 ends at 110; the wait ends 1 later; the second run is held up by the first.
    assert (nodes.tolist(), ends.tolist(), streams.tolist()) == ([111.0], [110.0, 150.0], [110.0, 150.0])


@needs_native
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("order", indexes(0, -1, 2)),
        ("order", indexes(0, -2, 1)),
        ("order", indexes(0, -1)),
        ("stream", indexes(0, 2)),
        ("stream", indexes(0, -1)),
        ("segment", indexes(0, 2)),
        ("cause", indexes(-1, 2)),
        ("target", indexes(2)),
        ("target", indexes()),
    ],
)
def test_sweep_of_wrong_positions_is_refused(column: str, values: Int64) -> None:
    graph, durations, streams = small()
    wrong: Any = dataclasses.replace(graph, **{column: values})
    with pytest.raises(ValueError, match=r"outside|different"):
        sweep(wrong, durations, streams, 0.0, is_first=False)


@needs_native
def test_sweep_with_read_only_streams_is_refused() -> None:
    graph, durations, streams = small()
    streams.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        sweep(graph, durations, streams, 0.0, is_first=False)
