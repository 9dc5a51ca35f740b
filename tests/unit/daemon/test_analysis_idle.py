"""Idle gaps: what real traces look like, cause by cause, and a charge nanosecond by nanosecond."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.values import some
from tests.unit.daemon.traces import event, trace_of

from torchperfd_daemon import analysis

MAIN, WORKER = 1, 2
GEMM = "sm90_xmma_gemm_bf16"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
DRAW = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
FROM_PAGEABLE, TO_PAGEABLE = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


def call(name: str, start: int, end: int, number: int = -1, thread: int = MAIN) -> str:
    """A runtime call; what it launches has its number."""
    return event(name, start, end, cat="cuda_runtime", thread=thread, args={"correlation": number})


def device(name: str, start: int, end: int, number: int = -1, stream: int = 7) -> str:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return event(name, start, end, cat=category, thread=f"stream {stream}", args={"correlation": number})


def idle_of(events: list[str]) -> analysis.Idle:
    """The causes, checked to sum to what the breakdown says, of the whole and of each step."""
    trace = trace_of(events)
    times = analysis.DeviceTime(trace)
    steps = analysis.steps(trace)
    found = some(analysis.idle(trace, times, steps))
    assert sum(cause.ns for cause in found.causes) == times.all().idle_ns
    assert [cause.ns for cause in found.causes] == sorted((cause.ns for cause in found.causes), reverse=True)
    windows = times.within([(step.start_ns, step.start_ns + step.duration_ns) for step in steps])
    assert [sum(step.values()) for step in found.steps] == [window.idle_ns for window in windows]
    return found


# The device is busy until 1,000 and again from 9,000 on: what was in between?
GAPS: dict[str, tuple[list[str], str, str, str]] = {
    "the loader is slow": (
        [
            event(DRAW, 1_100, 6_000, cat="user_annotation"),
            event("aten::to", 7_000, 9_500),
            call("cudaMemcpyAsync", 8_000, 8_900, 2),
            device("Memcpy HtoD (Pinned -> Device)", 9_000, 9_900, 2),
        ],
        "data", DRAW, "train.py(12): main",
    ),
    "the script's own annotation of the loading": (
        [
            event("data", 1_100, 6_000, cat="user_annotation"),
            call("cudaLaunchKernel", 8_000, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "data", "data", "train.py(12): main",
    ),
    ".item(), then host work until the next launch": (
        [
            event("aten::item", 300, 1_500),
            event("aten::_local_scalar_dense", 310, 1_490),
            call("cudaMemcpyAsync", 320, 400, 4),
            call("cudaStreamSynchronize", 410, 1_400, 5),
            event("aten::linear", 8_000, 9_500),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "synchronisation", "aten::item", "train.py(30): log",
    ),
    ".cpu(), whose copy to pageable memory blocks": (
        [
            event("aten::to", 300, 7_000),
            event("aten::copy_", 310, 6_900),
            call("cudaMemcpyAsync", 320, 6_800, 4),
            device(TO_PAGEABLE, 990, 1_000, 4),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "synchronisation", "aten::to", "train.py(30): log",
    ),
    "torch.cuda.synchronize()": (
        [
            call("cudaDeviceSynchronize", 600, 1_100, 4),
            event("aten::linear", 5_000, 9_500),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "synchronisation", "cudaDeviceSynchronize", "train.py(12): main",
    ),
    "a copy from pageable memory, while the host stages it": (
        [
            event("aten::to", 1_000, 9_500),
            event("aten::copy_", 1_010, 9_400),
            call("cudaMemcpyAsync", 1_020, 9_100, 2),
            device(FROM_PAGEABLE, 9_000, 9_900, 2),
        ],
        "pageable_copy", "aten::to", "train.py(12): main",
    ),
    "the host cannot keep up": (
        [
            event("aten::linear", 900, 3_000),
            event("aten::addmm", 5_000, 9_500),
            event("aten::copy_", 5_100, 5_200),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "launch", "aten::addmm", "train.py(12): main",
    ),
    "a collective on the host": (
        [
            event("c10d::barrier", 1_200, 8_000),
            call("cudaStreamSynchronize", 1_300, 7_900),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "collective_wait", "c10d::barrier", "train.py(12): main",
    ),
    "gloo works while the training thread is in no call": (
        [
            event("gloo:all_reduce", 500, 8_400, cat="user_annotation", thread=WORKER),
            event("aten::linear", 8_450, 9_500),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "collective_wait", "gloo:all_reduce", "train.py(12): main",
    ),
    "gloo works, but the training thread does too": (
        [
            event("gloo:all_reduce", 500, 8_400, cat="user_annotation", thread=WORKER),
            event("aten::linear", 900, 9_500),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "launch", "aten::linear", "train.py(12): main",
    ),
    "a communication kernel was queued long ago": (
        [call("cudaLaunchKernelExC", 500, 600, 2), device(NCCL, 9_000, 9_900, 2, stream=20)],
        "collective_wait", NCCL, "",
    ),
    "a communication kernel was launched late": (
        [
            event("c10d::allreduce_", 8_300, 9_000),
            event("aten::linear", 900, 8_200),
            call("cudaLaunchKernelExC", 8_500, 8_900, 2),
            device(NCCL, 9_000, 9_900, 2, stream=20),
        ],
        "launch", "c10d::allreduce_", "train.py(12): main",
    ),
    "a kernel was queued long ago, while the loader works": (
        [
            event(DRAW, 1_100, 8_900, cat="user_annotation"),
            call("cudaLaunchKernel", 500, 600, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "other", GEMM, "",
    ),
    "Python that leaves no events": (
        [
            event("aten::linear", 8_450, 9_500),
            call("cudaLaunchKernel", 8_500, 8_900, 2),
            device(GEMM, 9_000, 9_900, 2),
        ],
        "other", "aten::linear", "train.py(40): save_pictures",
    ),
    "the launch is unknown": (
        [device(GEMM, 9_000, 9_900)],
        "other", GEMM, "train.py(40): save_pictures",
    ),
}  # fmt: skip


def python(name: str, start: int, end: int) -> str:
    return event(name, start, end, cat="python_function")


@pytest.mark.parametrize(("events", "cause", "what", "where"), GAPS.values(), ids=GAPS)
def test_a_gap_is_charged_to_its_cause_and_place(
    events: list[str], cause: str, what: str, where: str
) -> None:
    innermost = {
        "train.py(30): log": (200, 1_600),
        "train.py(40): save_pictures": (2_000, 8_000),
    }
    frames = [
        python("train.py(12): main", 0, 10_000),
        python("torch/_tensor.py(5): wrapped", 10, 9_990),
        python("<built-in method item of Tensor object at 0x7f>", 20, 9_980),
        python("contextlib.py(78): inner", 30, 9_970),
        *(python(where, *innermost[where]) for _ in range(where in innermost)),
    ]
    begin = [call("cudaLaunchKernel", 10, 20, 1), device(GEMM, 100, 1_000, 1)]
    found = idle_of([*begin, *events, *frames])
    assert found.causes[0] == analysis.IdleCause(
        cause,  # type: ignore[arg-type]
        8_000,
        1,
        (analysis.IdlePlace(what, where, 8_000, 1),),
    )
    assert [other.ns for other in found.causes[1:]] == [0] * 7


def test_short_draw_is_not_blamed_for_a_synchronisation() -> None:
    events = [
        call("cudaLaunchKernel", 10, 20, 1),
        device(GEMM, 100, 1_000, 1),
        event("aten::item", 300, 1_200),
        call("cudaStreamSynchronize", 310, 1_100),
        event(DRAW, 1_300, 2_300, cat="user_annotation"),
        call("cudaLaunchKernel", 4_000, 4_100, 2),
        device(GEMM, 5_000, 6_000, 2),
    ]
    assert idle_of(events).causes[0].cause == "synchronisation"
    longer = events.copy()
    longer[4] = event(DRAW, 1_300, 3_300, cat="user_annotation")
    assert idle_of(longer).causes[0].cause == "data"


@pytest.mark.parametrize(("in_calls", "cause"), [(399, "other"), (400, "launch")])
def test_a_host_that_launches_is_in_calls_for_a_tenth_of_the_gap(in_calls: int, cause: str) -> None:
    events = [
        call("cudaLaunchKernel", 10, 20, 1),
        device(GEMM, 100, 1_000, 1),
        event("aten::mm", 5_000 - in_calls, 5_100),
        call("cudaLaunchKernel", 4_900, 5_050, 2),
        device(GEMM, 5_000, 6_000, 2),
    ]
    assert idle_of(events).causes[0].cause == cause


def test_a_step_also_has_what_lies_around_the_device_events() -> None:
    events = [
        event("ProfilerStep#3", 0, 4_000, cat="user_annotation"),
        event("ProfilerStep#4", 4_000, 10_000, cat="user_annotation"),
        event(DRAW, 100, 1_900, cat="user_annotation"),
        event("aten::mm", 1_950, 2_100),
        call("cudaLaunchKernel", 2_000, 2_050, 1),
        device(GEMM, 2_100, 3_000, 1),
        event("aten::mm", 3_100, 4_500),
        call("cudaLaunchKernel", 4_400, 4_450, 2),
        device(GEMM, 5_000, 6_000, 2),
        call("cudaDeviceSynchronize", 5_500, 9_000),
    ]
    found = idle_of(events)
    assert {cause.cause: cause.ns for cause in found.causes if cause.ns} == {"launch": 2_000}
    assert [{name: ns for name, ns in step.items() if ns} for step in found.steps] == [
        {"data": 2_100, "launch": 1_000},
        {"launch": 1_000, "synchronisation": 4_000},
    ]


def test_places_are_those_with_most_time_and_ten_at_most() -> None:
    events, now = [], 0
    for number in range(26):
        events.append(device(GEMM, now, now + 10, number))
        gap = 100 + number
        events.append(event(f"aten::op{number % 13}", now + 10, now + 10 + gap))
        events.append(call("cudaLaunchKernel", now + 90, now + 100, number + 1))
        now += 10 + gap
    events.append(device(GEMM, now, now + 10, 26))
    launch = idle_of(events).causes[0]
    assert (launch.cause, launch.gaps, len(launch.places)) == ("launch", 26, 10)
    expected = sorted(((100 + n + 113 + n, f"aten::op{n}") for n in range(13)), reverse=True)[:10]
    assert [(place.ns, place.what, place.gaps) for place in launch.places] == [
        (*each, 2) for each in expected
    ]


def test_a_trace_without_device_events_has_no_idle_section() -> None:
    trace = trace_of([event("aten::mm", 0, 5)])
    assert analysis.idle(trace, analysis.DeviceTime(trace), []) is None


TIME = st.integers(0, 60)
THREAD = st.sampled_from([MAIN, WORKER])


@st.composite
def busy_traces(draw: Any) -> list[dict[str, Any]]:
    """A device event or more, and anything on two host threads, all within 60 ns."""

    def span(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
        ends = st.tuples(TIME, TIME).map(lambda pair: {"start": min(pair), "end": max(pair) + 1})
        return st.builds(lambda ends, fixed: ends | fixed, ends, st.fixed_dictionaries(fields))

    number = st.integers(1, 6)
    devices = span(
        cat=st.just("kernel"), name=st.sampled_from([GEMM, NCCL]), thread=st.just("s"), number=number
    )
    copies = span(
        cat=st.just("gpu_memcpy"),
        name=st.sampled_from([FROM_PAGEABLE, TO_PAGEABLE, "Memcpy HtoD (Pinned -> Device)"]),
        thread=st.just("s"),
        number=number,
    )
    calls = span(
        cat=st.just("cuda_runtime"),
        name=st.sampled_from(["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaFree"]),
        thread=THREAD,
        number=st.integers(-1, 6),
    )
    operators = span(
        cat=st.just("cpu_op"),
        name=st.sampled_from(["aten::item", "aten::to", "c10d::barrier", "AddmmBackward0"]),
        thread=THREAD,
        number=st.just(-1),
    )
    annotations = span(
        cat=st.just("user_annotation"),
        name=st.sampled_from([DRAW, "gloo:all_reduce", "data", "forward", "ProfilerStep#1"]),
        thread=THREAD,
        number=st.just(-1),
    )
    return [
        *draw(st.lists(devices, min_size=1, max_size=4)),
        *draw(st.lists(copies, max_size=3)),
        *draw(st.lists(calls, max_size=8)),
        *draw(st.lists(operators, max_size=6)),
        *draw(st.lists(annotations, max_size=4)),
    ]


def brute_force(events: list[dict[str, Any]]) -> list[tuple[int, int, str, bool]]:
    """Charge the gaps by looking at each nanosecond; return start, end, cause, and whether it is inside."""
    origin = min(each["start"] for each in events)
    events = [each | {"start": each["start"] - origin, "end": each["end"] - origin} for each in events]
    last = max(each["end"] for each in events)
    on_device = [each for each in events if each["thread"] == "s"]
    runtime = [each for each in events if each["cat"] == "cuda_runtime"]
    busy = {ns for each in on_device for ns in range(each["start"], each["end"])}
    gaps: list[list[int]] = []
    for ns in range(last):
        if ns in busy:
            continue
        # No device event is shorter than 1 ns here, so a gap goes on as long as nanoseconds follow.
        if gaps and gaps[-1][1] == ns:
            gaps[-1][1] = ns + 1
        else:
            gaps.append([ns, ns + 1])
    launching = Counter[int]()
    for each in events:
        # Threads are numbered in order of first sight, and the first of equals counts.
        launching.setdefault(each["thread"], 0)
        launching[each["thread"]] += each in runtime and each["number"] >= 0
    busiest = max(launching, key=lambda thread: launching[thread]) if any(launching.values()) else None

    def launch_of(each: dict[str, Any]) -> dict[str, Any] | None:
        ours = sorted((at for at in runtime if at["number"] == each["number"]), key=lambda at: at["start"])
        begun = [at for at in ours if at["start"] <= each["start"]]
        return begun[-1] if begun else next(iter(ours), None)

    def charge(start: int, end: int) -> str:
        ending = next((each for each in on_device if each["start"] == end), None)
        launch = launch_of(ending) if ending else None
        communicates = ending is not None and ending["name"] == NCCL
        if launch and launch["end"] <= start:
            return "collective_wait" if communicates else "other"
        thread = launch["thread"] if launch else busiest
        mine = [each for each in events if each["thread"] == thread]
        asking, reached = [], -1
        operators = [each for each in mine if each["cat"] == "cpu_op" and "::" in each["name"]]
        for each in sorted(operators, key=lambda each: (each["start"], -each["end"])):
            if each["start"] >= reached:
                asking.append(each)
            reached = max(reached, each["end"])

        def asked_for(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
            found = []
            for each in calls:
                if each["thread"] == thread:
                    around = [at for at in asking if at["start"] <= each["start"] < at["end"]]
                    found.append(around[0] if around else each)
            return found

        copies = [(each["name"], launch_of(each)) for each in on_device if each["cat"] == "gpu_memcpy"]
        staged = [at for name, at in copies if at and name == FROM_PAGEABLE]
        read = [at for name, at in copies if at and name == TO_PAGEABLE]
        waiting = [each for each in runtime if each["name"] in ("cudaStreamSynchronize", "cudaFree")]
        kinds = {
            "data": [each for each in mine if each["name"] in (DRAW, "data")],
            "pageable_copy": asked_for(staged),
            "collective_wait": [each for each in mine if each["name"] == "c10d::barrier"],
            "synchronisation": asked_for(waiting + read),
            "call": [each for each in mine if each["cat"] in ("cpu_op", "cuda_runtime")],
            "span": [each for each in events if each["name"] == "gloo:all_reduce"],
        }
        raw = [each for each in waiting + read if each["thread"] == thread]

        def waited(kinds: dict[str, list[dict[str, Any]]], cause: str, moment: int) -> int:
            """Return how long the host waits in the innermost wait of a kind that is under way."""
            rows = kinds[cause] + (kinds["span"] if cause == "collective_wait" else [])
            under_way = [each for each in rows if each["start"] <= moment < each["end"]]
            one = max(under_way, key=lambda each: (each["start"], -each["end"]))
            spans = raw if cause == "synchronisation" else rows
            during = range(one["start"], one["end"])
            return sum(any(s["start"] <= ns < s["end"] for s in spans) for ns in during)

        did = []
        for ns in range(start, end):
            kind = next(
                (k for k, spans in kinds.items() if any(s["start"] <= ns < s["end"] for s in spans)), ""
            )
            did.append("collective_wait" if kind == "span" else kind)
        order = ("data", "pageable_copy", "collective_wait", "synchronisation")
        for cause in order:
            if 2 * did.count(cause) >= end - start:
                return cause
        if did[0] in order and 20 * waited(kinds, did[0], start) >= end - start:
            return did[0]
        in_calls = sum(any(s["start"] <= ns < s["end"] for s in kinds["call"]) for ns in range(start, end))
        if launch and 10 * in_calls >= end - start:
            return "launch"
        return "collective_wait" if communicates and not launch else "other"

    first, end = min(each["start"] for each in on_device), max(each["end"] for each in on_device)
    return [(a, b, charge(a, b), first <= a and b <= end) for a, b in gaps]


@settings(max_examples=200)
@given(busy_traces())
def test_the_charges_are_those_of_a_sweep_over_nanoseconds(events: list[dict[str, Any]]) -> None:
    expected = brute_force(events)
    text = [
        event(
            each["name"],
            each["start"],
            each["end"],
            cat=each["cat"],
            thread=each["thread"],
            args={"correlation": each["number"]},
        )
        for each in events
    ]
    found, found_steps = idle_of(text), analysis.steps(trace_of(text))
    sums, gaps = Counter[str](), Counter[str]()
    for start, end, cause, inside in expected:
        if inside:
            sums[cause] += end - start
            gaps[cause] += 1
    assert {cause.cause: (cause.ns, cause.gaps) for cause in found.causes if cause.gaps} == {
        cause: (sums[cause], gaps[cause]) for cause in gaps
    }
    for step, charged in zip(found_steps, found.steps, strict=True):
        first, last = step.window
        cut = Counter[str]()
        for start, end, cause, _ in expected:
            cut[cause] += max(0, min(end, last) - max(start, first))
        assert {name: ns for name, ns in charged.items() if ns} == {k: v for k, v in cut.items() if v}


def computing(kind: str, length: int, each: int = 0) -> list[str]:
    """A kernel, then so long in operators that launch nothing, then the launch of the next kernel."""
    each = each or length
    return [
        call("cudaLaunchKernel", 10, 20, 1),
        device(GEMM, 100, 1_000, 1),
        *(event(kind, 2_000 + at, 2_000 + at + each - 1) for at in range(0, length, each)),
        event("aten::mm", 2_000 + length, 2_100 + length),
        call("cudaLaunchKernel", 2_010 + length, 2_020 + length, 2),
        device(GEMM, 2_200 + length, 2_300 + length, 2),
    ]


def test_idle_host_computes_names_the_operator() -> None:
    found = idle_of([event("aten::randn", 1_900, 9_002_000), *computing("aten::normal_", 9_000_000)])
    (place,) = found.causes[0].places
    assert (found.causes[0].cause, place.what) == ("host_compute", "aten::normal_")


def test_idle_host_computes_beside_calls_that_launch_nothing() -> None:
    asked = call("cudaPointerGetAttributes", 5_000, 5_100, 9)
    found = idle_of([*computing("aten::normal_", 9_000_000), asked])
    assert found.causes[0].cause == "host_compute"


def test_idle_host_computes_in_many_small_operators() -> None:
    found = idle_of(computing("aten::sub", 9_000_000, each=10_000))
    assert (found.causes[0].cause, found.causes[0].places[0].what) == ("host_compute", "aten::sub")


def test_idle_host_passes_views_on_its_way_is_launching() -> None:
    found = idle_of(computing("aten::view", 200_000, each=10_000))
    assert found.causes[0].cause == "launch"


def test_idle_wait_far_shorter_than_gap_is_not_its_cause() -> None:
    events = [
        call("cudaLaunchKernel", 10, 20, 1),
        device(GEMM, 100, 1_000, 1),
        call("cudaStreamSynchronize", 900, 1_100),
        call("cudaLaunchKernel", 89_000, 89_100, 2),
        device(GEMM, 90_000, 91_000, 2),
    ]
    assert idle_of(events).causes[0].cause == "other"


def test_idle_gap_after_a_wait_of_its_share_is_the_waits() -> None:
    events = [
        event("ProfilerStep#1", 0, 10_000, cat="user_annotation"),
        call("cudaLaunchKernel", 10, 20, 1),
        device(GEMM, 100, 1_000, 1),
        event("aten::item", 300, 1_500),
        call("cudaStreamSynchronize", 400, 1_200),
        event("aten::linear", 7_000, 9_500),
        call("cudaLaunchKernel", 8_500, 8_900, 2),
        device(GEMM, 9_000, 10_000, 2),
    ]
    found = idle_of(events)
    assert found.steps[0]["synchronisation"] == 8_000
