"""Advice on loaders over time, and the measured cost of a worker."""

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.support.values import some

from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderFacts, WorkerCost
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon import worker_cost
from torchperfd_daemon.observer.loader_adviser import LoaderAdviser, LoaderSample

MS = 1e-3
WINDOW, REMEMBERED = 10, 32


@dataclass(frozen=True)
class Loop:
    """A training loop, by what its parts take in seconds, one observation a second.

    Attributes:
        making: A batch.
        rest: The rest of a step.
        computes: The share of making a batch that is CPU time.
        noise: The standard deviation of the logarithm of what a second's steps take.
        busy: The share of time in which other programs make everything take twice as long.
    """

    making: float
    rest: float
    computes: float = 0.05
    cpus: float = 4.0
    workers: int = 0
    noise: float = 0.25
    busy: float = 0.0

    def samples(self, seconds: int, seed: int) -> Iterator[LoaderSample]:
        """Yield the newest window of each second, and the client's means over its newest samples."""
        random = np.random.default_rng(seed)
        window: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        used: deque[tuple[float, float, float]] = deque(maxlen=REMEMBERED)
        others = 1.0
        for second in range(seconds):
            if self.busy and second % 15 == 0:
                others = 2.0 if random.random() < self.busy else 1.0
            crowd = others * random.lognormal(0, self.noise)
            making = self.making * (1 + self.computes * (crowd - 1)) * random.lognormal(0, self.noise / 4)
            rest = self.rest * crowd
            data = max(0.3 * MS, making / self.workers - rest) if self.workers else making
            window.append((rest + data, data))
            queued = max(0.0, 1 - 1 / crowd)
            used.append((self.computes * random.lognormal(0, 0.1), queued, 0.4 * MS * crowd))
            if len(window) < 3:
                continue
            step, waited = np.mean(window, axis=0)
            cpu, queued, receive = np.mean(used, axis=0)
            facts = LoaderFacts(
                workers=self.workers,
                cpus=self.cpus,
                draw_cpu=None if self.workers else min(1.0, cpu),
                rest_cpus=1.0,
                batch_tensors=2,
                batch_bytes=400_000,
                receive_seconds=receive if self.workers else None,
                worker_cpu_seconds=cpu * self.making if self.workers else None,
                worker_queued=queued / 4 if self.workers else None,
                batches_per_step=1.0,
                queued=queued,
            )
            yield LoaderSample(0, facts, float(step), float(waited))


LOOPS = {
    "waits": Loop(64 * MS, 12 * MS),
    "waits-busy": Loop(64 * MS, 12 * MS, busy=0.3, cpus=2.0),
    "computes": Loop(60 * MS, 25 * MS, computes=1.0, cpus=8.0),
    "computes-busy": Loop(60 * MS, 25 * MS, computes=1.0, cpus=8.0, busy=0.3),
    "half": Loop(40 * MS, 15 * MS, computes=0.5),
    "two-cpus": Loop(30 * MS, 20 * MS, computes=1.0, cpus=2.0),
    "workers": Loop(90 * MS, 10 * MS, workers=2),
    "little": Loop(4 * MS, 60 * MS),
    "very-noisy": Loop(64 * MS, 12 * MS, noise=0.5),
}


def followed(adviser: LoaderAdviser, samples: Iterator[LoaderSample]) -> list[SettledAdvice]:
    """Return what was published, each change once."""
    published: list[SettledAdvice] = []
    for sample in samples:
        adviser.observe([sample])
        if adviser.published is not None and adviser.published not in published[-1:]:
            published.append(adviser.published)
    return published


def adviser() -> LoaderAdviser:
    return LoaderAdviser(lambda: UNMEASURED_COST)


def number(settled: SettledAdvice) -> tuple[str, int]:
    return (settled.advice.rule, settled.advice.workers) if settled.advice else ("", 0)


@pytest.mark.parametrize("name", LOOPS)
def test_steady_loop_of_ten_minutes_has_one_number(name: str) -> None:
    changes = {}
    for seed in range(8):
        published = followed(adviser(), LOOPS[name].samples(600, seed))
        assert published
        changes[seed] = sum(number(a) != number(b) for a, b in pairwise(published))
    assert sum(changes.values()) == 0, changes


@pytest.mark.parametrize("name", ["waits", "half", "workers", "very-noisy"])
def test_items_twice_as_slow_are_followed_within_a_minute(name: str) -> None:
    loop = LOOPS[name]
    for seed in range(4):
        followed_by = adviser()
        followed(followed_by, loop.samples(200, seed))
        before = some(followed_by.published)
        slower = replace(loop, making=2 * loop.making)
        followed(followed_by, slower.samples(62, seed))
        after = some(followed_by.published)
        assert after.step_seconds > 1.3 * before.step_seconds, seed
        assert some(after.advice).workers >= some(before.advice).workers


def test_faster_items_are_followed_as_well() -> None:
    loop, kept = LOOPS["waits"], adviser()
    followed(kept, loop.samples(200, 1))
    followed(kept, replace(loop, making=loop.making / 4).samples(62, 1))
    assert some(kept.published).data_seconds < 30 * MS


def test_advice_before_enough_samples_is_settled_on_request() -> None:
    """At the end of a run, and when a capture is made, there is one number, and it stays."""
    samples, kept = [*LOOPS["waits"].samples(300, 3)], adviser()
    for sample in samples[:2]:
        kept.observe([sample])
    assert kept.published is None
    assert kept.advise(samples[0].facts, 1.0, 0.9, on_device=False) is None
    assert kept.settle() is None, "a window has three samples"
    for sample in samples[2:5]:
        kept.observe([sample])
    assert kept.published is None
    settled = some(kept.settle())
    assert settled.advice is not None
    assert kept.settle() is settled
    assert number(followed(kept, iter(samples[5:]))[-1]) == number(settled)


def test_adviser_without_a_loader_has_nothing_to_say() -> None:
    kept = adviser()
    kept.observe([])
    assert kept.settle() is None


def test_advice_is_on_the_rank_that_waits_longest() -> None:
    loop, kept = LOOPS["waits"], adviser()
    alike = zip(loop.samples(60, 1), loop.samples(60, 2), strict=True)
    for own, other in alike:
        kept.observe([own, replace(other, rank=1)])
    assert kept.published is not None
    first = kept.published
    for own, other in zip(
        loop.samples(62, 3), replace(loop, making=3 * loop.making).samples(62, 4), strict=True
    ):
        kept.observe([own, replace(other, rank=1)])
    assert kept.published.rank == 1
    assert kept.published.data_seconds > 1.5 * first.data_seconds


def test_another_number_of_workers_in_effect_begins_anew() -> None:
    loop, kept = LOOPS["waits"], adviser()
    followed(kept, loop.samples(60, 1))
    assert kept.published is not None
    kept.observe([next(LOOPS["workers"].samples(3, 1))])
    assert kept.published is None


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
    measured = some(worker_cost.measure_in_process())
    cost, _ = measured
    assert 0 < cost.receiving(2, 1 << 20) < 1
    assert 0 < cost.sending(2, 1 << 20) < 1
