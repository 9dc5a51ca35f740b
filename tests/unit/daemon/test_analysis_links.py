"""Which operator launched what the device ran, and which spans enclose which."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon import traces

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.callers import find_links
from torchperfd_daemon.analysis.intervals import Cover, Spans, outermost


def launch(correlation: int, start: int, end: int, **more: Any) -> str:
    args = {"correlation": correlation, **more.pop("args", {})}
    return traces.event("cudaLaunchKernel", start, end, cat="cuda_runtime", args=args, **more)


def kernel(correlation: int, start: int, end: int, external: int | None = None, cat: str = "kernel") -> str:
    args = {"correlation": correlation} | ({} if external is None else {"External id": external})
    return traces.event("k", start, end, cat=cat, thread=7, args=args)


def operator(name: str, start: int, end: int, external: int = 0, **more: Any) -> str:
    return traces.event(name, start, end, args={"External id": external} if external else {}, **more)


def device_ns(events: Iterable[str]) -> dict[str, int]:
    """Return the device time of every operator, by name."""
    rows = analysis.operators(traces.trace_of(events))
    return {row.name: row.self_device_ns for row in rows if row.category == "cpu_op"}


MM = operator("aten::mm", 0, 50, 3)
LAUNCHED: dict[str, tuple[list[str], dict[str, int]]] = {
    "the external id is the correlation: take the launch": (
        [
            *(operator("aten::heavy", 10, 50, 3), operator("aten::view", 60, 65, 9)),
            *(launch(9, 20, 25, args={"External id": 9}), kernel(9, 100, 300, external=9)),
            operator("aten::light", 70, 90, 4),
            *(launch(12, 75, 80, args={"External id": 12}), kernel(12, 320, 330, external=12)),
        ],
        {"aten::heavy": 200, "aten::view": 0, "aten::light": 10},
    ),
    # The inner one made the launch.
    "the outer operator's id is the correlation by chance": (
        [
            *(operator("aten::outer", 0, 100, 9), operator("aten::inner", 10, 50, 3)),
            *(launch(9, 20, 25), kernel(9, 200, 240, external=9)),
        ],
        {"aten::outer": 0, "aten::inner": 40},
    ),
    "the external id names no operator: take the launch": (
        [MM, launch(9, 20, 25), kernel(9, 100, 300, external=77)],
        {"aten::mm": 200},
    ),
    **{
        f"the named operator ran at another time, on thread {thread}": (
            [
                *(MM, launch(9, 20, 25), kernel(9, 100, 300, external=4)),
                operator("aten::view", 400, 410, 4, thread=thread),
            ],
            {"aten::mm": 200, "aten::view": 0},
        )
        for thread in (1, 2)
    },
    "a launch without an operator belongs to none": (
        [operator("aten::mm", 0, 10, 9), launch(9, 20, 25), kernel(9, 100, 300, external=9)],
        {"aten::mm": 0},
    ),
    # Exporters that do not know the system's thread id put launches on a thread of their own.
    "a launch on a thread without operators: trust the id": (
        [MM, launch(9, 20, 25, thread=99), kernel(9, 100, 300, external=3)],
        {"aten::mm": 200},
    ),
    "a launch that was not recorded: trust the id": (
        [MM, kernel(9, 100, 300, external=3)],
        {"aten::mm": 200},
    ),
    "the launch of a graph gives all its events": (
        [
            operator("CompiledFunction", 0, 90, 13),
            traces.event("## Call CompiledFxGraph abc ##", 10, 80, cat="user_annotation"),
            traces.event("cudaGraphLaunch", 20, 60, cat="cuda_runtime", args={"correlation": 5}),
            *(kernel(5, 100, 110, external=13), kernel(5, 110, 140)),
            *(kernel(5, 140, 141, cat="gpu_memset"), kernel(5, 150, 155, cat="gpu_memcpy")),
        ],
        {"CompiledFunction": 10 + 30 + 1 + 5},
    ),
    "a repeated correlation takes the latest launch": (
        [
            *(operator("aten::a", 0, 50), launch(9, 20, 25), kernel(9, 30, 40)),
            *(operator("aten::b", 100, 150), launch(9, 120, 125), kernel(9, 130, 160)),
        ],
        {"aten::a": 10, "aten::b": 30},
    ),
}


@pytest.mark.parametrize(("events", "expected"), LAUNCHED.values(), ids=LAUNCHED)
def test_links_give_kernels_to_operators(events: list[str], expected: dict[str, int]) -> None:
    assert device_ns(events) == expected


def test_links_compiled_graph_without_operator_is_the_launcher() -> None:
    events = [
        traces.event("train.py(3): step", 0, 99, cat="python_function"),
        traces.event("## Call CompiledFxGraph abc ##", 10, 80, cat="user_annotation"),
        traces.event("cuLaunchKernel", 20, 60, cat="cuda_driver", args={"correlation": 5}),
        kernel(5, 100, 110),
    ]
    rows = analysis.operators(traces.trace_of(events))
    assert {row.name: row.self_device_ns for row in rows if "Compiled" in row.name} == {
        "## Call CompiledFxGraph abc ##": 10
    }


def test_links_operator_left_open_leaves_kernels_to_others() -> None:
    open_one = traces.event("aten::open", 0, 90, args={"finished": False})
    events = [operator("aten::mm", 0, 95), open_one, launch(9, 20, 25), kernel(9, 100, 300)]
    assert device_ns(events)["aten::mm"] == 200


def recording(source: random.Random, external: str) -> list[dict[str, Any]]:
    """Return operators in operators on three threads, their launches, and what these ran on a device.

    Args:
        source: Where chance comes from.
        external: What ``External id`` of launches and kernels holds: ``operator`` or ``correlation``.
    """
    events: list[dict[str, Any]] = []
    identifiers = iter(range(1, 10_000))
    correlations = iter(source.sample(range(1, 300), 250))

    def grow(thread: int, start: int, end: int, depth: int, inside: int) -> None:
        at = start
        while at + 8 < end and len(events) < 600:
            length = source.randrange(4, end - at)
            if depth < 4 and source.random() < 0.6:
                own = next(identifiers)
                args = {"External id": own}
                events.append(event("cpu_op", f"op{own}", thread, at, length, args))
                grow(thread, at + 1, at + length - 1, depth + 1, own)
            else:
                run(thread, at, min(length, 3), inside)
            at += length + source.randrange(1, 4)

    def run(thread: int, at: int, length: int, inside: int) -> None:
        number = next(correlations, None)
        if number is None:
            return
        args = {"correlation": number, "External id": inside if external == "operator" else number}
        category = source.choice(("cuda_runtime", "cuda_driver"))
        events.append(event(category, "launch", thread, at, length, args))
        for _ in range(source.choice((1, 1, 1, 5))):
            kind = source.choice(("kernel", "kernel", "gpu_memcpy", "gpu_memset"))
            events.append(event(kind, "k", 7, at + source.randrange(-2, 500), 5, args))

    for thread in (1, 2, 3):
        grow(thread, 1000, 1000 + source.randrange(200, 900), 0, 0)
    source.shuffle(events)
    return events


def event(cat: str, name: str, thread: int, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    times = {"start": start, "end": start + length}
    return {"cat": cat, "name": name, "thread": thread, "args": args, **times}


def searched(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the innermost operator around the launch of each device event, by place; "" for none."""
    launches = {each["args"]["correlation"]: each for each in events if each["name"] == "launch"}
    found = {}
    for place, each in enumerate(events):
        if each["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        call = launches[each["args"]["correlation"]]
        around = [
            op
            for op in events
            if op["cat"] == "cpu_op" and op["thread"] == call["thread"]
            if op["start"] <= call["start"] and call["end"] <= op["end"]
        ]
        innermost = min(around, key=lambda op: op["end"] - op["start"], default=None)
        found[place] = innermost["name"] if innermost else ""
    return found


@pytest.mark.parametrize("external", ["operator", "correlation"])
@pytest.mark.parametrize("seed", range(12))
def test_links_any_recording_equals_a_plain_search(seed: int, external: str) -> None:
    events = recording(random.Random(seed), external)
    trace = traces.trace_of(
        [
            traces.event(e["name"], e["start"], e["end"], cat=e["cat"], thread=e["thread"], args=e["args"])
            for e in events
        ]
    )
    links = find_links(trace)
    names = [trace.names[name] for name in trace.name.tolist()]
    ours = {
        row: names[operator] if operator >= 0 else ""
        for row, operator in zip(links.event.tolist(), links.operator.tolist(), strict=True)
    }
    expected = searched(events)
    assert len(expected) > 20
    assert ours == expected


TIME = st.integers(0, 30)
SPANS = st.lists(st.tuples(TIME, TIME).map(lambda span: (min(span), max(span))), max_size=14)


def columns(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(SPANS)
def test_the_innermost_span_is_the_open_one_that_began_last(spans: list[tuple[int, int]]) -> None:
    moments = np.arange(-1, 32)
    expected = []
    for moment in moments.tolist():
        opened = [at for at, (start, end) in enumerate(spans) if start <= moment < end]
        expected.append(max(opened, key=lambda at: (spans[at][0], -spans[at][1], at), default=-1))
    assert Spans(*columns(spans)).innermost(moments).tolist() == expected


@given(SPANS)
def test_the_first_span_to_end_after_a_moment(spans: list[tuple[int, int]]) -> None:
    moments = np.arange(-1, 32)
    by_start = sorted(range(len(spans)), key=lambda at: (spans[at][0], -spans[at][1]))
    expected = [next((at for at in by_start if spans[at][1] > moment), -1) for moment in moments.tolist()]
    assert Spans(*columns(spans)).first_ending_after(moments).tolist() == expected


@given(SPANS)
def test_outermost_spans_begin_when_all_earlier_ones_are_over(spans: list[tuple[int, int]]) -> None:
    expected, reached = [], -1
    for at in sorted(range(len(spans)), key=lambda at: (spans[at][0], -spans[at][1])):
        if spans[at][0] >= reached:
            expected.append(at)
        reached = max(reached, spans[at][1])
    assert outermost(*columns(spans)).tolist() == expected


@given(SPANS, TIME, TIME)
def test_a_cover_contains_and_leaves_what_a_set_does(
    spans: list[tuple[int, int]], first: int, last: int
) -> None:
    moments = np.arange(-1, 32)
    covered = {moment for start, end in spans for moment in range(start, end)}
    cover = Cover(*columns(spans))
    assert cover.contains(moments).tolist() == [moment in covered for moment in moments.tolist()]
    begins, ends = cover.gaps(first, last)
    free = [moment for begin, end in zip(begins, ends, strict=True) for moment in range(begin, end)]
    assert free == [moment for moment in range(first, last) if moment not in covered]
