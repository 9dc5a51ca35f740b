"""Whether CUPTI is removed after a capture: where that is known to be safe, unless the script decides."""

import os
import time

import pytest
import torch

from torchperfd.captures import tracer
from torchperfd.captures.tracer import TEARDOWN_VARIABLE, have_cupti_removed


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
    tracer.KinetoTracer(tracer.Recorded())
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
