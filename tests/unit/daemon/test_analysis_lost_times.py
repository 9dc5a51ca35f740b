"""Events without an end, without a duration or with an impossible time."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon import traces
from tests.unit.daemon.test_analysis_foreign import complete, launch

from torchperfd_cli import main
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.operators import operators


def kernel(name: str, ts: float, dur: float, number: int, **more: Any) -> dict[str, Any]:
    args = {"External id": number, "correlation": number, "device": 0, "stream": 7}
    return complete(name, ts, dur, **{"cat": "kernel", "pid": 0, "tid": 7, "args": args, **more})


def operator(ts: float, number: int, dur: float = 30) -> list[dict[str, Any]]:
    args = {"External id": number}
    return [complete("aten::mm", ts, dur, cat="cpu_op", args=args), launch(ts + 5, number)]


def step(index: int, ts: float, dur: float) -> dict[str, Any]:
    return complete(f"ProfilerStep#{index}", ts, dur, cat="user_annotation")


def summarised(tmp_path: Path, *events: Any) -> analysis.Summary:
    return analysis.summarise(analysis.load(written(tmp_path, list(events))))


def written(tmp_path: Path, events: list[Any]) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize("base", [1_000_000, 4_127_263_482_410])
@pytest.mark.parametrize("lost", [1, 12])
def test_events_at_time_zero_do_not_move_the_window(tmp_path: Path, base: int, lost: int) -> None:
    """Of operators, launches, steps and kernels alike, far more than there are others."""
    sound = [
        each
        for n in range(3)
        for each in (*operator(base + 100 * n, n + 1), kernel("k", base + 100 * n + 40, 50, n + 1))
    ]
    zero = [
        {**each, "ts": 0.0, "dur": 0.0}
        for n in range(10, 10 + lost)
        for each in (*operator(0, n), kernel("k", 0, 0, n), step(n, 0, 0))
    ]
    found = summarised(tmp_path, step(1, base, 400), *sound, *zero)
    device = found.breakdown
    assert (device.n_gpu_events, device.window_ns, device.busy_ns) == (3, 250_000, 150_000)
    assert (found.duration_ns, [each.index for each in found.steps]) == (400_000, [1])
    assert found.quality.reading.skipped_why == {"with time 0, long before all others": 4 * lost}
    assert {row.name: row.calls for row in found.operators}["aten::mm"] == 3


def test_moment_at_the_start_of_a_clock_is_kept(tmp_path: Path) -> None:
    found = summarised(
        tmp_path, complete("aten::mm", 0, 0, cat="cpu_op"), complete("aten::add", 10, 5, cat="cpu_op")
    )
    assert (found.events, found.skipped) == (2, 0)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("event_wait", "mtia_ccp_events"),
        ("EVENT_WAIT", "kernel"),
        ("Notify_Wait", "kernel"),
        ("hipStreamWaitEvent", "kernel"),
        ("<barrier packet>", "kernel"),
        ("zeCommandListAppendWaitOnEvents", "xpu_kernel"),
        ("semaphore wait", "hpu_op"),
    ],
)
def test_wait_on_the_device_is_no_computing(tmp_path: Path, name: str, category: str) -> None:
    """The wait after the last kernel belongs to the window: the device is on record there, and idle."""
    events = [step(1, 0, 1000), *operator(10, 1), kernel("fc", 40, 300, 1)]
    found = summarised(tmp_path, *events, kernel(name, 340, 600, 1, cat=category))
    device = found.breakdown
    assert (device.n_gpu_events, device.window_ns, device.busy_ns) == (1, 900_000, 300_000)
    assert [each.name for each in found.kernels] == ["fc"]
    assert found.idle is not None
    assert sum(cause.ns for cause in found.idle.causes) == device.idle_ns == 600_000


@pytest.mark.parametrize(
    "name",
    ["wait_kernel", "barrier_all_reduce_kernel", "void wait_flag<int>(int*)", "ncclDevKernel_Broadcast"],
)
def test_kernel_that_waits_within_is_still_a_kernel(tmp_path: Path, name: str) -> None:
    found = summarised(tmp_path, *operator(10, 1), kernel(name, 40, 300, 1))
    assert [each.name for each in found.kernels] == [name]


@pytest.mark.parametrize("adds", [1, 2])
def test_legacy_export_has_the_device_time_of_operators(tmp_path: Path, adds: int) -> None:
    """torch until 1.7: a bare list without categories, and kernels by the names of their operators."""

    def row(name: str, ts: float, dur: float, pid: str) -> dict[str, Any]:
        return {"name": name, "ph": "X", "ts": ts, "dur": dur, "tid": 1, "pid": pid, "args": {}}

    events = [row("mm", 100, 134.5, "CPU functions"), row("mm", 150, 200, "CUDA functions")]
    for n in range(adds):
        events.append(row("add", 300 + 50 * n, 40, "CPU functions"))
    events += [row("add", 400, 60, "CUDA functions"), row("relu", 500, 7, "CPU functions")]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    found = analysis.summarise(analysis.load(path))
    assert (found.breakdown.window_ns, found.breakdown.busy_ns) == (310_000, 260_000)
    rows = {each.name: each for each in found.operators if each.category == "cpu_op"}
    assert (rows["mm"].self_cpu_ns, rows["mm"].self_device_ns) == (134_500, 200_000)
    assert (rows["add"].self_cpu_ns, rows["add"].self_device_ns) == (40_000 * adds, 60_000)
    assert rows["relu"].self_device_ns == 0


def shown(capfd: pytest.CaptureFixture[str], path: Path) -> tuple[str, Any]:
    assert main.run_command(["analyze", str(path), "--json", "--with-text"]) == 0
    document = json.loads(capfd.readouterr().out)
    return document["text"], document["ranks"][0]


@pytest.mark.parametrize(
    ("lengths", "median"),
    [((100, 300), "0.200"), ((100, 300, 400, 900), "0.350"), ((100, 300, 500), "0.300")],
)
def test_median_of_an_even_count_is_between_the_middle_two(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], lengths: tuple[int, ...], median: str
) -> None:
    events, start = list[Any](), 0
    for number, length in enumerate(lengths):
        events += [step(number, start, length), complete("aten::mm", start + 1, 9, cat="cpu_op")]
        start += length
    text, _ = shown(capfd, written(tmp_path, events))
    assert f": median {median} ms, longest" in text


def test_stub_after_the_last_step_does_not_count(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The profiler opens a step at each ``step()``, also at the last one of a loop."""
    events: list[Any] = []
    for n, start in enumerate((0, 9000)):
        events += [step(n, start, 8912), *operator(start + 10, n + 1), kernel("k", start + 60, 50, n + 1)]
    events += [step(2, 18_000, 49), complete("cudaDeviceSynchronize", 18_010, 30, cat="cuda_runtime")]
    text, rank = shown(capfd, written(tmp_path, events))
    assert "3 steps, 0 to 2: median 8.912 ms, longest 8.912 ms (step 0); step 2 is only the rest" in text
    assert [each["is_stub"] for each in rank["steps"]] == [False, False, True]
    assert rank["steps_from"]["timed_by"] == "host"


def test_last_step_with_work_is_no_stub(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events = [each for n in range(3) for each in (step(n, 100 * n, 99), *operator(100 * n + 10, n + 1))]
    _, rank = shown(capfd, written(tmp_path, events))
    assert not any(each["is_stub"] for each in rank["steps"])


def test_process_that_did_nothing_is_not_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With ``with_stack=True`` the exporter gives rows of thread starts the process number 0."""
    frames = [
        complete("threading.py(973): _bootstrap", 0, 500, cat="python_function", pid=0, tid=n)
        for n in range(5)
    ]
    many = [each for n in range(40) for each in operator(100 * n, n + 1)]
    text, _ = shown(capfd, written(tmp_path, [*many, *frames]))
    assert "processes" not in text


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
