"""One capture of this rank: its end, whatever happens, and what it leaves behind."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.node import side_by_side
from tests.unit.client.captured_loop import step, train_until
from torch.autograd import profiler

import torchperfd
from torchperfd.captures import tracer
from torchperfd.captures.capture import RankCapture
from torchperfd.captures.manager import CaptureTarget
from torchperfd.captures.state import CaptureOptions, CaptureOutcome, CaptureStage, PauseEstimate
from torchperfd.errors import CaptureError
from torchperfd.events import EventBuffer, codes
from torchperfd.hooks.profiler import ARBITER
from torchperfd.model.identity import read_identity
from torchperfd.safety.logs import Faults
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.replay import Replay

WATCHED = ("_prepare_profiler", "_enable_profiler")
UNWATCHED = [vars(profiler)[name] for name in WATCHED]


def is_watched() -> bool:
    """Return whether torch's functions are wrapped: both or neither."""
    (watched,) = {vars(profiler)[name] is not before for name, before in zip(WATCHED, UNWATCHED, strict=True)}
    return watched


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    """Leave torch's profiler as it was."""
    yield
    ARBITER.leave()


class Prepared:
    """A capture of a loop of its own, and how it ended."""

    def __init__(self, directory: Path) -> None:
        self.replay = Replay(EventBuffer(1024, codes.CUDA_EVENT), 64, Faults())
        self.outcomes: list[CaptureOutcome] = []
        self.pauses = PauseEstimate()
        self.target = CaptureTarget(self.replay, read_identity(), lambda: 0.0, PhaseNames().name)
        self.capture = RankCapture(
            self.target,
            capture_id="one",
            directory=directory,
            options=CaptureOptions(steps=2),
            on_outcome=lambda _, outcome: self.outcomes.append(outcome),
            pauses=self.pauses,
        )


def test_capture_never_armed_fails_and_ends_live_replay(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path)
    assert prepared.capture.prepare(timeout=0.01) == ""
    assert prepared.capture.ended.wait(30)
    assert [outcome.reason for outcome in prepared.outcomes] == [
        "no start step came within the time given; capture again"
    ]
    assert not prepared.replay.live
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.manifest.json"]
    prepared.capture.arm(5)
    assert prepared.capture.state.stage is CaptureStage.FAILED
    assert not prepared.replay.live


def test_a_capture_that_is_armed_in_time_has_no_deadline(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path)
    assert prepared.capture.prepare(timeout=0.2) == ""
    prepared.capture.arm(5)
    assert not prepared.capture.ended.wait(0.4)
    assert prepared.replay.live
    prepared.capture.cancel("enough")
    assert [outcome.reason for outcome in prepared.outcomes] == ["enough"]
    assert not prepared.replay.live


def test_capture_watches_profilers_while_it_runs_only(tmp_path: Path, client: torchperfd.Client) -> None:
    assert not is_watched(), "a client alone leaves torch's profiler as it is"
    prepared = Prepared(tmp_path)
    assert prepared.capture.prepare() == ""
    assert is_watched()
    prepared.capture.arm()
    for next_index in (7, 8, 9):
        prepared.capture.train_edge(next_index)
    assert prepared.capture.ended.wait(30)
    assert not is_watched()
    given_up = Prepared(tmp_path)
    assert given_up.capture.prepare() == ""
    given_up.capture.cancel("enough")
    assert not is_watched()


def test_prepare_removes_the_manifest_of_an_earlier_attempt(tmp_path: Path) -> None:
    earlier = tmp_path / "rank0.manifest.json"
    earlier.write_text("{}")
    prepared = Prepared(tmp_path)
    assert prepared.capture.prepare() == ""
    assert not earlier.exists()
    prepared.capture.cancel("enough")


