"""Tracers: whole traces, equal to torch's own, and no quarrel with the script's profiler."""

import gc
import json
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.torches import VERSION, needs_muting
from torch.autograd import profiler

from torchperfd.captures import tracer
from torchperfd.hooks.profiler import ARBITER, trace_only
from torchperfd.model.capture_options import CaptureOptions

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=1e-3, momentum=0.9)

Options = dict[str, Any]
PLAIN: Options = {"record_shapes": False, "with_stack": False, "profile_memory": False}
EACH = [PLAIN, *({**PLAIN, name: True} for name in PLAIN), dict.fromkeys(PLAIN, True)]


def train(steps: int = 3) -> None:
    for step in range(steps):
        with profiler.record_function(f"ProfilerStep#{step}"):
            OPTIMIZER.zero_grad()
            MODEL(torch.ones(4, 8)).sum().backward()
            OPTIMIZER.step()


def operators(path: Path) -> Counter[tuple[Any, ...]]:
    """Count what torch recorded by all that does not change from run to run; Python's frames aside."""
    found: Counter[tuple[Any, ...]] = Counter()
    for event in json.loads(path.read_bytes())["traceEvents"]:
        if event.get("cat") == "python_function":
            continue
        facts = event.get("args", {})
        stable = {name: str(facts[name]) for name in ("Input Dims", "Input type", "Bytes") if name in facts}
        found[event["ph"], event.get("cat"), event["name"], (*facts,), (*stable.items(),)] += 1
    return found


def frames(path: Path) -> Counter[str]:
    """Count calls of functions of this file and of torch's optimizers."""
    names = (event["name"] for event in json.loads(path.read_bytes())["traceEvents"])
    return Counter(name for name in names if "train" in name or "optim/" in name)


def by_hand(path: Path, options: Options) -> Path:
    record: Any = profiler.profile
    with record(use_kineto=True, **options) as profile:
        train()
    profile.export_chrome_trace(str(path))
    return path


def elsewhere(tracing: tracer.Tracer, path: Path) -> None:
    """Export on a thread of its own, as captures do."""
    thread = threading.Thread(target=tracing.export, args=(path,))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def torchs() -> dict[str, Any]:
    """Return torch's profiler by name, without what it looks for at its first use."""
    return {name: value for name, value in vars(profiler).items() if not name.startswith("_cupti_monitor")}


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """Watch the script's profilers, as captures do; leave torch as it was."""
    before = torchs()
    tracer.prepare()
    assert torchs() != before
    yield
    ARBITER.leave()
    assert torchs() == before


@pytest.mark.parametrize("options", EACH, ids=str)
def test_a_trace_has_exactly_the_events_of_torchs_own_export(options: Options, tmp_path: Path) -> None:
    train()
    tracing = tracer.KinetoTracer(CaptureOptions(**options))
    tracing.start()
    train()
    tracing.stop()
    train()  # the loop goes on meanwhile
    elsewhere(tracing, tmp_path / "ours.json")
    expected = by_hand(tmp_path / "theirs.json", options)
    ours, theirs = operators(tmp_path / "ours.json"), operators(expected)
    if options["profile_memory"]:
        # What was allocated before the profiler came and is freed now depends on the moment.
        assert {key for key in ours if "[memory]" in key} <= {key for key in theirs if "[memory]" in key}
        ours, theirs = (Counter({k: n for k, n in c.items() if "[memory]" not in k}) for c in (ours, theirs))
    assert ours == theirs
    assert ours.total() > 100
    if options["with_stack"]:
        assert frames(expected) - frames(tmp_path / "ours.json") == Counter()
        assert frames(expected)


