"""Threads, CPUs and debugging switches of a training process."""

import os
from pathlib import Path

import pytest

from torchperfd.process_settings import (
    ANOMALY_DETECTION,
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
    assert (settings.threads, settings.detects_anomalies) == (None, False)
    threads = iter((24, 2, 3, 4, 5))
    settings.install(lambda: next(threads), lambda: True)
    for _ in range(5):
        settings.read_at_step()
    assert settings.threads == 3
    assert settings.switches[0] == ANOMALY_DETECTION


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
