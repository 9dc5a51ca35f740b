"""The phases in a capture's trace: those that the recorder times, nested rightly, and none otherwise."""

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.client.training import loader
from torch import nn
from torch.autograd import profiler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

import torchperfd
from torchperfd.captures import driver
from torchperfd.captures.manager import Capture
from torchperfd.errors import CaptureError
from torchperfd.hooks.profiler import ARBITER
from torchperfd.steps.phases import TRAIN, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.v1.contract import PHASES
from torchperfd_daemon import analysis

pytestmark = pytest.mark.slow

MAX_STEPS = 3000
MARKED = ("data", "forward", "loss", "backward", "optimizer")
MARK = "code of "

Event = dict[str, Any]


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    """Leave torch's profiler as it was."""
    yield
    ARBITER.leave()


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> list[StepBatch]:
    """All steps that the flusher takes from recorders, before the client attaches."""
    taken: list[StepBatch] = []
    honest = Recorder.drain

    def drain(recorder: Recorder) -> list[StepBatch]:
        stretches = honest(recorder)
        taken.extend(stretches)
        return stretches

    monkeypatch.setattr(Recorder, "drain", drain)
    return taken


class Marked(Dataset[Any]):
    """Samples whose making shows in a trace."""

    def __len__(self) -> int:
        return MAX_STEPS

    def __getitem__(self, index: int) -> Any:
        mark("data")
        return torch.randn(4), torch.randn(2)


class MarkedModel(nn.Module):
    """One layer whose forward and backward show in a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        mark("forward")
        outputs = self.layer(inputs)
        outputs.register_hook(lambda _: mark("backward"))
        return outputs


def mark(phase: str) -> None:
    """Leave an annotation that belongs into a phase."""
    with torch.profiler.record_function(f"{MARK}{phase}"):
        pass


class Doubled(nn.Module):
    """A module of one's own: dynamo does not compile torch's in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs) * 2


def capture_in(step: Callable[[], Any], client: torchperfd.Client, **options: Any) -> tuple[Capture, Path]:
    """Have some steps captured while ``step`` is called over and over."""
    for _ in range(3):
        step()
    capture = client.capture(**options)
    for _ in range(MAX_STEPS):
        if capture.state in ("exporting", "complete", "failed"):
            break
        step()
    return capture, capture.wait()


def annotated(path: Path) -> list[Event]:
    """Return the annotations in a trace, by start, the outer before the inner."""
    events = json.loads(path.read_bytes())["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def ours(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return our annotations with those of ours around them; all must lie within one another.

    Raises:
        AssertionError: Two of them cross, or a phase is in no step.
    """
    open_now: list[Event] = []
    found = []
    names = (*PHASES, "mine", "inner")
    for event in annotated(path):
        if event["name"] not in names and not event["name"].startswith("ProfilerStep#"):
            continue
        open_now = [each for each in open_now if each["ts"] + each["dur"] > event["ts"]]
        ends = event["ts"] + event["dur"]
        assert all(ends <= each["ts"] + each["dur"] for each in open_now), f"{event} crosses {open_now}"
        found.append((event["name"], tuple(each["name"] for each in open_now)))
        open_now.append(event)
    assert all(name.startswith("ProfilerStep#") != bool(around) for name, around in found)
    return found


def marks_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the phase that each mark belongs into, and the innermost annotation of ours around it."""
    around: list[Event] = []
    for event in annotated(path):
        around = [each for each in around if each["ts"] + each["dur"] >= event["ts"] + event["dur"]]
        if event["name"].startswith(MARK):
            yield event["name"].removeprefix(MARK), around[-1]["name"]
        elif event["name"] in PHASES:
            around.append(event)


def forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def test_capture_phases_are_the_recorders_and_hold_their_code(
    drained: list[StepBatch], client: torchperfd.Client
) -> None:
    model = MarkedModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = register_optimizer_step_pre_hook(lambda *_: mark("optimizer"))
    batches = iter(DataLoader(Marked()))

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        mark("loss")
        nn.functional.mse_loss(outputs, targets).backward()  # type: ignore[no-untyped-call]
        with client.phase("mine"):
            pass
        optimizer.step()

    capture, path = capture_in(step, client, steps=8)
    handle.remove()
    client.report()
    first, after = capture.step_range
    recorded = {
        stretch.index[number]: {
            phase
            for slot, phase in enumerate(PHASES)
            if phase != "other" and slot in stretch.phases and stretch.phases[slot].ns[number] > 0
        }
        for stretch in drained
        for number in range(stretch.count)
        if stretch.kind[number] == TRAIN
    }
    trace = analysis.load(path)
    steps = analysis.steps(trace)
    assert [step.index for step in steps] == list(range(first, after))
    for step_of_trace, phases in zip(steps, analysis.phases(trace, steps), strict=True):
        assert phases.keys() & set(PHASES) - {"other"} == recorded[step_of_trace.index]
    marks = Counter(marks_in(path))
    assert marks == dict.fromkeys([(phase, phase) for phase in MARKED], after - first)


def plain(client: torchperfd.Client) -> Callable[[], None]:
    model, batches = nn.Linear(4, 2), forever(loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        with client.phase("mine"), client.phase("inner"):
            torch.ones(1).neg()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def with_a_closure(client: torchperfd.Client) -> Callable[[], None]:
    model, batches = nn.Linear(4, 2), forever(loader())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step() -> None:
        inputs, targets = next(batches)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]

    return step


def without_a_loader(client: torchperfd.Client) -> Callable[[], None]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return step


def with_a_failing_forward(client: torchperfd.Client) -> Callable[[], None]:
    class Failing(nn.Module):
        def forward(self, inputs: Any) -> Any:
            raise ValueError("out of luck")

    step, failing = plain(client), Failing()

    def fails_first() -> None:
        with pytest.raises(ValueError, match="luck"):
            failing(torch.ones(1))
        step()

    return fails_first


def in_a_phase_across_steps(client: torchperfd.Client) -> Callable[[], None]:
    step = plain(client)
    phase = client.phase("mine")
    phase.__enter__()
    return step


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (
            plain,
            {
                ("data",), ("zero_grad",), ("mine",), ("mine", "inner"), ("forward",), ("loss",),
                ("backward",), ("optimizer",),
            },
        ),
        (with_a_closure, {("data",), ("optimizer",), ("optimizer", "forward"), ("optimizer", "backward")}),
        (without_a_loader, {("zero_grad",), ("forward",), ("loss",), ("backward",), ("optimizer",)}),
        (with_a_failing_forward, {("data",), ("forward",), ("backward",), ("optimizer",)}),
        (in_a_phase_across_steps, {("mine",), ("mine", "data"), ("mine", "mine", "inner")}),
    ],
)  # fmt: skip
def test_phases_lie_within_their_step_and_one_another(
    client: torchperfd.Client,
    make: Callable[[torchperfd.Client], Callable[[], None]],
    wanted: set[tuple[str, ...]],
) -> None:
    _, path = capture_in(make(client), client, steps=4)
    paths: dict[str, set[tuple[str, ...]]] = {}
    for name, around in ours(path):
        if around:
            paths.setdefault(around[0], set()).add((*around[1:], name))
    assert len(paths) == 4
    # The last edge may lie within a phase, of which the trace then has a part.
    for found in list(paths.values())[1:-1]:
        assert wanted <= found