def test_operator_open_at_the_last_edge_keeps_its_duration(tmp_path: Path) -> None:
    tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
    tracing.start()
    began = time.perf_counter()
    with profiler.record_function("open"):
        torch.ones(2).neg()
        tracing.stop()
    longest_us = (time.perf_counter() - began) * 1e6
    train()
    elsewhere(tracing, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    (duration_us,) = (event["dur"] for event in events if event["name"] == "open")
    assert 0 <= duration_us <= longest_us
    assert (duration_us == 0) == (VERSION <= (2, 4)), "torch 2.4 gives it none"


def test_many_traces_follow_one_another(tmp_path: Path) -> None:
    counts = set()
    for turn in range(5):
        tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
        tracing.start()
        train()
        tracing.stop()
        elsewhere(tracing, tmp_path / f"{turn}.json")
        assert tracer.unusable() == ""
        counts.add(operators(tmp_path / f"{turn}.json").total())
    assert len(counts) == 1


def test_a_discarded_trace_leaves_the_profiler_to_others(tmp_path: Path) -> None:
    tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
    tracing.start()
    assert tracer.unusable() != ""
    train()
    tracing.stop()
    tracing.discard()
    assert tracer.unusable() == ""
    assert operators(by_hand(tmp_path / "theirs.json", PLAIN)).total() > 100


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
    tracing.start()
    tracing.stop()
    with pytest.raises(OSError, match="torch wrote no trace"):
        tracing.export(tmp_path / "nowhere" / "trace.json")
    assert tracer.unusable() == ""


@pytest.mark.parametrize("options", EACH, ids=str)
def test_users_profiler_ends_ours_and_is_complete(options: Options, tmp_path: Path) -> None:
    train()
    tracing = tracer.KinetoTracer(CaptureOptions(**options))
    tracing.start()
    assert not tracing.lost
    train(1)
    theirs = by_hand(tmp_path / "theirs.json", PLAIN)
    assert tracer.unusable() == ""
    assert tracing.lost
    tracing.stop()
    with pytest.raises(tracer.LostTraceError, match="the script started its own profiler"):
        tracing.export(tmp_path / "ours.json")
    alone = by_hand(tmp_path / "alone.json", PLAIN)
    assert operators(theirs) == operators(alone)


def test_a_profiler_prepared_before_we_watched_still_starts(tmp_path: Path) -> None:
    ARBITER.leave()
    theirs: Any = profiler.profile(use_kineto=True)
    theirs._prepare_trace()
    ARBITER.watch()
    tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
    refused = False
    try:
        tracing.start()
    except RuntimeError:
        refused = True
    assert not refused or VERSION <= (2, 10), "torch up to 2.10 prepares no second profiler"
    train(1)
    theirs._start_trace()
    assert tracer.unusable() != "", "torch must know that a profiler is on"
    train()
    theirs.__exit__(None, None, None)
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    if not refused:
        tracing.stop()
        with pytest.raises(tracer.LostTraceError):
            tracing.export(tmp_path / "ours.json")
    assert operators(tmp_path / "theirs.json") == operators(by_hand(tmp_path / "alone.json", PLAIN))


def answers_over_a_schedule(ask: Callable[[], str]) -> list[str]:
    """Ask before each step of a schedule: idle, two of warm-up, active, idle; check the answers."""
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=1, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule
    ) as theirs:
        answers = []
        for _ in range(5):
            answers.append(ask())
            train(1)
            theirs.step()
    words = ["", "warming up", "warming up", "active", ""]
    assert all(word in answer for word, answer in zip(words, answers, strict=True)), answers
    return answers


def test_no_trace_is_started_while_the_scripts_profiler_warms_up() -> None:
    answers = answers_over_a_schedule(tracer.unusable)
    assert answers[0] == answers[4] == tracer.unusable() == ""


def test_tracer_warm_up_begun_before_a_capture_is_found() -> None:
    def prepare_for_a_moment() -> str:
        answer = tracer.prepare()
        tracer.end()
        return answer

    tracer.end()
    answers = answers_over_a_schedule(prepare_for_a_moment)
    assert answers[0] == answers[4] == tracer.prepare() == ""


@pytest.mark.parametrize("name", ["_prepare_profiler", "_enable_profiler"])
def test_tracer_without_a_name_to_watch_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer.end()
    with monkeypatch.context() as patch:
        patch.delattr(profiler, name)
        before = torchs()
        reason = tracer.prepare()
        assert reason.startswith(f"this torch has no torch.autograd.profiler.{name}")
        assert torchs() == before
    tracer.prepare()


def test_users_profiler_during_our_export_leaves_both_complete(tmp_path: Path) -> None:
    train()
    tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
    tracing.start()
    train()
    tracing.stop()
    theirs = by_hand(tmp_path / "theirs.json", PLAIN)
    elsewhere(tracing, tmp_path / "ours.json")
    assert operators(tmp_path / "ours.json") == operators(theirs)


