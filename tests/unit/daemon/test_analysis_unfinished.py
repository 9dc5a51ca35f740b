"""Events that the recording's stop left open: they end where torch's tables end them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon import traces

from torchperfd_daemon.analysis.operators import operators

OPEN = {"finished": False}


def window(until: int) -> str:
    return traces.event("PyTorch Profiler (0)", 0, until, cat="Trace", thread="PyTorch Profiler")


def ends(*events: str) -> dict[str, int]:
    trace = traces.trace_of([traces.event("first", 0, 1, thread="its own"), *events])
    return {trace.names[name]: end for name, end in zip(trace.name, trace.end.tolist(), strict=True)}


@pytest.mark.parametrize("thread", [1, 2])
def test_unfinished_call_at_top_level_ends_with_the_recording(thread: int) -> None:
    known = ends(
        traces.event("before", 0, 200),
        traces.event("beside", 250, 600, thread=3 - thread),
        traces.event("open", 300, 1000, thread=thread, args=OPEN),
        traces.event("within", 400, 500),
        window(900),
    )
    assert known == {"first": 1, "before": 200, "beside": 600, "open": 900, "within": 500}


def test_it_ends_with_the_innermost_call_that_it_was_in() -> None:
    known = ends(
        traces.event("outer", 0, 800),
        traces.event("inner", 100, 300),
        traces.event("open", 200, 1000, args=OPEN),
        traces.event("open too", 250, 1000, args=OPEN),
        traces.event("open later", 400, 1000, args=OPEN),
        window(900),
    )
    assert [known[name] for name in ("open", "open too", "open later")] == [300, 300, 800]


@pytest.mark.parametrize(("until", "end"), [(None, 1000), (150, 200), (5000, 1000)])
def test_unfinished_call_end_is_within_start_and_file_end(until: int | None, end: int) -> None:
    windows = [] if until is None else [window(until)]
    assert ends(traces.event("open", 200, 1000, args=OPEN), *windows)["open"] == end


@pytest.mark.parametrize("said", [True, "false", None, 0])
def test_only_what_the_file_says_was_left_open_is_unfinished(said: object) -> None:
    assert ends(traces.event("closed", 200, 1000, args={"finished": said}), window(900))["closed"] == 1000


def test_a_window_on_a_clock_too_fine_for_a_double_is_exact() -> None:
    def late(text: str) -> str:
        event = json.loads(text)
        return text.replace(f'"ts": {event["ts"]}', '"ts": 1790857026000000.125')

    started = late(traces.event("open", 0, 2000, args=OPEN))
    recording = late(traces.event("PyTorch Profiler (0)", 0, 1234, cat="Trace"))
    trace = traces.trace_of([started, recording])
    assert (trace.start.tolist(), trace.end.tolist()) == ([0], [1234])


def test_it_has_no_self_time_and_takes_none_from_what_it_was_in() -> None:
    trace = traces.trace_of(
        [
            traces.event("outer", 0, 800),
            traces.event("open", 100, 1000, cat="user_annotation", args=OPEN),
            traces.event("inner", 200, 500),
            window(900),
        ]
    )
    table = {row.name: (row.calls, row.self_cpu_ns, row.total_cpu_ns) for row in operators(trace)}
    assert table == {"outer": (1, 500, 800), "open": (1, 0, 700), "inner": (1, 300, 300)}


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60), st.integers(1, 2)), max_size=12),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 2)), min_size=1, max_size=5),
    st.integers(0, 200),
)
def test_it_is_always_one_of_the_ends_of_what_ran_when_it_began(
    closed: list[tuple[int, int, int]], left_open: list[tuple[int, int]], until: int
) -> None:
    events = [
        traces.event(f"closed{at}", start, start + length, thread=thread)
        for at, (start, length, thread) in enumerate(closed)
    ]
    events += [
        traces.event(f"open{at}", start, 500, thread=thread, args=OPEN)
        for at, (start, thread) in enumerate(left_open)
    ]
    known = ends(*events, window(until))
    for at, (start, thread) in enumerate(left_open):
        running = {begin + length for begin, length, on in closed if on == thread and begin <= start}
        allowed = {end for end in running if end > start} | {max(start, until)}
        assert known[f"open{at}"] in allowed
        assert known[f"open{at}"] <= max(start, until)
    for at, (start, length, _) in enumerate(closed):
        assert known[f"closed{at}"] == start + length
