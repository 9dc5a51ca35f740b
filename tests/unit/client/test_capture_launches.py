"""Kernels of a captured trace, and how CUPTI is left after a capture."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.captures import tracer
from torchperfd.captures.rank_files import LaunchCounter, RankFiles, missing_kernels_warning
from torchperfd.captures.tracer import TEARDOWN_VARIABLE, Tracer, have_cupti_removed
from torchperfd.model.capture_options import CaptureOptions

EVENTS = {
    "cudaLaunchKernel": ("cuda_runtime", True),
    "cudaLaunchKernelExC": ("cuda_runtime", True),
    "cuLaunchKernelEx": ("cuda_driver", True),
    "hipLaunchKernel": ("cuda_runtime", True),
    "cudaGraphLaunch": ("cuda_runtime", False),
    "cudaMemcpyAsync": ("cuda_runtime", False),
    "sgemm cudaLaunchKernel": ("kernel", False),
    "Memcpy HtoD": ("gpu_memcpy", False),
}


def trace_of(names: list[str]) -> bytes:
    """Return a trace of such events, as Kineto writes it."""
    events = [
        f'  {{\n    "ph": "X", "cat": "{EVENTS[name][0]}", "name": "{name}",\n    "args": {{}}\n  }}'
        for name in names
    ]
    return ('{\n  "traceEvents": [\n' + ",\n".join(events) + '\n  ],\n  "traceName": "a.json"\n}').encode()


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=30), st.integers(1, 400))
def test_counts_are_the_same_in_pieces_of_any_size(names: list[str], size: int) -> None:
    trace = trace_of(names)
    assert len(json.loads(trace)["traceEvents"]) == len(names)
    counter = LaunchCounter()
    for start in range(0, len(trace), size):
        counter.add(trace[start : start + size])
    counter.end()
    assert counter.launches == sum(EVENTS[name][1] for name in names)
    assert counter.kernels == sum(EVENTS[name][0] == "kernel" for name in names)


def test_counts_of_one_line_without_an_end() -> None:
    counter = LaunchCounter()
    counter.add(b'{"cat": "kernel"')
    counter.add(b', "name": "k"}')
    counter.end()
    assert (counter.launches, counter.kernels) == (0, 1)


@pytest.mark.parametrize(
    ("launches", "kernels", "is_missing"),
    [(0, 0, False), (0, 9, False), (1000, 900, False), (1000, 899, True), (10, 0, True), (10, 500, False)],
)
def test_warning_comes_where_kernels_are_missing(launches: int, kernels: int, is_missing: bool) -> None:
    assert bool(missing_kernels_warning(launches, kernels)) is is_missing


@pytest.mark.parametrize(("launches", "kernels"), [(0, 0), (0, 9), (9, 9)])
def test_warning_comes_where_a_device_in_use_is_not_shown(launches: int, kernels: int) -> None:
    text = missing_kernels_warning(launches, kernels, holds_device_memory=True)
    assert bool(text) is (not launches and not kernels)
    assert not text or "the trace has nothing of the device" in text


class WrittenTrace(Tracer):
    """A trace that is there already."""

    lost = False

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def export(self, path: Path) -> None:
        """Write two launches and a kernel."""
        path.write_bytes(trace_of(["cudaLaunchKernel", "cuLaunchKernelEx", "sgemm cudaLaunchKernel"]))

    def discard(self) -> None:
        """Do nothing."""


def test_written_trace_has_its_counts(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 0, "trace", 0)
    written = files.write_trace(WrittenTrace(), lambda: "")
    assert (written.launches, written.kernels) == (2, 1)
    assert written.bytes == (tmp_path / "rank0.json").stat().st_size


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("13.0", "1"), ("13.2", "1"), ("14.0", "1"), ("12.8", None), ("11.8", None), (None, None), ("", None)],
)
def test_cupti_is_removed_from_cuda_13_on(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, expected: str | None
) -> None:
    monkeypatch.delenv(TEARDOWN_VARIABLE, raising=False)
    have_cupti_removed(cuda)
    assert os.environ.get(TEARDOWN_VARIABLE) == expected
    monkeypatch.delenv(TEARDOWN_VARIABLE, raising=False)


@pytest.mark.parametrize("choice", ["0", "1", ""])
def test_choice_of_the_script_is_kept(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv(TEARDOWN_VARIABLE, choice)
    have_cupti_removed("13.0")
    assert os.environ[TEARDOWN_VARIABLE] == choice


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "1"), (False, None)])
def test_environment_changes_with_the_first_capture_on_cuda_only(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: str | None
) -> None:
    monkeypatch.delenv(TEARDOWN_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tracer.KinetoTracer(CaptureOptions())
    assert os.environ.get(TEARDOWN_VARIABLE) == expected
    monkeypatch.delenv(TEARDOWN_VARIABLE, raising=False)


def test_captures_of_cuda_are_a_second_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(tracer, "_ended_at", 0.0)
    tracer.rest_after_device_profiler()
    tracer.note_device_profiler_end()
    now[0] = 100.25
    tracer.rest_after_device_profiler()
    now[0] = 200.0
    tracer.rest_after_device_profiler()
    assert slept == [0.0, 0.75, 0.0]
