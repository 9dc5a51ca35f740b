"""Self and total time: by torch's rules, against a reference that compares every pair."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.daemon import traces

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.operator_sums import Operator
from torchperfd_daemon.analysis.operators import operators
from torchperfd_daemon.analysis.steps import Step, steps

SMALL = Path(__file__).parents[2] / "golden" / "trace_small.json"

# One call: name, start, end, thread.
Call = tuple[str, int, int, int]


def trace_of(*calls: Call, category: str = "cpu_op") -> analysis.Trace:
    return traces.trace_of(
        traces.event(name, start, end, cat=category, thread=thread) for name, start, end, thread in calls
    )


def table(trace: analysis.Trace) -> dict[str, tuple[int, int, int]]:
    return {row.name: (row.calls, row.self_cpu_ns, row.total_cpu_ns) for row in operators(trace)}


def reference(calls: list[Call]) -> dict[str, tuple[int, int, int]]:
    """The same table from the definition: a parent contains every call from itself up to its child."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for thread in {call[3] for call in calls}:
        mine = sorted((call for call in calls if call[3] == thread), key=lambda call: (call[1], -call[2]))
        for name, start, end, _ in mine:
            sums[name][0] += 1
            sums[name][1] += end - start
            sums[name][2] += end - start
        for child in range(len(mine)):
            for parent in range(child - 1, -1, -1):
                if all(_contains(mine[parent], mine[between]) for between in range(parent + 1, child + 1)):
                    sums[mine[parent][0]][1] -= mine[child][2] - mine[child][1]
                    break
    return {name: (entry[0], entry[1], entry[2]) for name, entry in sums.items()}


def _contains(outer: Call, inner: Call) -> bool:
    return inner[1] < outer[2] and inner[2] <= outer[2]


@st.composite
def nested_calls(draw: st.DrawFn, start: int = 0, end: int = 200, depth: int = 4) -> list[Call]:
    """Calls that lie wholly inside or wholly outside one another, as one thread makes them."""
    calls: list[Call] = []
    at = start
    while at < end and draw(st.booleans()):
        begin = draw(st.integers(at, end))
        stop = draw(st.integers(begin, end))
        calls.append((f"op{len(calls)}-{depth}-{start}-{end}", begin, stop, 1))
        if depth:
            calls += draw(nested_calls(begin, stop, depth - 1))
        at = stop
    return calls


@st.composite
def overlapping_calls(draw: st.DrawFn) -> list[Call]:
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, 20), st.integers(0, 12), st.integers(1, 2)), min_size=1, max_size=24
        )
    )
    return [
        (f"op{number}", start, start + length, thread) for number, (start, length, thread) in enumerate(spans)
    ]


@given(nested_calls())
def test_nested_calls_match_reference_and_fill_the_busy_time(calls: list[Call]) -> None:
    assume(calls)
    assert table(trace_of(*calls)) == reference(calls)
    busy = {moment for _, start, end, _ in calls for moment in range(start, end)}
    assert sum(self_ns for _, self_ns, _ in table(trace_of(*calls)).values()) == len(busy)


@given(overlapping_calls())
def test_overlapping_calls_match_the_reference(calls: list[Call]) -> None:
    assert table(trace_of(*calls)) == reference(calls)


@pytest.mark.parametrize(
    ("calls", "rows"),
    [
        # A call that outlasts another is no child of it; neither is one of another thread.
        (
            [("a", 0, 10, 1), ("b", 5, 15, 1), ("c", 6, 8, 1)],
            {"a": (1, 10, 10), "b": (1, 8, 10), "c": (1, 2, 2)},
        ),
        ([("a", 0, 10, 1), ("b", 2, 4, 2)], {"a": (1, 10, 10), "b": (1, 2, 2)}),
        # A chain of only children with one name is one call; siblings with their parent's name stay apart.
        (
            [("a", 0, 10, 1), ("a", 1, 9, 1), ("a", 2, 8, 1), ("b", 3, 5, 1)],
            {"a": (1, 8, 10), "b": (1, 2, 2)},
        ),
        ([("a", 0, 10, 1), ("a", 1, 4, 1), ("a", 5, 8, 1)], {"a": (3, 10, 16)}),
        # Steps are one row, and what torch hides is no parent.
        (
            [("ProfilerStep#3", 0, 10, 1), ("aten::is_leaf", 2, 6, 1), ("aten::add", 3, 5, 1)],
            {"ProfilerStep*": (1, 8, 10), "aten::add": (1, 2, 2)},
        ),
    ],
)
def test_calls_have_their_rows(calls: list[Call], rows: dict[str, tuple[int, int, int]]) -> None:
    assert table(trace_of(*calls)) == rows


def test_collectives_completed_elsewhere_have_total_time_only() -> None:
    trace = trace_of(("gloo:all_reduce", 0, 10, 1), ("work", 2, 4, 1), category="user_annotation")
    assert table(trace) == {"gloo:all_reduce": (1, 0, 10), "work": (1, 2, 2)}


def test_python_frames_are_rows_on_request() -> None:
    trace = analysis.load(SMALL)
    without = {row.name for row in operators(trace)}
    with_frames = {row.name for row in operators(trace, python_functions=True)}
    assert with_frames - without == {"train.py(12): main"}


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("self", "long"),
        ("self_cpu_time_total", "long"),
        ("total", "long"),
        ("cpu_time", "long"),
        ("calls", "often"),
        ("count", "often"),
        ("device_time_total", "kernel"),
        ("self_cuda_time_total", "kernel"),
        ("xpu_time", "kernel"),
    ],
)
def test_the_orders_are_those_of_torchs_table(order: str, first: str) -> None:
    trace = traces.trace_of(
        [
            traces.event("kernel", 500, 900, cat="kernel", thread=7),
            traces.event("long", 0, 100),
            traces.event("often", 100, 120),
            traces.event("often", 120, 140),
        ]
    )
    rows = analysis.to_dict(analysis.summarise(trace), None, order)["operators"]
    assert rows[0]["name"] == first