def test_a_capture_that_is_cancelled_leaves_nothing_open(client: torchperfd.Client, tmp_path: Path) -> None:
    step = plain(client)
    step()
    capture = client.capture(steps=1000)
    for _ in range(MAX_STEPS):
        if capture.state != "armed" and capture.state != "preparing" and capture.state != "ready":
            break
        step()
    assert capture.state == "running"
    step()
    capture.cancel()
    for _ in range(3):
        step()
    assert client.parts.instruments.replay.after_read is None
    assert not client.parts.instruments.replay.live
    record: Any = profiler.profile
    with record(use_kineto=True) as theirs:
        step()
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    assert ours(tmp_path / "theirs.json") == []


def test_a_profiler_of_the_scripts_sees_none_of_our_phases(client: torchperfd.Client, tmp_path: Path) -> None:
    step = plain(client)
    step()
    capture = client.capture(steps=1000)
    for _ in range(MAX_STEPS):
        if capture.state == "running":
            break
        step()
    record: Any = profiler.profile
    with record(use_kineto=True) as theirs:
        for _ in range(3):
            step()
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    assert ours(tmp_path / "theirs.json") == []


def test_capture_ended_by_users_profiler_is_not_ended_again(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would write that into memory that the profiler had which is gone: now and then it crashed."""
    opened: list[weakref.ref[Any]] = []
    ended: list[str] = []
    honest = driver.open_annotation

    class Noted:
        def __init__(self, name: str) -> None:
            self._name, self._annotation = name, honest(name)
            opened.append(weakref.ref(self))

        def __exit__(self, *arguments: Any) -> None:
            ended.append(self._name)
            self._annotation.__exit__(*arguments)

    monkeypatch.setattr(driver, "open_annotation", Noted)
    step = plain(client)
    step()
    capture = client.capture(steps=1000)
    for _ in range(MAX_STEPS):
        if capture.state == "running":
            break
        step()
    ended_before, left_open = len(ended), len(opened) - len(ended)
    assert left_open
    record: Any = profiler.profile
    with record(use_kineto=True):
        for _ in range(3):
            step()
        with pytest.raises(CaptureError, match="the script started its own profiler"):
            capture.wait()
        gc.collect()
    assert len(ended) == ended_before
    # As garbage they would be ended, too.
    assert sum(reference() is not None for reference in opened) == left_open


def test_nothing_is_annotated_while_nothing_is_captured(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    honest = driver.open_annotation

    def noted(name: str) -> Any:
        opened.append(name)
        return honest(name)

    monkeypatch.setattr(driver, "open_annotation", noted)
    step = plain(client)
    for _ in range(5):
        step()
    assert opened == []
    capture_in(step, client, steps=1)
    captured = Counter(opened)
    for _ in range(5):
        step()
    assert Counter(opened) == captured
    assert captured["forward"] == 1


def test_an_annotation_that_fails_costs_the_annotations_only(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = driver.open_annotation

    def broken(name: str) -> Any:
        if name == "forward":
            raise RuntimeError("no such luck")
        return honest(name)

    monkeypatch.setattr(driver, "open_annotation", broken)
    _, path = capture_in(plain(client), client, steps=2)
    names = Counter(name for name, _ in ours(path))
    assert "forward" not in names
    assert sum(count for name, count in names.items() if name.startswith("ProfilerStep#")) == 2


def test_a_compiled_model_is_captured_without_a_graph_break(client: torchperfd.Client) -> None:
    from torch import _dynamo

    _dynamo.reset()
    model, batches = Doubled(), forever(loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.compile(backend="aot_eager", fullgraph=True)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    _dynamo.utils.counters.clear()
    _, path = capture_in(step, client, steps=3)
    assert not _dynamo.utils.counters["graph_break"]
    assert not _dynamo.utils.counters["frames"], "it was compiled anew"
    found = {(*around[1:], name) for name, around in ours(path)}
    assert {("forward",), ("backward",), ("optimizer",)} <= found
