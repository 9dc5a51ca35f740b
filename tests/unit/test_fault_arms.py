"""The arms of the fault suite: their jobs, injections and bounds."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.faults import arms, catalog, journal, report
from benchmarks.faults.arms import ARMS, BUSY, CAUSES, CONTROLS, NAMED
from benchmarks.faults.catalog import Plan
from benchmarks.faults.figures import figures
from benchmarks.faults.injection import BATCH, END_FILE
from benchmarks.faults.injections import injection_of
from benchmarks.faults.journal import Measured, Step
from benchmarks.faults.scoring import mark
from benchmarks.faults.trial import Answer, Trial, busy
from benchmarks.judge import missed

from torchperfd_daemon.diagnosis.verdict import Cause

OF_THE_MACHINE = frozenset({"CPU hog", "CPU quota", "pinned", "more threads than CPUs"})
UNEVEN = ("uneven work, rotating", "uneven work, lognormal", "uneven work, by length")


def plan_of(name: str, seed: int = 1) -> Plan:
    return catalog.plan(NAMED[name], "mlp-ddp", seed)


def trial_of(name: str, cause: str, cost: float = 0.03, *, hogs: int = 0) -> Trial:
    plan = replace(plan_of(name), hogs=hogs)
    rank = plan.culprits[0] if plan.culprits else None
    return Trial(plan, Measured(0.08, 0.11, 0.02, 0.03, 0.08), (Answer(9.0, cause, rank, cost, ""),))


@pytest.mark.parametrize("fault", [*CAUSES, *CONTROLS], ids=lambda fault: fault.name)
def test_arm_job_is_fixed_by_seed_and_has_an_injection(fault: catalog.Fault, tmp_path: Path) -> None:
    assert fault.cause in {cause.value for cause in Cause}
    drawn = [catalog.plan(fault, "mlp-ddp", seed) for seed in range(10)]
    assert drawn == [catalog.plan(fault, "mlp-ddp", seed) for seed in range(10)]
    assert drawn == [Plan.from_dict(plan.to_dict()) for plan in drawn]
    assert ({plan.onset for plan in drawn} == {0}) == fault.from_start
    assert all(plan.ranks == fault.ranks for plan in drawn if fault.ranks)
    assert injection_of(drawn[0], 0, tmp_path).take_spent_ns() == 0


def test_names_of_faults_are_unique_in_each_arm() -> None:
    for arm in ARMS.values():
        names = [fault.name for fault in arm.faults]
        assert len(set(names)) == len(names)


def test_controls_are_forty_jobs_with_nothing_wrong() -> None:
    chosen = catalog.plans(list(CONTROLS), [1, 2, 3], ["mlp-ddp", "transformer-fsdp2"])
    assert len(chosen) >= 40
    assert {plan.cause for plan in chosen} == {"none"}
    assert not any(fault.costs for fault in CONTROLS)


def test_busy_jobs_share_the_machine_and_can_be_fixed() -> None:
    assert all(fault.costs for fault in BUSY)
    assert OF_THE_MACHINE.isdisjoint(fault.name for fault in BUSY)
    plan = ARMS["busy"].on(plan_of("slow loader, one rank"))
    assert plan.hogs == arms.BUSY_PROCESSES
    assert plan.onset == plan_of("slow loader, one rank").onset // 2
    assert ARMS["causes"].on(plan) == plan


def test_busy_processes_end_with_the_job() -> None:
    before = set(psutil.Process().children())
    with busy(2):
        hogs = set(psutil.Process().children()) - before
        assert len(hogs) == 2
    assert not any(hog.is_running() for hog in hogs)


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_work_keeps_its_sum_and_costs_its_excess(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_of(name), onset=1_000, seconds=0.03)
    spent: dict[int, list[list[float]]] = {0: [], 1: []}
    for rank in range(plan.ranks):
        injection = injection_of(plan, rank, tmp_path)
        works: list[float] = []
        monkeypatch.setattr(injection, "work", works.append)
        injection.prepare(torch.nn.Identity())
        for step in range(2_000):
            injection.begin(step)
            injection.compute()
        for part in (0, 1):
            spent[part].append(works[1_000 * part :][:1_000])
    for part, excess in ((0, 0.0), (1, 0.03)):
        by_step = list(zip(*spent[part], strict=True))
        more = statistics.fmean(max(step) - statistics.fmean(step) for step in by_step)
        assert more == pytest.approx(excess, rel=0.1, abs=1e-9)
    means = [statistics.fmean(map(statistics.fmean, spent[part])) for part in (0, 1)]
    assert means[1] == pytest.approx(means[0], rel=0.1)


def test_batches_are_as_long_as_their_work_by_length(tmp_path: Path) -> None:
    plan = replace(plan_of("uneven work, by length"), onset=2)
    rows: list[list[int]] = []
    for rank in range(plan.ranks):
        injection = injection_of(plan, rank, tmp_path)
        injection.prepare(torch.nn.Identity())
        rows.append([])
        for step in range(10):
            injection.begin(step)
            rows[-1].append(injection.rows())
    by_step = list(zip(*rows, strict=True))
    assert [len(set(step)) for step in by_step[:2]] == [1, 1]
    assert max(len(set(step)) for step in by_step[2:]) > 1
    assert injection_of(plan_of("healthy"), 0, tmp_path).rows() == BATCH


def test_settings_are_there_from_start_and_are_undone(tmp_path: Path) -> None:
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    states = {
        "pinned": lambda: len(os.sched_getaffinity(0)),
        "anomaly detection": torch.is_anomaly_enabled,
        "more threads than CPUs": torch.get_num_threads,
    }
    wanted = {
        "pinned": (1, len(allowed)),
        "anomaly detection": (True, False),
        "more threads than CPUs": (os.cpu_count(), 1),
    }
    try:
        for name, state in states.items():
            injection = injection_of(plan_of(name), 0, tmp_path)
            injection.prepare(torch.nn.Identity())
            during = state()
            injection.end()
            assert (during, state()) == wanted[name]
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)


def test_worker_pauses_only_during_the_fault(tmp_path: Path) -> None:
    injection = injection_of(replace(plan_of("one slow worker"), onset=3, seconds=0.03), 0, tmp_path)
    injection.prepare(torch.nn.Identity())
    pauses = []
    for step in range(6):
        if step == 5:
            (tmp_path / END_FILE).touch()
        injection.begin(step)
        injection.finish()
        injection.learn(80_000_000)
        pauses.append(injection.worker_pause.value)  # type: ignore[attr-defined]
    assert pauses == pytest.approx([0, 0, 0, 0.33, 0.33, 0])


def test_growing_steps_are_longer_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    injection = injection_of(replace(plan_of("growing steps"), seconds=0.2), 0, tmp_path)
    pauses: list[float] = []
    monkeypatch.setattr(injection, "pause", pauses.append)
    injection.prepare(torch.nn.Identity())
    for step in range(4):
        injection.begin(step)
        injection.compute()
    assert pauses == pytest.approx([0.001, 0.002, 0.003, 0.004])


def steps_of(durations: Sequence[int]) -> list[Step]:
    ends = [sum(durations[: place + 1]) for place in range(len(durations))]
    return [Step(place, ends[place] - lasts, lasts, 0) for place, lasts in enumerate(durations)]


def test_fault_from_start_is_measured_against_its_end() -> None:
    steps = steps_of([10**8] * 100 + [8 * 10**7] * 100)
    found = journal.measure({0: steps}, 0, 20, steps[100].began_ns / 1e9)
    assert (found.before, found.healed, found.without) == (0.0, 0.08, 0.08)
    assert found.change == pytest.approx(0.02)
    assert found.grown == pytest.approx(0.02)
    assert found.drift == 0.0


def test_only_newest_steps_count_of_a_fault_that_grows() -> None:
    grown = [10**8 + place * 10**6 for place in range(200)]
    steps = steps_of(grown + [8 * 10**7] * 100)
    end = steps[200].began_ns / 1e9
    whole = journal.measure({0: steps}, 0, 20, end)
    newest = journal.measure({0: steps}, 0, 20, end, grows=True)
    seconds = journal.NEWEST_SECONDS
    kept = [step.duration_ns for step in steps[:200] if step.began_ns >= steps[199].began_ns - seconds * 1e9]
    assert newest.grown == pytest.approx(statistics.fmean(kept) / 1e9 - 0.08)
    assert newest.grown > whole.grown


def test_cost_on_a_busy_node_is_the_growth() -> None:
    assert mark(trial_of("slow loader, one rank", "input-bound")).cost == 0.02
    assert mark(trial_of("slow loader, one rank", "input-bound", hogs=4)).cost == 0.03
    assert mark(trial_of("uneven work, rotating", "uneven work")).cost == 0.03


def test_arm_score_counts_what_its_bounds_are_about() -> None:
    trials = [
        trial_of("uneven work, rotating", "uneven work", 0.034),
        trial_of("uneven work, rotating", "none"),
        trial_of("interpreter held", "interpreter lock", 0.04),
        trial_of("healthy, epochs", "none"),
        trial_of("healthy, epochs", "slow rank"),
        trial_of("healthy, epochs", "unknown", 0.0),
        replace(trial_of("pinned", "none"), failure="the job ended with 1"),
    ]
    found = {each.name: each.value for each in figures(ARMS["causes"], trials)}
    assert found == {
        "cause is the first verdict": pytest.approx(2 / 3),
        "culprit rank named, of these": 1,
        "cost within 15%, of these": 0.5,
        "median error of the cost": pytest.approx((0.4 / 3 + 1 / 3) / 2),
        "healthy jobs blamed": 1,
        "healthy jobs answered none": 1,
        "jobs with a fault, answered none": 1,
    }
    assert missed(figures(ARMS["causes"], trials)) == [
        "cause is the first verdict: 67%, wanted >= 95 %",
        "cost within 15%, of these: 50%, wanted all",
        "healthy jobs blamed: 1 of 3, wanted 0",
        "jobs with a fault, answered none: 1, wanted 0",
    ]
    busy_figures = figures(ARMS["busy"], trials[:1])
    assert (busy_figures[2].value, missed(busy_figures)) == (1.0, [])
    assert missed(figures(ARMS["busy"], [])) == []


def test_arm_summary_has_a_line_for_each_fault() -> None:
    trials = [
        trial_of("uneven work, rotating", "uneven work", 0.033),
        trial_of("uneven work, rotating", "none"),
        trial_of("healthy, epochs", "none"),
    ]
    lines = report.summary("development", ARMS["causes"], trials).splitlines()
    assert "uneven work, rotating             1 of 2  +10%, -" in lines
    assert "healthy, epochs                   1 of 1  -" in lines
    assert "jobs with a fault, answered none              1   0" in lines