def test_kernels_are_rows_of_their_own_as_in_torch() -> None:
    rows = {row.name: row for row in operators(analysis.load(SMALL)) if row.category == "kernel"}
    assert rows == {
        "void gemm<float, 128, 64>(float const*)": Operator(
            "void gemm<float, 128, 64>(float const*)", "kernel", 4, 0, 0, 486_833, 486_833
        )
    }


def frames(*names: str) -> list[str]:
    """Nest Python frames around the first 1000 ns, outermost first."""
    return [
        traces.event(name, depth, 1000 - depth, cat="python_function") for depth, name in enumerate(names)
    ]


def test_backward_operator_is_called_from_its_forwards_place() -> None:
    trace = traces.trace_of(
        [
            *frames("train.py(3): main", "nn.Module: Net_0", "net.py(9): forward", "nn.Module: Linear_1"),
            traces.event("aten::linear", 100, 200, args={"Sequence number": 5, "Fwd thread id": 0}),
            traces.event("Backward0", 2000, 2500, thread=2, args={"Sequence number": 5, "Fwd thread id": 1}),
            traces.event("aten::mm", 2100, 2200, thread=2, args={"Sequence number": 6, "Fwd thread id": 0}),
            traces.event("aten::elsewhere", 3000, 3001),
        ]
    )
    modules = {row.name: row.module for row in operators(trace, group_by="module")}
    assert modules == {
        "aten::linear": "Linear_1",
        "Backward0": "Linear_1",
        "aten::mm": "Linear_1",
        "aten::elsewhere": "",
    }
    stacks = {row.name: row.stack for row in operators(trace, group_by="stack", frames=2)}
    assert stacks["Backward0"] == stacks["aten::linear"] == ("nn.Module: Linear_1", "net.py(9): forward")


def test_calls_of_one_name_are_split_by_the_tables_grouping() -> None:
    trace = traces.trace_of(
        [
            *frames("train.py(3): main", "nn.Module: Linear_1"),
            traces.event("aten::cat", 10, 20, args={"Input Dims": [[[2, 3], [2, 3]], []]}),
            traces.event("aten::cat", 30, 40, args={"Input Dims": [[[4, 3]], []]}),
            traces.event("aten::cat", 2000, 2007, args={"Input Dims": [[4, 3]]}),
        ]
    )
    by_shape = {(row.shapes, row.calls, row.self_cpu_ns) for row in operators(trace, group_by="shape")}
    assert by_shape == {("[[], []]", 2, 20), ("[[4, 3]]", 1, 7)}
    by_module = {(row.module, row.calls, row.self_cpu_ns) for row in operators(trace, group_by="module")}
    assert by_module == {("Linear_1", 2, 20), ("", 1, 7)}


def test_memory_belongs_to_what_ran_and_the_rest_has_a_row() -> None:
    def memory(at: int, size: int, device: int = 0) -> str:
        args = f'{{"Bytes": {size}, "Device Type": {device}}}'
        return (
            f'{{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 9, '
            f'"ts": {traces.microseconds(traces.ORIGIN_NS + at)}, "args": {args}}}'
        )

    trace = traces.trace_of(
        [
            traces.event("outer", 0, 100),
            traces.event("inner", 20, 40),
            memory(100, 1),
            memory(20, 16),
            memory(30, 256, 1),
            memory(101, -4096),
        ]
    )
    rows = {
        row.name: (
            row.self_cpu_memory,
            row.total_cpu_memory,
            row.self_device_memory,
            row.total_device_memory,
        )
        for row in operators(trace)
    }
    assert rows == {"outer": (1, 17, 0, 256), "inner": (16, 16, 256, 256), "[memory]": (-4096, -4096, 0, 0)}


@pytest.mark.parametrize(
    ("name", "self_ns", "total_ns"),
    [
        ("aten::linear", 0, 225_833),  # two kernels, launched by its child
        ("aten::addmm", 225_833, 225_833),
        ("aten::to", 0, 42_014),  # a copy, launched below a merged repetition of itself
        ("ProfilerStep*", 0, 267_847),
        ("autograd::engine::evaluate_function: AddmmBackward0", 0, 261_000),
        ("cudaLaunchKernel", 0, 0),  # shares its operator's id, and must not count its kernel again
    ],
)
def test_device_time_goes_to_the_launching_operator_and_up(name: str, self_ns: int, total_ns: int) -> None:
    table = operators(analysis.load(SMALL))
    rows = {row.name: row for row in table if not row.category.startswith("gpu_")}
    assert (rows[name].self_device_ns, rows[name].total_device_ns) == (self_ns, total_ns)


def test_the_table_is_sorted_by_self_time_then_name() -> None:
    rows = operators(trace_of(("b", 0, 5, 1), ("c", 10, 15, 1), ("a", 20, 29, 1)))
    assert rows[0] == Operator("a", "cpu_op", 1, 9, 9, 0, 0)
    assert [row.name for row in rows] == ["a", "b", "c"]


def test_steps_come_in_order_once_each_and_from_the_host() -> None:
    trace = trace_of(
        ("ProfilerStep#8", 50, 90, 1),
        ("ProfilerStep#7", 0, 40, 1),
        ("ProfilerStep#7", 5, 40, 2),
        ("ProfilerStep#seven", 0, 1, 1),
        category="user_annotation",
    )
    assert steps(trace) == [Step(7, 0, 40), Step(8, 50, 40)]
    assert steps(trace_of(("ProfilerStep#7", 0, 40, 1), category="gpu_user_annotation")) == []
