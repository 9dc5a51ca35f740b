"""Phases of a step: of a real training, and of made-up traces nanosecond by nanosecond."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.daemon.traces import event, trace_of

from torchperfd_daemon import analysis

PHASES = (
    "data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "collective_wait", "validate",
    "checkpoint", "other",
)  # fmt: skip
NODE = "autograd::engine::evaluate_function: "


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with_stack"])
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> analysis.Trace:
    """Three steps of a training on the CPU."""
    torch: Any = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=8))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        with_stack=request.param,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
    ) as profiler:
        for _ in range(4):
            inputs, labels = next(batches)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            profiler.step()
    file: Path = tmp_path_factory.mktemp("phases") / "rank0.json"
    profiler.export_chrome_trace(str(file))
    return analysis.load(file)


def test_a_training_has_the_phases_that_torch_shows(training: analysis.Trace) -> None:
    steps = analysis.steps(training)
    found = analysis.phases(training, steps)
    assert [sum(step.values()) for step in found] == [step.duration_ns for step in steps]
    names = [
        name for name in PHASES if name in ("data", "forward", "backward", "optimizer", "zero_grad", "other")
    ]
    assert [list(step) for step in found] == [names] * 3


def test_the_derived_phases_lie_where_the_operators_are(training: analysis.Trace) -> None:
    step = analysis.steps(training)[1]
    found = analysis.phases(training, [step])[0]
    names = [training.names[name] for name in training.name]

    def reach(*wanted: str) -> int:
        """From the first to the last operator of these names within the step."""
        rows = [
            row
            for row, name in enumerate(names)
            if name in wanted and step.start_ns <= training.start[row] < step.start_ns + step.duration_ns
        ]
        return int(training.end[rows].max() - training.start[rows].min())

    assert found["forward"] == reach("aten::linear", "aten::cross_entropy_loss")
    with_stack = any(name.startswith("torch/autograd/__init__.py") for name in names)
    nodes = reach(*(name for name in set(names) if name.startswith(NODE)))
    assert found["backward"] > nodes if with_stack else found["backward"] == nodes


def test_steps_without_anything_are_other() -> None:
    trace = trace_of([event("ProfilerStep#1", 0, 70, cat="user_annotation")])
    assert analysis.phases(trace, analysis.steps(trace)) == [{"other": 70}]
    assert analysis.phases(trace, []) == []


def test_optimizer_in_backward_and_backward_in_optimizer() -> None:
    events = [
        event("ProfilerStep#1", 0, 100, cat="user_annotation"),
        event(f"{NODE}MulBackward0", 10, 40),
        event("Optimizer.step#SGD.step", 20, 30, cat="user_annotation"),
        event("Optimizer.step#LBFGS.step", 50, 90, cat="user_annotation"),
        event(f"{NODE}MulBackward0", 60, 75),
    ]
    trace = trace_of(events)
    assert analysis.phases(trace, analysis.steps(trace)) == [{"backward": 35, "optimizer": 35, "other": 30}]


def test_a_backward_ends_where_the_training_thread_goes_on() -> None:
    events = [
        event("ProfilerStep#1", 0, 100, cat="user_annotation"),
        *(event(f"{NODE}MulBackward0", start, start + 5, thread=2) for start in (10, 20, 40, 60)),
        event("aten::mul", 40, 42),
    ]
    trace = trace_of(events)
    # From 10 to 25 and from 40 to 65: the operator begins in the very nanosecond of the third node.
    assert analysis.phases(trace, analysis.steps(trace)) == [{"backward": 40, "other": 60}]


def test_a_step_on_the_devices_timeline_is_not_the_hosts() -> None:
    events = [
        event("ProfilerStep#1", 0, 100, cat="user_annotation"),
        event("ProfilerStep#1", 50, 150, cat="gpu_user_annotation", thread=7),
        event("ProfilerStep#2", 100, 160, cat="user_annotation"),
        event("ProfilerStep#2", 150, 190, cat="gpu_user_annotation", thread=7),
        event("checkpoint", 120, 150, cat="user_annotation"),
        event("torch/serialization.py(940): save", 10, 30, cat="python_function"),
        event("forward", 20, 40, cat="gpu_user_annotation", thread=7),
        event("data", 20, 40, cat="user_annotation", thread=8),
    ]
    trace = trace_of(events)
    assert analysis.phases(trace, analysis.steps(trace)) == [
        {"checkpoint": 20, "other": 80},
        {"checkpoint": 30, "other": 30},
    ]


def test_annotated_loss_is_no_forward_and_the_rest_is_derived() -> None:
    """What follows an annotation is derived from operators again."""
    events = [
        event("ProfilerStep#1", 0, 100, cat="user_annotation"),
        event("forward", 0, 20, cat="user_annotation"),
        event("aten::linear", 5, 15, args={"Sequence number": 1}),
        event("loss", 20, 40, cat="user_annotation"),
        event("aten::mse_loss", 22, 30, args={"Sequence number": 2}),
        event("aten::mul", 45, 55, args={"Sequence number": 3}),
        *(
            event(
                f"{NODE}{number}",
                50 + 10 * number,
                60 + 10 * number,
                args={"Sequence number": number, "Fwd thread id": 1},
            )
            for number in (1, 2, 3)
        ),
    ]
    trace = trace_of(events)
    (found,) = analysis.phases(trace, analysis.steps(trace))
    assert found == {"forward": 30, "loss": 20, "backward": 30, "other": 20}


TIME = st.integers(0, 50)


@st.composite
def trainings(draw: Any) -> list[dict[str, Any]]:
    """Phases, operators and nodes, anywhere within 50 ns."""
    first, second = sorted(draw(st.tuples(TIME, TIME)))
    events = [
        {"start": 0, "end": first, "cat": "user_annotation", "name": "ProfilerStep#1", "thread": 1},
        {"start": first, "end": second, "cat": "user_annotation", "name": "ProfilerStep#2", "thread": 1},
    ]
    kinds = {
        "user_annotation": (
            "forward",
            "loss",
            "backward",
            "validate",
            "mine",
            "enumerate(DataLoader)#x",
            "Optimizer.step#SGD.step",
        ),
        "cpu_op": ("aten::mm", "aten::add", f"{NODE}MmBackward0", f"{NODE}AddBackward0"),
    }
    for category, names in kinds.items():
        for _ in range(draw(st.integers(0, 6))):
            start, end = sorted(draw(st.tuples(TIME, TIME)))
            name = draw(st.sampled_from(names))
            args = {"Sequence number": draw(st.integers(0, 3))} if category == "cpu_op" else {}
            args |= {"Fwd thread id": 1} if name.startswith(NODE) else {}
            thread = draw(st.sampled_from([1, 1, 2]))
            events.append(
                {"start": start, "end": end, "cat": category, "name": name, "thread": thread, "args": args}
            )
    return events


def joined(spans: list[dict[str, Any]], breaks: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for each in sorted(spans, key=lambda each: each["start"]):
        if found and (
            each["start"] < found[-1][1] or not any(found[-1][1] <= at <= each["start"] for at in breaks)
        ):
            found[-1] = (found[-1][0], max(found[-1][1], each["end"]))
        else:
            found.append((each["start"], each["end"]))
    return found


def brute_force(events: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """All phases' spans, in the order in which the later of two that begin at once has the time."""
    named = {"enumerate(DataLoader)#x": "data", "Optimizer.step#SGD.step": "optimizer"}
    mine = [each for each in events if each["thread"] == 1]
    spans = [
        (each["start"], each["end"], named.get(each["name"], each["name"]))
        for each in mine
        if each["name"] in (*named, "forward", "loss", "backward", "validate")
    ]
    reported = [
        (each["start"], each["end"]) for each in mine if each["name"] in ("forward", "loss", "backward")
    ]
    nodes = [each for each in events if each["name"].startswith(NODE)]
    outer, reached = [], -1
    operators = [each for each in mine if each["cat"] == "cpu_op"]
    for each in sorted(operators, key=lambda each: (each["start"], -each["end"])):
        if each["start"] >= reached:
            outer.append(each)
        reached = max(reached, each["end"])
    own = [each for each in outer if each not in nodes]
    edges = (
        [span[0] for span in spans] + [each["start"] for each in events[:2]] + [end for _, end in reported]
    )
    backward = joined(nodes, edges + [each["start"] for each in own])
    makers = []
    for number in {each["args"]["Sequence number"] for each in nodes}:
        shown = [
            each for each in operators if each not in nodes and each["args"]["Sequence number"] == number
        ]
        if shown:
            last = max(shown, key=lambda each: each["start"])["start"]
            makers += [each for each in own if each["start"] <= last < each["end"]]
    forward = joined(makers, edges + [start for start, _ in backward])
    derived = [(*span, "backward") for span in backward] + [(*span, "forward") for span in forward]
    spans += [span for span in derived if not any(start <= span[0] < end for start, end in reported)]
    order = sorted(range(len(spans)), key=lambda at: (spans[at][0], -spans[at][1], at))
    return [spans[at] for at in order]


@settings(max_examples=200)
@given(trainings())
def test_the_phases_are_those_of_a_sweep_over_nanoseconds(events: list[dict[str, Any]]) -> None:
    spans = brute_force(events)
    trace = trace_of(
        event(
            each["name"],
            each["start"],
            each["end"],
            cat=each["cat"],
            thread=each["thread"],
            args=each.get("args"),
        )
        for each in events
    )
    steps = analysis.steps(trace)
    for step, found in zip(steps, analysis.phases(trace, steps), strict=True):
        expected = Counter[str]({"other": 0})
        for ns in range(step.start_ns, step.start_ns + step.duration_ns):
            expected[next((name for start, end, name in reversed(spans) if start <= ns < end), "other")] += 1
        assert found == expected
        assert list(found) == [name for name in PHASES if name in found]
