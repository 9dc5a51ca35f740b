"""What a loader's worker costs on a machine: where it is kept, and when it is measured."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torchperfd.model.loader_workers import UNMEASURED_COST, WorkerCost
from torchperfd_daemon import worker_cost

COST = WorkerCost(1e-4, 2e-4, 1e-10, 3e-4, 1e-4, 2e-10)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one each time the machine is measured."""
    times: list[int] = []

    def measure() -> tuple[WorkerCost, bool]:
        times.append(1)
        return COST, False

    monkeypatch.setattr(worker_cost, "measure_in_process", measure)
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    return times


def test_worker_cost_is_measured_once_and_kept(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "cache" / "cost.json"
    assert worker_cost.of_this_machine(path) == worker_cost.of_this_machine(path) == COST
    assert len(measured) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir() if each.suffix != ".lock"] == ["cost.json"]


def test_worker_cost_unwritable_cache_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "cost.json"
    assert worker_cost.of_this_machine(path) == worker_cost.of_this_machine(path) == COST
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", "nan", '{"boot": 1}', "\x00" * 5000])
def test_worker_cost_damaged_cache_is_measured_again(tmp_path: Path, measured: list[int], text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    assert worker_cost.of_this_machine(path) == COST
    assert len(measured) == 1


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1e-3, 5.0])
def test_worker_cost_impossible_figures_are_not_read(
    tmp_path: Path, measured: list[int], figure: float
) -> None:
    path = tmp_path / "cost.json"
    worker_cost.of_this_machine(path)
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"cost": asdict(COST) | {"receive": figure}}))
    worker_cost.of_this_machine(path)
    assert len(measured) == 2


def test_worker_cost_of_another_machine_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "cost.json"
    worker_cost.of_this_machine(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    worker_cost.of_this_machine(path)
    assert len(measured) == 2


def test_worker_cost_of_a_busy_machine_is_kept_until_quiet(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load never changes it: not the first measurement, nor one that became busy while it was made."""
    loaded = WorkerCost(2e-3, 2e-3, 1e-9, 1e-3, 1e-3, 1e-9)
    other = replace(loaded, receive=5e-3)
    path = tmp_path / "cost.json"
    for is_quiet, found, kept in (
        (False, (loaded, True), loaded),
        (False, (other, True), loaded),
        (True, (other, True), loaded),
        (True, (COST, False), COST),
        (True, (other, False), COST),
    ):
        monkeypatch.setattr(worker_cost, "is_quiet", lambda is_quiet=is_quiet: is_quiet)
        monkeypatch.setattr(worker_cost, "measure_in_process", lambda found=found: found)
        assert worker_cost.of_this_machine(path) == kept


@pytest.mark.parametrize(
    ("pressure", "load", "expected"),
    [
        ("some avg10=0.40 avg60=9.00 avg300=9.00 total=1", 30.0, True),
        ("some avg10=35.10 avg60=9.00 avg300=9.00 total=1", 0.0, False),
        ("", 0.1, True),
        (None, 400.0, False),
    ],
)
def test_machine_is_quiet_if_nothing_waits_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pressure: str | None, load: float, *, expected: bool
) -> None:
    path = tmp_path / "cpu"
    if pressure is not None:
        path.write_text(pressure)
    monkeypatch.setattr(worker_cost, "_PRESSURE", path)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert worker_cost.is_quiet() is expected


def test_worker_cost_link_in_the_cache_is_not_followed(tmp_path: Path, measured: list[int]) -> None:
    path, planted = tmp_path / "cost.json", tmp_path / "planted.json"
    worker_cost.of_this_machine(planted)
    path.symlink_to(planted)
    before = planted.read_bytes()
    assert worker_cost.of_this_machine(path) == COST
    assert len(measured) == 2
    assert planted.read_bytes() == before
    assert not path.is_symlink()


def test_worker_cost_low_priority_does_not_measure(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: 19)
    assert worker_cost.of_this_machine(tmp_path / "cost.json") == UNMEASURED_COST
    assert not measured


def test_worker_cost_measured_here_is_a_machines() -> None:
    """A real measurement: parts of a second, in a process of its own, and every figure possible."""
    measured = worker_cost.measure_in_process()
    assert measured is not None
    cost, _ = measured
    assert 0 < cost.receiving(2, 1 << 20) < 1
    assert 0 < cost.sending(2, 1 << 20) < 1
