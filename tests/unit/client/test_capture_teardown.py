"""Whether CUPTI is removed after a capture: where that is known to be safe, unless the script decides."""

import os
import time

import pytest
import torch

from torchperfd.captures import teardown, tracer
from torchperfd.captures.teardown import VARIABLE, have_cupti_removed


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("13.0", "1"), ("13.2", "1"), ("14.0", "1"), ("12.8", None), ("11.8", None), (None, None), ("", None)],
)
def test_cupti_is_removed_from_cuda_13_on(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, expected: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    have_cupti_removed(cuda)
    assert os.environ.get(VARIABLE) == expected
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("choice", ["0", "1", ""])
def test_choice_of_the_script_is_kept(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv(VARIABLE, choice)
    have_cupti_removed("13.0")
    assert os.environ[VARIABLE] == choice


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "1"), (False, None)])
def test_environment_changes_with_the_first_capture_on_cuda_only(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tracer.KinetoTracer(tracer.Recorded())
    assert os.environ.get(VARIABLE) == expected
    monkeypatch.delenv(VARIABLE, raising=False)


def test_captures_of_cuda_are_a_second_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(teardown, "_ended_at", 0.0)
    teardown.rest()
    teardown.note_end()
    now[0] = 100.25
    teardown.rest()
    now[0] = 200.0
    teardown.rest()
    assert slept == [0.0, 0.75, 0.0]
