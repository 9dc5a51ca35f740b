"""Threads, CPUs and debugging switches of a training process."""

import os
import sys
from pathlib import Path

import pytest
import torch

from torchperfd.hooks.instruments import switch_checks
from torchperfd.model.process import (
    ANOMALY_DETECTION,
    DETERMINISTIC,
    PYTHON_PROFILER,
    PYTHON_TRACER,
    TORCH_PROFILER,
    UNBOUND,
    CpuBinding,
    ProcessSettings,
    cpu_binding,
    debug_variables,
)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ()),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ("CUDA_LAUNCH_BLOCKING=1",)),
        ({"CUDA_LAUNCH_BLOCKING": "0", "PYTHONMALLOC": "malloc"}, ()),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, ("TORCH_DISTRIBUTED_DEBUG=detail",)),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO", "PYTHONMALLOC": "debug"}, ("PYTHONMALLOC=debug",)),
        ({"CUDA_LAUNCH_BLOCKING": "1\x1b[m"}, ()),
    ],
)
def test_debug_variables_are_those_that_cost(environ: dict[str, str], found: tuple[str, ...]) -> None:
    assert debug_variables(environ, dev_mode=False) == found
    assert debug_variables(environ, dev_mode=True) == (*found, "python -X dev")


def test_settings_are_read_on_the_training_thread() -> None:
    settings = ProcessSettings()
    settings.read()
    assert (settings.threads, settings.switched_on) == (None, ())
    threads = iter((24, 2, 3, 4, 5))
    settings.install(lambda: next(threads), {ANOMALY_DETECTION: lambda: True, DETERMINISTIC: lambda: False})
    for _ in range(5):
        settings.read_at_step()
    assert settings.threads == 3
    assert settings.switches[0] == ANOMALY_DETECTION
    assert DETERMINISTIC not in settings.switches


def test_profiler_of_the_training_thread_is_a_switch() -> None:
    settings = ProcessSettings()
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        settings.read()
    finally:
        sys.setprofile(before)
    assert PYTHON_PROFILER in settings.switches
    settings.read()
    assert PYTHON_PROFILER not in settings.switches
    assert (PYTHON_TRACER in settings.switches) == (sys.gettrace() is not None)


def test_switches_of_torch_are_read() -> None:
    settings = ProcessSettings()
    settings.install(torch.get_num_threads, switch_checks(torch))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
            settings.read()
    finally:
        torch.use_deterministic_algorithms(False)
    assert {ANOMALY_DETECTION, DETERMINISTIC, TORCH_PROFILER} <= set(settings.switches)
    settings.read()
    assert not {ANOMALY_DETECTION, DETERMINISTIC, TORCH_PROFILER} & set(settings.switches)


@pytest.mark.parametrize(
    ("allowed", "granted", "ranks", "binding"),
    [
        ({0}, "0-1", 1, CpuBinding(1, 2)),
        ({0, 1}, "0-1", 1, UNBOUND),
        ({0}, "0", 1, UNBOUND),
        ({0, 1}, "0-3,8-11", 4, UNBOUND),
        ({0}, "0-3,8-11", 4, CpuBinding(1, 2)),
    ],
)
def test_binding_is_compared_with_the_share(
    allowed: set[int],
    granted: str,
    ranks: int,
    binding: CpuBinding,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    (tmp_path / "groups").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpuset.cpus.effective").write_text(f"{granted}\n")
    assert cpu_binding(tmp_path / "groups", tmp_path, ranks) == binding