@needs_muting
@pytest.mark.parametrize("compiled", [False, True])
def test_tracer_in_forked_child_records_no_operators(compiled: bool, tmp_path: Path) -> None:
    """A DataLoader worker would otherwise fill its memory for as long as it lives."""
    code = """
import os, sys, torch
from pathlib import Path
from torchperfd.captures import tracer
from torchperfd.model.capture_options import CaptureOptions
if sys.argv[2] == "True":
    import torch._inductor
tracer.prepare()
tracing = tracer.KinetoTracer(CaptureOptions())
tracing.start()
torch.ones(2).neg()
child = os.fork()
torch.ones(2).sinh() if child == 0 else torch.ones(2).cosh()
name = "child.json" if child == 0 else "parent.json"
if child:
    assert os.waitpid(child, 0)[1] == 0
tracing.stop()
tracing.export(Path(sys.argv[1], name))
os._exit(0)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(compiled)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    child, parent = ({key[2] for key in operators(tmp_path / name)} for name in ("child.json", "parent.json"))
    assert "aten::neg" in child
    assert "aten::sinh" not in child
    assert {"aten::neg", "aten::cosh"} <= parent


def test_tracer_without_trace_only_records_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class OldConfig:
        def __init__(self) -> None: ...

    monkeypatch.setattr(torch.profiler, "_ExperimentalConfig", OldConfig)
    assert trace_only() is None
    begun_and_ended(tracer.KinetoTracer(CaptureOptions()), tmp_path / "ours.json")
    expected = by_hand(tmp_path / "theirs.json", PLAIN)
    assert operators(tmp_path / "ours.json") == operators(expected)


def test_tracer_makes_no_event_list_when_it_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch 2.4 makes one at each stop, which takes ten times as long as all the rest."""
    lengths: list[int] = []
    stop: Any = profiler.profile.__exit__

    def stop_as_torch_2_4(profile: Any, *arguments: Any) -> Any:
        result = stop(profile, *arguments)
        lengths.append(len(profile._parse_kineto_results(profile.kineto_results)))
        return result

    monkeypatch.setattr(profiler.profile, "__exit__", stop_as_torch_2_4)
    begun_and_ended(tracer.KinetoTracer(CaptureOptions()), tmp_path / "ours.json")
    assert lengths == [0]
    assert operators(tmp_path / "ours.json") == operators(by_hand(tmp_path / "theirs.json", PLAIN))


def begun_and_ended(tracing: tracer.Tracer, path: Path) -> Any:
    """Trace three steps; return the document."""
    tracing.start()
    train()
    tracing.stop()
    tracing.export(path)
    return json.loads(path.read_bytes())


def test_tracer_writes_unrecorded_step_time(tmp_path: Path) -> None:
    recorded = CaptureOptions()
    document = begun_and_ended(tracer.KinetoTracer(recorded, 1234), tmp_path / "known.json")
    assert document["torchperfd"] == {"unrecorded_step_ns": 1234}
    assert "torchperfd" not in begun_and_ended(tracer.KinetoTracer(recorded), tmp_path / "unknown.json")
    more = tracer.KinetoTracer(recorded, 1234, {"unrecorded_phase_ns": {"data": 5}})
    facts = begun_and_ended(more, tmp_path / "more.json")["torchperfd"]
    assert facts == {"unrecorded_step_ns": 1234, "unrecorded_phase_ns": {"data": 5}}


def test_modules_are_asked_for_only_where_they_are_wanted() -> None:
    """Torch deprecates ``with_modules``: captures must go on once it is gone."""
    assert "with_modules" not in tracer.profiler_arguments(CaptureOptions())
    asked = tracer.profiler_arguments(CaptureOptions(with_modules=True))
    assert (asked["with_modules"], asked["with_stack"]) == (True, True)


def test_warning_of_torchs_own_about_cycles_is_not_the_scripts(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Profile:
        def __init__(self, **_: Any) -> None:
            self.profiler = None

        def start(self) -> None:
            warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)
            warnings.warn("another one", stacklevel=2)

        def stop(self) -> None:
            pass

    monkeypatch.setattr(tracer, "is_inductor_imported", lambda: True)
    monkeypatch.setattr(tracer, "skip_event_lists", lambda _: None)
    monkeypatch.setattr("torch.profiler.profile", Profile)
    tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
    tracing.start()
    tracing.stop()
    assert [str(warning.message) for warning in recwarn] == ["another one"]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["beneath", "torch.profiler"])
@pytest.mark.parametrize("is_written", [False, True], ids=["disk full", "written"])
def test_trace_is_freed_with_its_file_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_compiled: bool, is_written: bool
) -> None:
    monkeypatch.setattr(tracer, "is_inductor_imported", lambda: is_compiled)
    path = tmp_path / "trace.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.collect()
    gc.disable()
    try:
        tracing = tracer.KinetoTracer(CaptureOptions(**PLAIN))
        tracing.start()
        train()
        tracing.stop()
        assert traces() == 1
        if not is_written:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(OSError, match="wrote no trace") if not is_written else nullcontext():
            tracing.export(path)
        assert path.exists() == is_written
        assert traces() == 0
        assert [name for name in open_files() if str(tmp_path) in name] == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        gc.enable()


def traces() -> int:
    """Return how many traces torch has in memory."""
    return sum(type(each) is profiler.profile for each in gc.get_objects())


def open_files() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            yield str(descriptor.readlink())
