"""The rule on loader workers, and what evidence of a loader advises."""

from dataclasses import replace
from typing import Any

import pytest
from tests.support.values import some

from torchperfd.model.loader_facts import MAX_WORKERS, LoaderAdvice, LoaderFacts, WorkerCost
from torchperfd.model.process import CpuBinding
from torchperfd.model.source_lines import InputStages
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.remedies import (
    RuleCounsel,
    contention_remedy,
    loader_remedy,
    without_fewer_workers,
)
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import diagnose, rank_causes
from torchperfd_daemon.loader_workers import advise_loader, is_cheap, most_computing_workers

MS = 1e-3
COST = WorkerCost(0.2 * MS, 0.2 * MS, 0.2e-9, 0.2 * MS, 0.15 * MS, 0.5e-9)
"""As measured on two quiet cores: 0.6 ms for a batch of two small tensors."""
TENSORS = LoaderFacts(
    cpus=2.0, draw_cpu=1.0, rest_cpus=1.0, batch_tensors=2, batch_bytes=8448, batch_size=32, shuffles=True
)
WAITS = replace(TENSORS, draw_cpu=0.04)


def advised(facts: LoaderFacts, step_ms: float, data_ms: float) -> LoaderAdvice | None:
    return advise_loader(facts, step_ms * MS, data_ms * MS, COST)


def test_loader_workers_cheap_batches_are_not_advised() -> None:
    """Of 0.57 ms a step 0.19 ms is drawing: with two workers a step takes 1.5 to 2.0 ms."""
    assert advised(TENSORS, 0.57, 0.19) is None
    assert advised(replace(TENSORS, draw_cpu=None, cpus=None), 0.57, 0.19) is None
    assert is_cheap(TENSORS, 0.19 * MS, COST)


def test_loader_workers_costlier_hand_over_raises_the_bar() -> None:
    """Draws of 3 ms in steps of 6 ms pay where a worker costs 0.6 ms, and not where it costs 3 ms."""
    facts = replace(TENSORS, cpus=8.0)
    assert advise_loader(facts, 6 * MS, 3 * MS, COST) is not None
    slow = WorkerCost(1 * MS, 1 * MS, 0.0, 1 * MS, 1 * MS, 0.0)
    assert advise_loader(facts, 6 * MS, 3 * MS, slow) is None


def test_loader_workers_waiting_loader_may_exceed_the_cpus() -> None:
    """It waits 150 ms of each 170 ms step: eight workers on two CPUs were faster than two."""
    advice = some(advised(WAITS, 170, 150))
    assert 4 <= advice.workers <= MAX_WORKERS
    assert "waits rather than computes" in advice.assumes
    assert 0.5 * 150 * MS < advice.saves_seconds < 150 * MS
    assert f"num_workers={advice.workers}, persistent_workers=True" in advice.setting


@pytest.mark.parametrize("rest_cpus", [0.5, 1.0, None])
def test_loader_workers_computing_loader_gets_the_free_cpu(rest_cpus: float | None) -> None:
    advice = some(advised(replace(TENSORS, rest_cpus=rest_cpus), 40, 30))
    assert advice.workers == most_computing_workers(2.0) == 1
    assert advice.saves_seconds <= 10 * MS


def test_loader_workers_busy_cpus_give_no_advice() -> None:
    """Training keeps both CPUs at work for 30 of 40 ms: a worker would take from it what it brings."""
    assert advised(replace(TENSORS, rest_cpus=2.0), 40, 10) is None


@pytest.mark.parametrize(("cpus", "rest_cpus", "workers"), [(2, 1.2, 1), (2, 1.4, 0), (8, 6.9, 1), (8, 3, 3)])
def test_loader_workers_computing_fit_beside_the_threads(cpus: int, rest_cpus: float, workers: int) -> None:
    """Two threads had both CPUs for 8 ms of 18: with a worker a step took 29 to 36 % longer."""
    facts = replace(TENSORS, cpus=float(cpus), rest_cpus=rest_cpus)
    advice = advised(facts, 18, 10)
    assert (advice.workers if advice else 0) == workers
    waiting = advised(replace(facts, draw_cpu=0.04), 18, 10)
    assert waiting is not None, "a loader that waits takes no CPU from the threads"


def test_loader_workers_crowded_cpus_give_no_advice() -> None:
    """Other processes have the CPUs: the training thread stands in line for 80 % of the time it could run."""
    for data in (10, 20, 30):
        assert advised(replace(TENSORS, queued=0.8), 40, data) is None
    quiet, crowded = advised(WAITS, 170, 150), advised(replace(WAITS, queued=0.5), 170, 150)
    assert some(crowded).saves_seconds < some(quiet).saves_seconds