def test_capture_without_a_start_step_begins_with_any_step(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path)
    assert prepared.capture.prepare() == ""
    prepared.capture.arm()
    # However many steps went by meanwhile.
    for next_index in (7, 8, 9):
        prepared.capture.train_edge(next_index)
    assert prepared.capture.ended.wait(30)
    assert [(outcome.ok, outcome.start_step) for outcome in prepared.outcomes] == [(True, 7)]
    events = json.loads((tmp_path / prepared.capture.file).read_bytes())["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    assert steps == ["ProfilerStep#7", "ProfilerStep#8"]


def test_capture_past_its_first_step_fails_and_may_be_retried(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path)
    assert prepared.capture.prepare() == ""
    prepared.capture.arm(5)
    prepared.capture.train_edge(7)
    assert prepared.capture.ended.wait(30)
    assert [(outcome.ok, outcome.reason, outcome.retry) for outcome in prepared.outcomes] == [
        (False, "step 5 was missed", True)
    ]


def test_captures_follow_one_another_each_whole(client: torchperfd.Client) -> None:
    for _ in range(5):
        step()
    client.parts.flusher.flush()
    for _ in range(3):
        capture = client.capture(steps=2)
        train_until(capture)
        document = json.loads(capture.wait().read_bytes())
        events = document["traceEvents"]
        first, after = capture.step_range
        steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
        assert steps == {f"ProfilerStep#{index}" for index in range(first, after)}
        assert sum(event["name"] == "aten::linear" for event in events) == 2
        assert 1e3 < document["torchperfd"]["unrecorded_step_ns"] < 1e9
        assert tracer.unusable() == ""


def test_first_capture_has_an_estimate_and_a_measure(client: torchperfd.Client) -> None:
    for _ in range(5):
        step()
    client.parts.flusher.flush()
    capture = client.capture(steps=2)
    train_until(capture, "armed", "running", "exporting", "complete", "failed")
    assert capture.pause_seconds > 0
    train_until(capture)
    capture.wait()
    manifest = json.loads(capture.path.with_name("rank0.manifest.json").read_bytes())
    assert manifest["pause_seconds"] == round(capture.pause_seconds, 3)


def test_a_capture_with_a_long_pause_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = Prepared(tmp_path)
    prepared.pauses.learn_nodes(20_000)
    assert prepared.capture.prepare() == ""
    with caplog.at_level("WARNING", "torchperfd"):
        prepared.capture.arm(5)
    assert "training will pause for about 5.0 s" in caplog.text
    assert prepared.capture.state.pause_seconds == pytest.approx(5.0)
    prepared.capture.cancel("enough")
    assert prepared.capture.state.pause_seconds == 0


def test_users_profiler_ends_a_running_capture_and_is_complete(
    client: torchperfd.Client, tmp_path: Path
) -> None:
    step()
    capture = client.capture(steps=5)
    train_until(capture, "running", "failed")
    with profiler.profile(use_kineto=True) as theirs:
        for _ in range(10):
            step()
    with pytest.raises(CaptureError, match="the script started its own profiler"):
        capture.wait()
    names = [event.name for event in theirs.function_events or ()]
    assert names.count("aten::linear") == 10
    assert not [name for name in names if name.startswith("ProfilerStep#")], "our steps in their trace"


def test_capture_during_users_profiler_warmup_is_refused(client: torchperfd.Client) -> None:
    step()
    before = client.capture(steps=1)
    train_until(before, "complete")
    before.wait()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule
    ) as theirs:
        capture = client.capture(steps=1)
        with pytest.raises(CaptureError, match="warming up"):
            capture.wait()
        theirs.step()
        step()
    assert theirs.events()


@pytest.mark.parametrize("when", ["before", "after"])
def test_capture_cancelled_while_it_prepares_watches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    prepared, prepare = Prepared(tmp_path), tracer.prepare

    def cancelled() -> str:
        if when == "before":
            prepared.capture.cancel("enough")
        reason = prepare()
        if when == "after":
            prepared.capture.cancel("enough")
        return reason

    monkeypatch.setattr(tracer, "prepare", cancelled)
    assert prepared.capture.prepare() == "enough"
    assert prepared.capture.state.stage is CaptureStage.FAILED
    assert not is_watched()


def test_a_cancelled_capture_leaves_the_profiler_free(client: torchperfd.Client) -> None:
    step()
    capture = client.capture(steps=1000)
    train_until(capture, "running", "failed")
    capture.cancel()
    train_until(capture, "failed")
    with pytest.raises(CaptureError, match="cancelled by the script"):
        capture.wait()
    following = client.capture(steps=1)
    train_until(following)
    assert following.wait().is_file()


# Both take about as long to export.
@pytest.mark.parametrize(("with_stack", "forwards"), [(False, 2000), (True, 700)], ids=["False", "True"])
def test_exit_during_the_export_is_an_exit_like_any_other(with_stack: bool, forwards: int) -> None:
    script = f"""
import sys, torch, torchperfd
client = torchperfd.attach()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def step():
    optimizer.zero_grad()
    for _ in range({forwards}):
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
step()
capture = client.capture(steps=4, with_stack={with_stack})
while capture.state not in ("exporting", "complete", "failed"):
    step()
for _ in range(int(sys.argv[1])):
    step()
print("last line", capture.state != "failed")
"""

    def exits(steps_after: int) -> None:
        done = subprocess.run(
            [sys.executable, "-c", script, str(steps_after)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stdout == "last line True\n"
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr

    # Each has a processor to itself: an exit waits for an export, but not for one that is starved.
    exited = side_by_side({str(steps): partial(exits, steps) for steps in (0, 1, 5)}, abreast=2)
    for each in exited.values():
        each.result()
