"""How many launches and kernels a trace has, and when kernels are missing."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.captures.rank_files import LaunchCounter, RankFiles, missing_kernels_warning
from torchperfd.captures.tracer import Tracer

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