def test_loader_workers_one_core_gives_none() -> None:
    for data in (1, 10, 30, 39):
        assert advised(replace(TENSORS, cpus=1.0), 40, data) is None
    assert advised(replace(TENSORS, cpus=0.5), 40, 30) is None


def test_loader_workers_unknown_cpus_state_the_assumption() -> None:
    advice = some(advised(LoaderFacts(), 40, 30))
    # To make and send a batch takes 30.5 ms, and a step with one at hand 10.6 ms: three keep up.
    assert advice.workers == 4
    assert "assumes 4 free CPUs" in advice.assumes


def test_loader_workers_never_save_more_than_the_wait() -> None:
    for cpus in (1.0, 2.0, 4.0, 64.0):
        for share in (0.0, 0.1, 0.4, 0.6, 1.0):
            for data in (0.01, 0.2, 1, 5, 50, 99):
                advice = advised(replace(TENSORS, cpus=cpus, draw_cpu=share), 100, data)
                if advice is not None:
                    assert 0 < advice.saves_seconds <= data * MS
                    assert share < 0.5 or advice.workers <= cpus


def test_loader_workers_micro_batches_count_each() -> None:
    """Four batches of 30 ms in a step of 160 ms are as one of 30 ms in 40 ms."""
    four = advised(replace(WAITS, batches_per_step=4.0), 160, 120)
    one = advised(WAITS, 40, 30)
    assert four is not None
    assert one is not None
    assert four.workers == one.workers
    assert four.saves_seconds == pytest.approx(4 * one.saves_seconds)


WORKING = replace(WAITS, workers=1, receive_seconds=0.6 * MS, worker_cpu_seconds=1 * MS, worker_queued=0.0)


def test_loader_workers_one_waiting_worker_wants_more() -> None:
    """One worker that waits 30 ms for each batch; the rest of the step takes 8 ms."""
    advice = some(advised(WORKING, 32, 24))
    assert 4 <= advice.workers <= 6
    assert advice.saves_seconds == pytest.approx(23 * MS, rel=0.1)


def test_loader_workers_ready_batches_want_no_more() -> None:
    assert advised(WORKING, 10, 0.7) is None


def test_loader_workers_starved_workers_want_no_more() -> None:
    """Four workers compute on two CPUs: a fifth has none."""
    starved = replace(WORKING, workers=4, worker_cpu_seconds=25 * MS, worker_queued=0.5)
    assert advised(starved, 30, 20) is None


def test_loader_workers_cheap_batches_leave_their_workers() -> None:
    """To take over a batch takes 1.4 ms, to make it 0.35 ms of a worker's time."""
    facts = replace(
        WORKING, workers=2, receive_seconds=1.4 * MS, worker_cpu_seconds=0.35 * MS, indexable=True
    )
    advice = some(advised(facts, 1.8, 1.4))
    assert advice.workers == 0
    assert 0.7 * MS < advice.saves_seconds < 1.05 * MS
    assert advised(replace(facts, worker_cpu_seconds=0.9 * MS), 1.8, 1.4) is None
    # Workers that read files may wait for longer than they compute.
    assert advised(replace(facts, indexable=False), 1.8, 1.4) is None


def test_whole_batches_tensor_dataset_is_indexed_once() -> None:
    facts = replace(TENSORS, indexable=True)
    advice = some(advised(facts, 0.57, 0.3))
    assert advice.rule == "whole-batches"
    assert "BatchSampler(RandomSampler(dataset), 32, drop_last=False)" in advice.setting
    assert 0 < advice.saves_seconds < 0.3 * MS
    assert advised(replace(facts, batch_bytes=1 << 20), 0.57, 0.3) is None


@pytest.mark.parametrize(
    ("samples", "tensors", "size", "by_sample_us", "whole_us"),
    [
        (32, 2, 2_304, 91, 32),
        (128, 1, 8_192, 177, 46),
        (128, 2, 33_792, 272, 74),
        (128, 2, 132_096, 342, 119),
        (256, 2, 18_432, 609, 110),
        (256, 2, 198_656, 664, 214),
        (256, 4, 262_144, 1_082, 313),
        (512, 2, 528_384, 3_450, 500),
    ],
)
def test_whole_batches_saving_is_the_measured_one(
    samples: int, tensors: int, size: int, by_sample_us: float, whole_us: float
) -> None:
    """Draws of torch 2.13; the last is the saving on an H200's host, whose Python is three times slower."""
    facts = replace(TENSORS, indexable=True, batch_size=samples, batch_tensors=tensors, batch_bytes=size)
    draw_ms = by_sample_us / 1e3
    saves = some(advised(facts, 2 * draw_ms, draw_ms)).saves_seconds
    assert saves == pytest.approx((by_sample_us - whole_us) * 1e-6, rel=0.12)


