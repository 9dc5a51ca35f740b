"""The device time of each phase, beside what torch.profiler's trace of the same steps says."""

import json
import tempfile
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_proof.analysed_capture import attached
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.workloads import Training, gpt, resnet18, resnet50
from torch.profiler import ProfilerActivity, profile, record_function

from torchperfd.client import Client
from torchperfd.v1.contract import PHASES

TITLE: Final = "Device time of each phase beside torch.profiler's trace"
SECONDS: Final = 60

WITHIN: Final = 0.05
JUDGED_FROM: Final = 0.02
"""Part of the device's time from which on a phase is judged."""

_RANGE: Final = "gpu_proof:"
_ON_DEVICE: Final = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES: Final = frozenset(("cuda_runtime", "cuda_driver"))


def run(machine: Machine) -> Outcome:
    """Compare both for three models."""
    outcome = Outcome(["model", "phase", "client", "trace", "off by", ""])
    steps = machine.amount(20, 3)
    for make in (resnet50, gpt, resnet18):
        training = Training(make(machine), machine)
        with attached(training.workload.model) as client:
            reported, traced = _measured(training, client, steps)
        _judge(outcome, training.workload.name, reported, traced, steps, machine)
    return outcome


def _measured(training: Training, client: Client, steps: int) -> tuple[dict[str, int], dict[str, float]]:
    """Train with both; return the nanoseconds by phase of the client and of the trace."""
    _annotated(training, steps)
    before = _reported_ns(training, client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler's, about cycles that there are none of
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            _annotated(training, steps)
    after = _reported_ns(training, client)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        traced = traced_ns(json.loads(path.read_text())["traceEvents"])
    return {name: after[name] - before[name] for name in PHASES}, traced


def _annotated(training: Training, steps: int) -> None:
    """Train with every phase annotated, so that the trace has them independently of the client."""
    batches = training.batches(steps)
    while True:
        with record_function(f"{_RANGE}data"):
            batch = next(batches, None)
        if batch is None:
            break
        inputs, targets = batch
        with record_function(f"{_RANGE}zero_grad"):
            training.optimizer.zero_grad()
        with training.machine.autocast():
            with record_function(f"{_RANGE}forward"):
                logits = training.model(inputs)
            with record_function(f"{_RANGE}loss"):
                loss = training.loss(logits.flatten(0, -2), targets.flatten())
        with record_function(f"{_RANGE}backward"):
            loss.backward()
        with record_function(f"{_RANGE}optimizer"):
            training.optimizer.step()
    training.machine.wait()


def _reported_ns(training: Training, client: Client) -> dict[str, int]:
    """Return each phase's nanoseconds on the device so far, from the client."""
    training.machine.wait()
    client.report()
    time.sleep(0.3)  # a flush may have been under way
    phases = client.report().totals.train.phases
    return {name: phases[slot].device_ns for slot, name in enumerate(PHASES)}


def traced_ns(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return each phase's nanoseconds on the device from a trace, all steps together.

    A boundary between phases is passed on the device when all work launched before it has ended, and not
    before the host is there. A phase lasts from one boundary to the next, as CUDA events recorded there
    see it. Work is found by where on the host it was launched, whatever the thread.
    """
    boundaries: list[tuple[float, str]] = []
    ends: list[tuple[float, str]] = []
    launched: dict[int, float] = {}
    done: list[tuple[int, float]] = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category == "user_annotation" and name.startswith(_RANGE):
            boundaries.append((event["ts"], name.removeprefix(_RANGE)))
            ends.append((event["ts"] + event["dur"], "other"))
        elif category in _LAUNCHES and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = event["ts"]
        elif category in _ON_DEVICE:
            done.append((event["args"]["correlation"], event["ts"] + event["dur"]))
    # The end of a range comes before a start at the same time: sorting keeps the order of equals.
    boundaries = sorted(ends + boundaries, key=lambda boundary: boundary[0])
    work = deque(sorted((launched[number], end) for number, end in done if number in launched))

    total: dict[str, float] = defaultdict(float)
    ended = passed = 0.0
    phase = ""
    for at, following in boundaries:
        while work and work[0][0] < at:
            ended = max(ended, work.popleft()[1])
        passed, before = max(at, ended), passed
        if phase:
            total[phase] += (passed - before) * 1e3
        phase = following
    return dict(total)


def _judge(
    outcome: Outcome,
    model: str,
    reported: Mapping[str, float],
    traced: Mapping[str, float],
    steps: int,
    machine: Machine,
) -> None:
    """Add a row for each phase that has time on the device, and what must hold of them."""
    whole = sum(traced.values())
    worst = 0.0
    for name in sorted(set(reported) | set(traced), key=lambda name: -traced.get(name, 0.0)):
        ours, theirs = reported.get(name, 0), traced.get(name, 0.0)
        if not ours and not theirs:
            continue
        off = ours / theirs - 1 if theirs else float("inf")
        is_judged = max(ours, theirs) >= JUDGED_FROM * whole
        if is_judged:
            worst = max(worst, abs(off))
        cells = [f"{ours / steps / 1e6:.3f} ms", f"{theirs / steps / 1e6:.3f} ms"]
        outcome.rows.append(
            [model, name, *cells, f"{off:+.1%}", "" if is_judged else f"under {JUDGED_FROM:.0%} of the step"]
        )
    text = f"{model}: phases agree within {WITHIN:.0%}; worst: {worst:.1%}"
    outcome.bounds.append(Bound(text, None if machine.is_rehearsal else whole > 0 and worst <= WITHIN))
