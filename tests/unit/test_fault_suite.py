"""The fault suite's plans, the jobs' own measurements, and the scoring of answers."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import psutil
import pytest
import torch
from benchmarks.faults import catalog, journal, peers, report
from benchmarks.faults.__main__ import MAX_RUNS, numbers, run_alone
from benchmarks.faults.arms import ARMS, NAMED, USUAL
from benchmarks.faults.catalog import FAULTS, HANG, Plan
from benchmarks.faults.figures import figures
from benchmarks.faults.injection import END_FILE
from benchmarks.faults.injections import HOGS, injection_of
from benchmarks.faults.journal import Journal, Measured, Step
from benchmarks.faults.neighbours import Neighbours, own_seconds
from benchmarks.faults.quota import Quota
from benchmarks.faults.scoring import SILENT, confusion, macro_f1, mark, right_rank
from benchmarks.faults.trial import Answer, Prediction, Standstill, Trial
from benchmarks.judge import missed
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.diagnosis.verdict import Cause

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "faults.txt"
BURN = "import time\nwhile time.process_time() < 1: pass"
CLASSES = ("none", "input-bound", "slow rank", HANG)
pairs = st.dictionaries(
    st.tuples(st.sampled_from(CLASSES), st.sampled_from((*CLASSES, SILENT))),
    st.integers(min_value=1, max_value=9),
    max_size=12,
)


def plan_of(name: str, seed: int = 1, model: str = "mlp-ddp") -> Plan:
    return catalog.plan(NAMED[name], model, seed)


def answer(after_onset: float, cause: str, rank: int | None = None, cost: float = 0.0) -> Answer:
    return Answer(after_onset, cause, rank, cost, "in words")


def trial_of(name: str, answers: Sequence[Answer], injected: float = 0.02, change: float = 0.03) -> Trial:
    return Trial(plan_of(name), Measured(0.05, 0.05 + change, injected, change), tuple(answers))


def steps_of(durations: Sequence[int], injected: Sequence[int]) -> list[Step]:
    ends = [sum(durations[: place + 1]) for place in range(len(durations))]
    return [
        Step(place, ends[place] - lasts, lasts, took)
        for place, (lasts, took) in enumerate(zip(durations, injected, strict=True))
    ]


def test_development_and_held_out_jobs_share_no_seed_or_model() -> None:
    assert not set(catalog.DEVELOPMENT_SEEDS) & set(catalog.HELD_OUT_SEEDS)
    assert not set(catalog.DEVELOPMENT_MODELS) & set(catalog.HELD_OUT_MODELS)
    assert catalog.split(1, "mlp-ddp") == "development"
    assert catalog.split(501, "mlp-fsdp2") == "held out"
    assert catalog.split(501, "mlp-ddp") == "mixed"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seed_fixes_a_job_and_its_label_is_possible(fault: catalog.Fault, tmp_path: Path) -> None:
    assert fault.cause in {cause.value for cause in Cause}
    drawn = [catalog.plan(fault, "mlp-ddp", seed) for seed in range(30)]
    assert drawn == [catalog.plan(fault, "mlp-ddp", seed) for seed in range(30)]
    assert drawn == [Plan.from_dict(plan.to_dict()) for plan in drawn]
    for plan in drawn:
        assert len(set(plan.culprits)) == fault.culprits
        assert all(0 <= rank < plan.ranks for rank in plan.culprits)
        assert sum(plan.has_fault(rank) for rank in range(plan.ranks)) == (fault.culprits or plan.ranks)
    assert len({plan.onset for plan in drawn}) > 1
    assert len({plan.culprits for plan in drawn}) > (
        0 if fault.last_culprit == 0 or not fault.culprits else 1
    )
    assert injection_of(drawn[0], 0, tmp_path).take_spent_ns() == 0


def test_each_fault_has_each_seed_once_on_possible_models() -> None:
    chosen = catalog.plans(list(FAULTS), [1, 2], ["mlp-ddp", "transformer-fsdp2", "mlp-pp"])
    assert Counter((plan.fault, plan.seed) for plan in chosen) == {
        (fault.name, seed): 1 for fault in FAULTS for seed in (1, 2)
    }
    assert {plan.model for plan in chosen} == {"mlp-ddp", "transformer-fsdp2", "mlp-pp"}
    assert all(plan.model == "mlp-ddp" for plan in chosen if NAMED[plan.fault].replicated_only)
    assert all(plan.model == "mlp-pp" for plan in chosen if NAMED[plan.fault].pipelines_only)
    assert all(plan.model != "mlp-pp" for plan in chosen if NAMED[plan.fault].whole_only)
    assert not catalog.plans([NAMED["slow collective"]], [1], ["mlp-fsdp2", "mlp-pp"])
    assert not catalog.plans([NAMED["unbalanced pipeline"]], [1], ["mlp-ddp"])


def test_hang_has_the_line_of_its_culprit() -> None:
    job = (ROOT / "benchmarks" / "faults" / "job.py").read_text().splitlines()
    calls = {
        name: job[plan_of(name).hang_line - 1].strip().split("(")[0] for name in NAMED if NAMED[name].hangs
    }
    assert {name: call for name, call in calls.items() if plan_of(name).hang_line} == {
        "skipped collective": "dist.barrier",
        "mismatched collective": "dist.all_gather",
        "dead worker": "yield batches.get",
    }
    assert plan_of("stopped rank").hang_line == 0
    assert plan_of("healthy").hang_line == 0


def test_fault_affects_its_culprit_from_onset_and_times_itself(tmp_path: Path) -> None:
    plan = replace(plan_of("slow compute, one rank"), culprits=(2,), onset=5, seconds=0.002)
    culprit, other = injection_of(plan, 2, tmp_path), injection_of(plan, 1, tmp_path)
    spent = {}
    for step in (4, 5, 6):
        for rank, injection in ((2, culprit), (1, other)):
            injection.begin(step)
            injection.load(step)
            injection.compute()
            injection.finish()
            spent[rank, step] = injection.take_spent_ns()
    assert [place for place, ns in spent.items() if ns] == [(2, 5), (2, 6)]
    assert spent[2, 5] >= 2_000_000
    assert culprit.take_spent_ns() == 0


def test_a_fault_that_is_ended_strikes_no_more(tmp_path: Path) -> None:
    plan = replace(plan_of("slow compute, one rank"), culprits=(2,), onset=5, seconds=0.002)
    injection = injection_of(plan, 2, tmp_path)
    for step, spends in ((5, True), (6, True), (7, False), (8, False)):
        if step == 7:
            (tmp_path / END_FILE).touch()
        injection.begin(step)
        injection.compute()
        assert bool(injection.take_spent_ns()) == spends


def test_hogs_end_with_their_fault_and_free_all_cpus(tmp_path: Path) -> None:
    injection = injection_of(replace(plan_of("CPU hog"), culprits=(0,), onset=0), 0, tmp_path)
    allowed = os.sched_getaffinity(0)
    others = set(psutil.Process().children())
    injection.prepare(torch.nn.Identity())
    try:
        injection.begin(0)
        injection.finish()
        hogs = set(psutil.Process().children()) - others
        assert len(hogs) == HOGS
        assert os.sched_getaffinity(0) == {max(allowed)}
    finally:
        injection.end()
    assert not any(hog.is_running() for hog in hogs)
    assert os.sched_getaffinity(0) == allowed


def test_a_fault_grows_with_the_steps_that_it_strikes(tmp_path: Path) -> None:
    plan = replace(plan_of("slow compute, one rank"), onset=40, seconds=0.01)
    for lasted, seconds in ((0.02, 0.01), (0.32, 0.04)):
        injection = injection_of(plan, 0, tmp_path)
        for step in range(40):
            injection.begin(step)
            injection.learn(round((lasted if step >= 10 else 5.0) * 1e9))
        injection.begin(40)
        injection.learn(10**12)
        assert injection.seconds == pytest.approx(seconds)


def test_the_collector_runs_as_long_as_planned(tmp_path: Path) -> None:
    plan = replace(plan_of("garbage collection"), culprits=(0,), onset=0, seconds=0.001)
    injection = injection_of(plan, 0, tmp_path)
    injection.begin(0)
    injection.compute()
    assert injection.take_spent_ns() >= 1_000_000


@pytest.mark.parametrize("fault", ["skipped collective", "mismatched collective"])
def test_only_a_culprit_leaves_the_average_out(fault: str, tmp_path: Path) -> None:
    plan = replace(plan_of(fault), culprits=(1,), onset=3)
    for rank, step, said in ((1, 2, ""), (1, 3, fault), (0, 3, "")):
        injection = injection_of(plan, rank, tmp_path)
        injection.begin(step)
        assert injection.in_place_of_average(step) == said


def test_journal_is_read_as_written_without_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    with Journal(path) as written:
        for step in range(3):
            written.begin()
            written.end(step, step * 10)
    with path.open("ab") as file:
        file.write(b"3 1700000000")
    steps = journal.read(path)
    assert [(step.step, step.injected_ns) for step in steps] == [(0, 0), (1, 10), (2, 20)]
    assert all(step.began_ns > 1_600_000_000 * 10**9 and step.duration_ns > 0 for step in steps)
    assert journal.read(tmp_path / "none.log") == []


def test_onset_is_the_step_start_or_the_previous_end() -> None:
    ranks = {0: [Step(6, 1_000, 500, 0)], 1: [Step(6, 1_200, 500, 0)]}
    assert journal.onset_unix(ranks, 7) == 1_500 / 1e9
    assert journal.onset_unix({**ranks, 2: [Step(7, 1_550, 1, 0)]}, 7) == 1_550 / 1e9
    assert journal.onset_unix(ranks, 9) is None


@given(
    before=st.lists(st.integers(1, 10**6), min_size=40, max_size=60),
    after=st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=40, max_size=60),
    period=st.integers(1, 10),
)
def test_a_job_s_measurement_is_that_of_a_recomputation(
    before: list[int], after: list[tuple[int, int]], period: int
) -> None:
    onset = len(before)
    first = steps_of([*before, *(each for each, _ in after)], [0] * onset + [each for _, each in after])
    twice = [replace(step, injected_ns=2 * step.injected_ns) for step in first]
    ahead = [*first, Step(len(first), 0, 10**9, 10**9)]  # the other two have not ended this one
    found = journal.measure({0: ahead, 1: twice, 2: first}, onset, period)

    def usual(durations: list[int]) -> float:
        means = []
        while len(durations) >= period:
            means.append(fmean(durations[:period]))
            durations = durations[1:]
        return median(means)

    assert found.before == pytest.approx(usual(before[20:]) / 1e9)
    assert found.after == pytest.approx(usual([each for each, _ in after[20:]]) / 1e9)
    assert found.injected == pytest.approx(2 * usual([each for _, each in after[20:]]) / 1e9)
    assert found.change == found.after - found.before
    assert found.grown == pytest.approx((fmean(each for each, _ in after[20:]) - fmean(before[20:])) / 1e9)


@given(
    well=st.lists(st.integers(1, 10**6), min_size=30, max_size=50),
    ill=st.lists(st.integers(1, 10**6), min_size=30, max_size=50),
    healed=st.lists(st.integers(1, 10**6), min_size=30, max_size=50),
)
def test_fault_free_step_time_is_midway_of_before_and_after(
    well: list[int], ill: list[int], healed: list[int]
) -> None:
    """Without the fault, a step would take the mean of the times before and after it."""
    onset, end = len(well), len(well) + len(ill)
    steps = steps_of([*well, *ill, *healed], [0] * onset + ill + [0] * len(healed))
    found = journal.measure({0: steps, 1: steps}, onset, 1, (steps[end].began_ns - 0.5) / 1e9)
    usual = [median(part) / 1e9 for part in (well[20:], ill[20:], healed[20:])]
    assert [found.before, found.after, found.healed] == pytest.approx(usual)
    assert found.injected == pytest.approx(usual[1])
    assert found.without == pytest.approx((usual[0] + usual[2]) / 2)
    assert found.drift == pytest.approx(abs(usual[2] - usual[0]) / found.without)
    assert found.change == pytest.approx(usual[1] - found.without)
    means = [fmean(part) / 1e9 for part in (well[20:], ill[20:], healed[20:])]
    assert found.grown == pytest.approx(means[1] - (means[0] + means[2]) / 2, abs=1e-12)


def test_fault_ended_too_late_has_no_result_after_it() -> None:
    steps = steps_of([10] * 100, [0] * 100)
    for end in (80, 99):
        found = journal.measure({0: steps, 1: steps}, 40, 20, steps[end].began_ns / 1e9)
        assert (found.healed, found.drift, found.without) == (None, 0.0, found.before)
    never = journal.measure({0: steps, 1: steps}, 40, 20, 1.0)
    assert never == journal.measure({0: steps, 1: steps}, 40, 20)


@given(pairs)
def test_macro_f1_is_that_of_precision_and_recall(counts: dict[tuple[str, str], int]) -> None:
    flat = [pair for pair, count in counts.items() for _ in range(count)]
    scores = []
    for cause in {cause for pair in flat for cause in pair}:
        said = [pair for pair in flat if pair[1] == cause]
        true = [pair for pair in flat if pair[0] == cause]
        hits = sum(pair == (cause, cause) for pair in flat)
        precision, recall = hits / len(said) if said else 0.0, hits / len(true) if true else 0.0
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    found = macro_f1(Counter(counts))
    assert found == pytest.approx(fmean(scores)) if scores else found != found


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.sampled_from((None, 0, 1))), max_size=12))
def test_answer_is_right_from_the_last_wrong_one_on(
    said: list[tuple[str, int | None]],
) -> None:
    answers = [answer(place - 3.0, cause, rank) for place, (cause, rank) in enumerate(said)]
    plan = replace(plan_of("slow compute, one rank"), culprits=(1,))
    own = mark(Trial(plan, Measured(0.05, 0.07, 0.02, 0.02), tuple(answers)))
    lasting = [
        place for place in range(3, len(said)) if all(each == ("slow rank", 1) for each in said[place:])
    ]
    assert own.seconds == (lasting[0] - 3.0 if lasting else None)
    assert own.answered == (said[-1][0] if said else SILENT)
    assert own.right_rank == bool(said and said[-1][1] == 1)


def test_other_tools_answers_are_translated_to_our_causes() -> None:
    late = {"type": "rank_comparison", "median": {"rank": 0}, "worst": {"rank": 2, "value_ms": 9.0}}
    for kind, evidence, creep, said in (
        ("INPUT_STRAGGLER", late, "BALANCED", ("input-bound", 2)),
        ("STRAGGLER", {"comparisons": [late]}, "BALANCED", ("slow rank", 2)),
        ("INPUT_BOUND", {"type": "phase_share"}, "CREEP_EARLY", ("input-bound", None)),
        ("COMPUTE_BOUND", {"type": "phase_share"}, "CREEP_CONFIRMED", ("memory pressure", None)),
        ("NO_CLEAR_PERFORMANCE_BOTTLENECK", {}, "BALANCED", ("none", None)),
        ("INSUFFICIENT_STEP_TIME_DATA", {}, "NO_DATA", ("unknown", None)),
    ):
        summary = {
            "primary_diagnosis": {"kind": kind, "evidence": evidence},
            "step_memory": {"diagnosis": {"kind": creep}},
        }
        found = peers.answer(summary, 31.0)
        assert (found.cause, found.rank, found.cost, found.after_onset) == (*said, None, 31.0)


def test_any_of_two_culprits_is_right_and_none_if_all_alike() -> None:
    two = replace(plan_of("slow compute, two ranks"), culprits=(1, 3))
    assert [right_rank(two, rank) for rank in (0, 1, 2, 3, None)] == [False, True, False, True, False]
    everybody = plan_of("slow loader, all ranks")
    assert [right_rank(everybody, rank) for rank in (0, None)] == [False, True]


def test_cost_is_compared_with_the_job_if_the_cause_is_right() -> None:
    """A cost is checked against what the job measured, only where the cause is right."""
    rank = plan_of("slow compute, one rank").culprits[0]
    right = mark(trial_of("slow compute, one rank", [answer(5, "slow rank", rank, cost=0.022)]))
    assert right.cost == 0.02
    assert right.cost_error == pytest.approx(0.1)
    wrong = mark(trial_of("slow compute, one rank", [answer(5, "none", cost=0.022)]))
    assert wrong.cost_error is None
    hog = mark(trial_of("CPU hog", [answer(5, "CPU contention", 0, cost=0.015)], injected=0.0))
    assert hog.cost == 0.03
    assert hog.cost_error == pytest.approx(-0.5)
    leak = mark(trial_of("memory leak", [answer(5, "memory pressure", 0)]))
    assert (leak.cost, leak.cost_error) == (None, None)


@pytest.mark.parametrize(("device", "grown", "cost"), [("cpu", 0.008, 0.02), ("simulated", 0.008, 0.008)])
def test_cost_beside_a_device_is_at_most_the_growth(device: str, grown: float, cost: float) -> None:
    """A device works through what is queued while its host is delayed."""
    rank = plan_of("garbage collection").culprits[0]
    trial = trial_of("garbage collection", [answer(5, "garbage collection", rank, cost=0.02)], change=grown)
    assert mark(replace(trial, plan=replace(trial.plan, device=device))).cost == cost


def test_hang_line_counts_where_it_is_given() -> None:
    plan = plan_of("skipped collective")
    reported = f"rank 2 waits in barrier (job.py:{plan.hang_line} in average)"
    wrong = f"rank 2 waits in barrier (job.py:{plan.hang_line}1 in average)"
    for evidence, hit in ((reported, True), (wrong, False)):
        said = Answer(11.0, HANG, plan.culprits[0], 11.0, evidence)
        own = mark(
            Trial(
                plan, Measured(0.05, 0.0, 0.0, 0.0), (said,), Standstill(plan.culprits, (plan.hang_line, 7))
            )
        )
        assert (own.right_cause, own.right_rank, own.line) == (True, True, hit)
        assert (own.stacks_rank, own.stacks_line) == (True, True)
    elsewhere = Standstill((), ())
    own = mark(Trial(plan, Measured(0.05, 0.0, 0.0, 0.0), (answer(11, "none"),), elsewhere))
    assert (own.right_cause, own.line, own.stacks_rank, own.stacks_line) == (False, False, False, False)
    assert mark(trial_of("stopped rank", [answer(11, HANG, 0)])).line is None


def predicted(name: str, *predictions: Prediction, before: float = 0.05) -> float | None:
    trial = replace(trial_of(name, []), measured=Measured(before, 0.08, 0.03, 0.03), predictions=predictions)
    return mark(trial).whatif_error


def test_whatif_is_compared_with_the_step_before_the_fault() -> None:
    culprit = plan_of("slow loader, one rank").culprits[0]
    right = Prediction("rank excess", culprit, "data", 0.052)
    other = Prediction("rank excess", culprit + 1, "data", 0.04)
    assert predicted("slow loader, one rank", right, other) == pytest.approx(0.002 / 0.08)
    # What is not predicted to become shorter stays as it is.
    assert predicted("slow loader, one rank", other) == pytest.approx(0.03 / 0.08)
    everyones = (Prediction("phase", None, "data", 0.049), Prediction("phase", None, "checkpoint", 0.079))
    assert predicted("slow loader, all ranks", *everyones) == pytest.approx(-0.001 / 0.08)
    assert predicted("slow loader, one rank") is None
    assert predicted("memory leak", right) is None
    found = figures_of([replace(trial_of("slow loader, one rank", []), predictions=(right,))] * 2)
    assert found["what-if within 5 % of the step"] == 1.0
    assert found["median error of what-if"] == pytest.approx(0.002 / 0.08)


def suite() -> list[Trial]:
    """Return made-up trials: two healthy, five slow, one hang, one that failed."""
    loader, slow = plan_of("slow loader, one rank"), plan_of("slow compute, one rank")
    hang, matmuls = plan_of("skipped collective"), plan_of("slow matmuls, one rank")
    return [
        trial_of("healthy", [answer(0, "unknown"), answer(1, "unknown", None, 0.02), answer(2, "none")]),
        trial_of("healthy", [answer(1, "none"), answer(2, "slow rank", 1)]),
        trial_of("slow loader, one rank", [answer(4, "input-bound", loader.culprits[0], 0.021)]),
        trial_of("slow loader, one rank", [answer(4, HANG, 0), answer(12, "slow rank", None, 0.021)]),
        trial_of("slow compute, one rank", [answer(11, "slow rank", slow.culprits[0], 0.03)]),
        trial_of("slow loader, all ranks", []),
        Trial(
            hang,
            Measured(0.05, 0.0, 0.0, 0.0),
            (Answer(12.0, HANG, hang.culprits[0], 12.0, f"job.py:{hang.hang_line}"),),
            Standstill(hang.culprits, (hang.hang_line,)),
        ),
        replace(trial_of("CPU hog", []), failure="the job ended with 1: RuntimeError"),
        replace(
            trial_of("slow matmuls, one rank", [answer(3, "slow rank", matmuls.culprits[0], 0.02)]),
            predictions=(Prediction("rank excess", matmuls.culprits[0], "forward", 0.051),),
        ),
    ]


def figures_of(trials: Sequence[Trial]) -> dict[str, float]:
    return {each.name: each.value for each in figures(ARMS[USUAL], trials)}


def test_what_a_suite_comes_to() -> None:
    assert figures_of(suite()) == {
        "macro-F1 over 4 classes": pytest.approx(17 / 30),
        "culprit rank named": 4 / 5,
        "healthy jobs blamed": 1 / 2,
        "moments of healthy jobs blamed": 2 / 5,
        "jobs with a fault, answered none": 0,
        "stragglers: rank named within 10 s": 2 / 4,
        "cause and rank right within 10 s": 2 / 5,
        "median time until lastingly right": 7.5,
        "cost within 10 % of the injected": 2 / 3,
        "median error of the cost": pytest.approx(0.05),
        "what-if within 5 % of the step": 1,
        "median error of what-if": pytest.approx(0.0125),
        "hang: culprit named by the verdict": 1,
        "hang: culprit named within 10 s": 0,
        "hang: line in the verdict": 1,
        "hang: culprit apart in the stacks": 1,
        "hang: line in the stacks": 1,
        "jobs wrongly reported as hanging": 1,
    }
    hangs = [trial for trial in suite() if trial.plan.cause == HANG]
    soon = [replace(trial, answers=(replace(trial.answers[0], after_onset=9.5),)) for trial in hangs]
    assert figures_of(soon)["hang: culprit named within 10 s"] == 1
    ran = [mark(trial) for trial in suite() if not trial.failure]
    assert confusion(ran)["input-bound", SILENT] == 1
    assert confusion(ran).total() == 8


def test_trial_result_survives_json() -> None:
    for trial in suite():
        assert Trial.from_dict(trial.to_dict()) == trial


def test_the_report_is_the_golden_file() -> None:
    text = "\n".join(
        [report.head(), *map(report.line, suite()), "", report.summary("development", ARMS[USUAL], suite())]
    )
    assert f"{text}\n" == GOLDEN.read_text()


def test_missed_bounds_are_listed_and_untried_ones_are_not() -> None:
    assert missed(figures(ARMS[USUAL], suite())) == [
        "macro-F1 over 4 classes: 0.57, wanted >= 0.95",
        "culprit rank named: 80%, wanted >= 98 %",
        "healthy jobs blamed: 50%, wanted <= 1 %",
        "stragglers: rank named within 10 s: 50%, wanted >= 98 %",
        "cost within 10 % of the injected: 67%, wanted all",
        "jobs wrongly reported as hanging: 1, wanted 0",
    ]
    assert missed(figures(ARMS[USUAL], [])) == []


def test_a_list_of_seeds() -> None:
    assert numbers("1-3,7") == [1, 2, 3, 7]


def test_a_quota_is_written_as_each_version_wants_it(tmp_path: Path) -> None:
    for version, limits in ((1, {"cpu.cfs_quota_us": "10000"}), (2, {"cpu.max": "10000 100000"})):
        root = tmp_path / str(version)
        root.mkdir()
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu")
        quota = Quota("faults", root)
        quota.path.mkdir(parents=True)
        quota.limit(0.1)
        assert {file.name: file.read_text() for file in quota.path.iterdir()} == limits
        quota.lift()
        unlimited = {"cpu.cfs_quota_us": "-1"} if version == 1 else {"cpu.max": "max 100000"}
        assert {file.name: file.read_text() for file in quota.path.iterdir()} == unlimited


@pytest.mark.parametrize(("taken", "runs"), [((0.0,), 1), ((0.2, 0.01), 2), ((0.2, 0.3, 0.4), MAX_RUNS)])
def test_a_job_that_others_disturbed_is_run_again(
    taken: tuple[float, ...], runs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [replace(trial_of("slow loader, one rank", []), others=share) for share in taken]
    left = iter(trials)
    assert run_alone(trials[0].plan, lambda _plan: next(left)) is trials[-1]
    reported = capsys.readouterr().out.splitlines()
    assert len(reported) == runs - 1
    assert all("again: others took 20% of the processors" in line for line in reported[:1])


def test_job_on_a_machine_that_changed_speed_is_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    drifted, steady = (
        replace(trial_of("slow loader, one rank", []), measured=Measured(0.08, 0.12, 0.03, 0.03, healed))
        for healed in (0.1, 0.082)
    )
    left = iter([drifted, steady])
    assert run_alone(drifted.plan, lambda _plan: next(left)) is steady
    assert "steps without the fault took 80 ms before it and 100 after it" in capsys.readouterr().out


def test_cpu_of_an_orphan_is_others_and_of_a_child_is_not() -> None:
    """CPU time of an orphan counts as that of other processes, CPU time of a child does not."""
    began, neighbours = time.monotonic(), Neighbours()
    # The shell ends at once, and the orphan is init's; the pipe is open until it has ended as well.
    subprocess.run(["sh", "-c", f"'{sys.executable}' -c '{BURN}' &"], stdout=subprocess.PIPE, check=True)
    processors = psutil.cpu_count() or 1
    assert neighbours.share() * processors * (time.monotonic() - began) > 0.7
    own = own_seconds()
    with subprocess.Popen([sys.executable, "-c", BURN]) as child:
        child.wait()
    assert 0.9 < own_seconds() - own < 5