@pytest.mark.parametrize(("samples", "size"), [(8, 576), (128, 1_049_600)])
def test_whole_batches_small_or_wide_ones_are_not_advised(samples: int, size: int) -> None:
    """They took 29 of 38 µs, and 259 of 398 µs."""
    facts = replace(TENSORS, indexable=True, batch_size=samples, batch_bytes=size)
    assert advised(facts, 1, 0.4) is None


@pytest.mark.parametrize(
    "bad", [{"cpus": float("nan")}, {"draw_cpu": -1.0}, {"batch_bytes": 1 << 62}, {"rest_cpus": float("inf")}]
)
def test_loader_facts_impossible_figures_give_no_advice(bad: dict[str, Any]) -> None:
    facts = replace(TENSORS, **bad)
    assert not facts.is_sound()
    assert advised(facts, 170, 150) is None


def mean_step(facts: LoaderFacts | None, step_ms: float, data_ms: float) -> RankEvidence:
    return RankEvidence(0, "node-a", step_ms * MS, {"data": data_ms * MS}, steps=100, loader=facts)


def test_verdict_input_bound_has_the_rules_number() -> None:
    advice = some(advised(WAITS, 170, 150))
    mean = diagnose("r", [mean_step(WAITS, 170, 150)], RuleCounsel(lambda: COST))
    assert mean.cause is Cause.INPUT_BOUND
    seen = RankEvidence(0, "node-a", 170 * MS, {"data": 150 * MS}, loader=WAITS)
    (held,) = rank_causes("r", [seen], RuleCounsel(lambda: COST))
    for verdict in (mean, held):
        assert verdict.fix == f"{advice.setting} ({advice.assumes})"


def test_verdict_input_bound_has_the_stages() -> None:
    stages = InputStages(0, 30, 120 * MS, 30 * MS)
    facts = replace(WAITS, stages=stages)
    mean = diagnose("r", [mean_step(facts, 170, 150)], RuleCounsel(lambda: COST))
    seen = RankEvidence(0, "node-a", 170 * MS, {"data": 150 * MS}, loader=facts)
    (held,) = rank_causes("r", [seen], RuleCounsel(lambda: COST))
    assert mean.stages == stages
    for verdict in (mean, held):
        assert verdict.evidence.endswith("; making a batch takes 150 ms: fetch 120 ms, collate 30 ms")


def test_verdict_on_all_ranks_has_the_stages_of_the_longest_wait() -> None:
    facts = [replace(WAITS, stages=InputStages(0, 8, seconds)) for seconds in (0.1, 0.2)]
    ranks = [
        RankEvidence(number, "a", 1.0, {"data": 0.3 + number / 10, "forward": 0.6}, loader=facts[number])
        for number in range(2)
    ]
    first = rank_causes("r", ranks, RuleCounsel(lambda: COST))[0]
    assert (first.cause, first.rank, first.stages) == (Cause.INPUT_BOUND, None, facts[1].stages)


def test_verdict_promises_no_more_than_it_costs() -> None:
    seen = RankEvidence(0, "node-a", 170 * MS, {"data": 150 * MS}, queued_seconds=60 * MS, loader=WAITS)
    reported = {verdict.cause: verdict for verdict in rank_causes("r", [seen], RuleCounsel(lambda: COST))}
    verdict = reported[Cause.INPUT_BOUND]
    assert 0 < verdict.saves_seconds <= verdict.cost_seconds_per_step
    counsel = RuleCounsel(lambda: COST)
    whole = loader_remedy(WAITS, 170 * MS, 150 * MS, counsel).saves_seconds
    assert whole > 100 * MS
    assert loader_remedy(WAITS, 170 * MS, 150 * MS, counsel, most_seconds=90 * MS).saves_seconds == 90 * MS


def test_verdict_cheap_batches_advise_against_workers() -> None:
    for facts in (TENSORS, replace(TENSORS, draw_cpu=None)):
        verdict = diagnose("r", [mean_step(facts, 0.57, 0.19)], RuleCounsel(lambda: COST))
        assert "num_workers" not in verdict.fix
        assert "cost more than they save" in verdict.fix


def test_verdict_unknown_loader_has_no_remedy() -> None:
    evidence = diagnose("r", [mean_step(None, 170, 150)]).evidence
    assert evidence == "150 ms of each 170 ms step waiting for data"


WORKERS = LoaderFacts(workers=2, cpus=4.0, batch_tensors=2, worker_cpu_seconds=0.001, batches_per_step=1.0)


def test_workers_that_start_anew_are_to_be_kept() -> None:
    facts = replace(WORKERS, starts=22, start_seconds=0.55, starts_per_step=1 / 8)
    advice = some(advise_loader(facts, 0.095, 0.070))
    assert (advice.rule, advice.workers) == ("persistent-workers", 2)
    assert advice.setting == "DataLoader(..., num_workers=2, persistent_workers=True)"
    assert 0.06 < advice.saves_seconds <= 0.070
    assert "workers start anew every 8 steps" in advice.assumes
    few = advise_loader(replace(facts, starts=2), 0.095, 0.070)
    assert few is None or few.rule != "persistent-workers"


def test_idle_workers_are_too_many_or_none_needed() -> None:
    stages = InputStages(2, 20, fetch_seconds=0.0002, collate_seconds=0.0001, idle=0.96)
    advice = some(advise_loader(replace(WORKERS, stages=stages, receive_seconds=0.0005), 0.0035, 0.0016))
    assert advice.setting == "DataLoader(..., num_workers=0)"


def test_workers_for_tiny_items_cost_more_than_they_save() -> None:
    stages = InputStages(4, 20, fetch_seconds=0.0002, collate_seconds=0.0001, send_seconds=0.0003, idle=0.96)
    tiny = replace(WORKERS, stages=stages, receive_seconds=0.0008)
    assert tiny.handover_seconds == 0.0011
    assert tiny.costs_more_to_hand_over
    assert not replace(tiny, stages=replace(stages, idle=0.1)).costs_more_to_hand_over
    assert not replace(tiny, stages=replace(stages, fetch_seconds=0.002)).costs_more_to_hand_over
    assert not replace(tiny, stages=None).costs_more_to_hand_over
    assert LoaderFacts(stages=stages, receive_seconds=0.0008).handover_seconds == 0.0


def test_workers_that_compete_for_cpus_are_not_to_be_more() -> None:
    """Without the time in line for a CPU they seem to wait for storage."""
    facts = LoaderFacts(workers=8, cpus=2.0, worker_cpu_seconds=0.01, worker_queued=0.7)
    advice = advise_loader(facts, 1.0, 0.9)
    assert advice is None or advice.workers <= 8


def test_slow_worker_is_named_and_no_number_advised() -> None:
    fix = loader_remedy(replace(WORKERS, slow_worker=3), 0.1, 0.08).fix
    assert fix.startswith("worker 3 is slow")
    assert "in_order=False" in fix
    assert "num_workers" not in fix


def test_binding_comes_before_other_fixes() -> None:
    crowded = replace(WORKERS, worker_queued=0.5)
    fix = loader_remedy(crowded, 0.1, 0.08, binding=CpuBinding(1, 2)).fix
    assert fix.startswith("undo the CPU affinity: this process and its workers may use 1 CPU of 2; `taskset")
    assert contention_remedy(crowded, 1, binding=CpuBinding(1, 2)).fix.startswith("undo the CPU affinity")
    waiting = replace(WORKERS, worker_queued=0.01)
    assert "affinity" not in loader_remedy(waiting, 0.1, 0.08, binding=CpuBinding(1, 2)).fix


def test_threads_beyond_the_cpus_need_no_loader() -> None:
    assert contention_remedy(None, 24, cpus=2.0).fix.startswith("torch.set_num_threads(2) (now 24); or ")
    assert "threads" not in contention_remedy(None, 1, cpus=2.0).fix


def test_fewer_workers_only_help_those_that_compete() -> None:
    more = "end or move the other programs"
    for facts in (
        LoaderFacts(workers=1, cpus=2.0),
        LoaderFacts(workers=2, cpus=8.0),
        LoaderFacts(workers=4, cpus=2.0, worker_queued=0.01),
    ):
        assert contention_remedy(facts, 1).fix.startswith(more)
    crowd = contention_remedy(LoaderFacts(workers=4, cpus=2.0, worker_queued=0.5), 1).fix
    assert crowd.startswith("use fewer loader workers")
    assert without_fewer_workers(crowd).startswith(more)
