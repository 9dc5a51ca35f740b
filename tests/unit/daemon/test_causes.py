"""Causes: each is found from its evidence, with its rank and its cost; what has none is unknown."""

import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.golden import check_golden

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import rank_causes

STEP = 0.1


def rank(number: int) -> RankEvidence:
    """Return a healthy rank of 100 ms a step, its device busy for 90 of them."""
    phases = {"data": 0.002, "forward": 0.03, "backward": 0.058, "optimizer": 0.008, "collective_wait": 0.002}
    return RankEvidence(number, f"node-{number // 4}", STEP, phases, device_busy=0.9)


def changed(of: RankEvidence, **phases: float) -> RankEvidence:
    """Return the rank with other phases and the step that they sum to; its device works as long as before."""
    merged = {**of.phase_seconds, **phases}
    step = sum(merged.values())
    busy = None if of.device_busy is None else min(1.0, of.device_busy * of.step_seconds / step)
    return replace(of, phase_seconds=merged, step_seconds=step, device_busy=busy)


def eight(*odd: RankEvidence) -> list[RankEvidence]:
    """Return eight ranks, some of them odd; the healthy ones wait for the longest step."""
    longest = max((each.step_seconds for each in odd), default=STEP)
    different = {each.rank: each for each in odd}
    waiting = 0.002 + longest - STEP
    return [different.get(number, changed(rank(number), collective_wait=waiting)) for number in range(8)]


def late(of: RankEvidence, phase: str, seconds: float) -> RankEvidence:
    """Return the rank with a phase that is longer by so much, which makes it late."""
    longer = changed(of, **{phase: of.phase_seconds[phase] + seconds})
    return replace(longer, late_seconds=seconds, late_phase=phase)


def since(before: RankEvidence, now: RankEvidence) -> RankEvidence:
    """Return the rank as it is now, with its past."""
    return replace(now, before=before)


def synchronised(of: RankEvidence, seconds: float, busy: float) -> RankEvidence:
    """Return the rank with its host waiting for the device, which is busy for this part of the step."""
    line = f"item() at train.py:{50 + of.rank}"
    return replace(of, sync_seconds=seconds, sync_line=line, device_busy=busy)


def own_code(of: RankEvidence, seconds: float) -> RankEvidence:
    """Return the rank without a device, with so much time between the phases."""
    return replace(changed(of, other=seconds), device_busy=None)


CASES: dict[Cause, list[RankEvidence]] = {
    Cause.INPUT_BOUND: eight(late(rank(5), "data", 0.04)),
    Cause.HOST_BOUND: [replace(rank(number), device_busy=0.3) for number in range(8)],
    Cause.SYNCHRONISATION: [synchronised(rank(number), 0.06, busy=0.65) for number in range(8)],
    Cause.SLOW_RANK: eight(late(rank(3), "forward", 0.03)),
    Cause.GARBAGE_COLLECTION: eight(replace(late(rank(2), "backward", 0.04), collected_seconds=0.04)),
    Cause.CPU_CONTENTION: eight(replace(late(rank(1), "forward", 0.04), queued_seconds=0.04)),
    Cause.CGROUP_THROTTLING: eight(
        replace(late(rank(6), "forward", 0.04), queued_seconds=0.041, throttled_seconds=0.04)
    ),
    Cause.SLOW_IO: eight(replace(late(rank(7), "data", 0.04), disk_seconds=0.038)),
    Cause.GPU_THROTTLING: eight(
        replace(late(rank(4), "backward", 0.04), device_busy=0.9, device_throttled=1.0, device_slowdown=0.32)
    ),
    Cause.GPU_SHARED: eight(replace(late(rank(0), "backward", 0.04), device_busy=0.9, device_shared=0.3)),
    Cause.COLLECTIVE: [
        since(rank(number), changed(rank(number), collective_wait=0.05)) for number in range(8)
    ],
    Cause.PIPELINE_IMBALANCE: [
        replace(each, stage=each.rank // 4)
        for each in eight(*(changed(rank(number), forward=0.07) for number in range(4, 8)))
    ],
    Cause.CHECKPOINT: [replace(rank(number), checkpoint_seconds=0.02) for number in range(8)],
    Cause.RECOMPILATION: eight(replace(late(rank(2), "forward", 0.04), compiled_seconds=0.04)),
    Cause.MEMORY_PRESSURE: [replace(rank(number), reclaim_seconds=0.04) for number in range(8)],
    Cause.SCRIPT_CODE: [own_code(rank(0), 0.04)],
    Cause.UNKNOWN: [since(rank(number), changed(rank(number), optimizer=0.04)) for number in range(8)],
    Cause.NONE: [rank(number) for number in range(8)],
}


def on_nccl(odd: RankEvidence) -> list[RankEvidence]:
    """Return four ranks of 117 ms: rank 2 is late by 20 ms, for which the others' hosts wait in ``other``."""
    waits = {"data": 0.002, "forward": 0.03, "backward": 0.05, "collective_wait": 0.0002, "other": 0.0348}
    late = {**waits, **odd.phase_seconds, "other": 0.0148}
    late["forward"] = 0.117 - sum(seconds for name, seconds in late.items() if name != "forward")
    ranks = [RankEvidence(number, "a", 0.117, waits, device_busy=0.9, on_device=True) for number in range(4)]
    ranks[2] = replace(odd, phase_seconds=late)
    return ranks


_ON_DEVICE = RankEvidence(2, "a", 0.117, device_busy=0.9, on_device=True)


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        (replace(_ON_DEVICE, phase_seconds={"data": 0.022}), Cause.INPUT_BOUND),
        (replace(_ON_DEVICE, device_throttled=1.0, device_slowdown=0.19), Cause.GPU_THROTTLING),
        (replace(_ON_DEVICE, collected_seconds=0.02), Cause.GARBAGE_COLLECTION),
    ],
)
def test_rank_with_cause_is_named_though_no_host_waits(odd: RankEvidence, cause: Cause) -> None:
    first = rank_causes("bert-17", on_nccl(odd))[0]
    assert (first.cause, first.rank) == (cause, 2)
    assert first.cost_seconds_per_step == pytest.approx(0.02, rel=0.1)


def test_waits_on_device_without_cause_are_unknown() -> None:
    """The host does not see who is late, so the run is not called healthy."""
    (verdict,) = rank_causes("bert-17", on_nccl(_ON_DEVICE))
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.UNKNOWN, None, "collective_wait")
    assert verdict.evidence.startswith("cannot determine which rank is slow")


def test_short_waits_are_healthy_if_the_host_sees_them() -> None:
    ranks = [changed(rank(number), collective_wait=0.0005) for number in range(8)]
    (verdict,) = rank_causes("bert-17", ranks)
    assert verdict.cause is Cause.NONE


def test_no_waits_on_devices_are_unknown_too() -> None:
    ranks = [replace(changed(rank(number), collective_wait=0.0), on_device=True) for number in range(8)]
    (verdict,) = rank_causes("bert-17", ranks)
    assert (verdict.cause, verdict.rank) == (Cause.UNKNOWN, None)
    assert "no wait for another rank is seen in each 98 ms step" in verdict.evidence
    (alone,) = rank_causes("bert-17", ranks[:1])
    assert alone.cause is Cause.NONE


@pytest.mark.parametrize("cause", CASES, ids=lambda cause: cause.value)
def test_each_cause_comes_first_where_it_is_the_cause(cause: Cause) -> None:
    assert rank_causes("bert-17", CASES[cause])[0].cause is cause


def test_the_words_are_the_golden_file() -> None:
    lines = []
    for cause, ranks in CASES.items():
        lines.append(f"# {cause.value}")
        for verdict in rank_causes("bert-17", ranks):
            cost = f"{verdict.cost_seconds_per_step * 1e3:.1f} ms"
            lines.append(f"{verdict.summary} | {verdict.phase or '-'} | {cost} | {verdict.next_command}")
    text = "\n".join(lines) + "\n"
    check_golden("causes.txt", text)


@pytest.mark.parametrize(
    ("cause", "number", "cost"),
    [
        (Cause.INPUT_BOUND, 5, 0.04),
        (Cause.SLOW_RANK, 3, 0.03),
        (Cause.GARBAGE_COLLECTION, 2, 0.04),
        (Cause.CGROUP_THROTTLING, 6, 0.04),
    ],
)
def test_the_odd_rank_is_named_with_its_cost(cause: Cause, number: int, cost: float) -> None:
    first, *others = rank_causes("r", CASES[cause])
    assert (first.rank, first.node) == (number, f"node-{number // 4}")
    assert first.cost_seconds_per_step == pytest.approx(cost)
    assert others == []


def test_no_rank_is_named_when_all_are_alike() -> None:
    for cause in (
        Cause.HOST_BOUND,
        Cause.SYNCHRONISATION,
        Cause.COLLECTIVE,
        Cause.CHECKPOINT,
        Cause.MEMORY_PRESSURE,
    ):
        assert rank_causes("r", CASES[cause])[0].rank is None


def test_synchronisation_costs_the_idle_time_after_it() -> None:
    [verdict] = rank_causes("r", CASES[Cause.SYNCHRONISATION])
    # Of 35 ms idle, 2 are a wait for other ranks.
    assert verdict.cost_seconds_per_step == pytest.approx(0.033)
    assert "most of it in item() at train.py:50" in verdict.evidence
    [verdict] = rank_causes("r", [synchronised(rank(0), 0.02, busy=0.65)])
    assert verdict.cost_seconds_per_step == pytest.approx(0.02)


@pytest.mark.parametrize("busy", [None, 0.95])
def test_synchronisation_with_a_busy_device_is_no_cause(busy: float | None) -> None:
    ranks = [replace(synchronised(rank(number), 0.06, 0.0), device_busy=busy) for number in range(4)]
    assert [verdict.cause for verdict in rank_causes("r", ranks)] == [Cause.NONE]


def test_synchronisation_costs_no_time_of_the_loader() -> None:
    ranks = [synchronised(changed(rank(number), data=0.052), 0.06, busy=0.6) for number in range(4)]
    [verdict] = rank_causes("r", ranks)
    assert verdict.cause is Cause.INPUT_BOUND
    assert verdict.cost_seconds_per_step == pytest.approx(0.052)


def test_synchronisation_costs_no_bubble_of_a_pipeline() -> None:
    ranks = [synchronised(changed(rank(number), collective_wait=0.04), 0.08, 0.7) for number in range(4)]
    assert [verdict.cause for verdict in rank_causes("r", ranks)] == [Cause.NONE]


def test_synchronisation_that_is_new_costs_the_growth() -> None:
    past = [synchronised(rank(number), 0.01, busy=0.97) for number in range(4)]
    now = [since(each, synchronised(changed(each, other=0.03), 0.06, busy=0.74)) for each in past]
    [verdict] = rank_causes("r", now)
    assert (verdict.cause, verdict.has_grown) == (Cause.SYNCHRONISATION, True)
    assert verdict.cost_seconds_per_step == pytest.approx(0.03)


def test_synchronisation_of_one_rank_costs_its_lateness() -> None:
    odd = synchronised(late(rank(3), "optimizer", 0.04), 0.06, busy=0.7)
    [verdict] = rank_causes("r", eight(odd))
    assert (verdict.cause, verdict.rank) == (Cause.SYNCHRONISATION, 3)
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)


def test_new_delay_of_the_host_costs_what_steps_have_grown_by() -> None:
    """A device has work queued, and notices only what is left of a delay once that is done."""
    past = replace(rank(0), on_device=True)
    now = replace(changed(past, other=0.04), collected_seconds=0.045)
    [verdict] = rank_causes("r", [since(past, now)])
    assert verdict.cause is Cause.GARBAGE_COLLECTION
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)
    [verdict] = rank_causes("r", [since(replace(past, on_device=False), replace(now, on_device=False))])
    assert verdict.cost_seconds_per_step == pytest.approx(0.045)


@pytest.mark.parametrize(
    ("busy", "cost", "hides"),
    [(0.7, 0.03, True), (0.4, 0.05, False), (None, 0.05, False), (0.9, None, False)],
)
def test_wait_for_data_costs_what_the_device_idles(
    busy: float | None, cost: float | None, hides: bool
) -> None:
    alone = replace(changed(rank(0), data=0.05, forward=0.0, optimizer=0.0), on_device=True)
    alone = replace(changed(alone, backward=0.048), device_busy=busy)
    assert alone.step_seconds == pytest.approx(0.1)
    [verdict] = rank_causes("r", [alone])
    assert verdict.cause is (Cause.NONE if cost is None else Cause.INPUT_BOUND)
    assert verdict.cost_seconds_per_step == pytest.approx(cost or 0.0)
    assert ("20 ms more while the device works" in verdict.evidence) == hides


def test_two_causes_are_ordered_by_cost() -> None:
    ranks = [replace(changed(rank(n), data=0.05), collected_seconds=0.02) for n in range(4)]
    found = rank_causes("r", ranks)
    assert [verdict.cause for verdict in found] == [Cause.INPUT_BOUND, Cause.GARBAGE_COLLECTION]


@pytest.mark.parametrize(("exchange", "unknown"), [(0.001, 0.041), (0.008, 0.04), (0.02, 0.06)])
def test_exchange_growth_beside_own_work_is_not_its_cost(exchange: float, unknown: float) -> None:
    past = [changed(rank(number), collective_wait=0.1) for number in range(8)]
    now = [since(each, changed(each, forward=0.07, collective_wait=0.1 + exchange)) for each in past]
    [verdict] = rank_causes("r", now)
    assert (verdict.cause, verdict.phase) == (Cause.UNKNOWN, "forward")
    assert verdict.cost_seconds_per_step == pytest.approx(unknown)
    results = "8 ms in exchanges that have grown with it" in verdict.evidence
    assert results == (unknown == 0.04)


def test_nothing_seen_is_unknown() -> None:
    assert rank_causes("r", [])[0].cause is Cause.UNKNOWN
    assert rank_causes("r", [RankEvidence(0, "n", 0.0)])[0].cause is Cause.UNKNOWN


def test_next_command_with_any_run_name_is_safe_in_a_shell() -> None:
    (verdict,) = rank_causes("bert 17; reboot", CASES[Cause.SLOW_RANK])
    assert shlex.split(verdict.next_command) == [
        "torchperfd",
        "capture",
        "--run",
        "bert 17; reboot",
        "--steps",
        "5",
    ]


def test_a_cause_costs_what_it_takes_beyond_the_past() -> None:
    before = [replace(rank(number), collected_seconds=0.01) for number in range(8)]
    now = [since(each, replace(changed(each, backward=0.098), collected_seconds=0.05)) for each in before]
    (verdict,) = rank_causes("r", now)
    assert (verdict.cause, verdict.rank) == (Cause.GARBAGE_COLLECTION, None)
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)


def test_loss_of_one_rank_is_its_excess_limited_by_its_lateness() -> None:
    """A rank's loss costs what it has more than the others, at most what it is late."""
    healthy = [replace(rank(number), queued_seconds=0.01) for number in range(7)]
    odd = replace(late(rank(7), "forward", 0.03), queued_seconds=0.05)
    (verdict,) = rank_causes("r", [*healthy, odd])
    assert (verdict.cause, verdict.rank) == (Cause.CPU_CONTENTION, 7)
    assert verdict.cost_seconds_per_step == pytest.approx(0.03)


def test_one_rank_that_is_not_late_costs_the_run_nothing() -> None:
    ranks = [rank(number) for number in range(7)] + [replace(rank(7), queued_seconds=0.05)]
    assert [verdict.cause for verdict in rank_causes("r", ranks)] == [Cause.NONE]


def test_an_exchange_that_always_took_so_long_is_none() -> None:
    ranks = [changed(rank(number), collective_wait=0.05) for number in range(8)]
    assert [verdict.cause for verdict in rank_causes("r", ranks)] == [Cause.NONE]


def test_exchanges_that_grow_with_all_work_are_no_network_cause() -> None:
    before = [changed(rank(number), collective_wait=0.05) for number in range(8)]
    twice = [
        since(each, changed(each, **{name: 2 * seconds for name, seconds in each.phase_seconds.items()}))
        for each in before
    ]
    assert [verdict.cause for verdict in rank_causes("r", twice)] == [Cause.UNKNOWN]
    starved = [replace(each, queued_seconds=0.02) for each in twice]
    # Ranks that compute so much more wait for processors because of that.
    assert [verdict.cause for verdict in rank_causes("r", starved)] == [Cause.UNKNOWN]


def test_equally_late_ranks_give_the_same_name_each_sample() -> None:
    for one, other in ((0.040, 0.042), (0.042, 0.040)):
        (verdict,) = rank_causes("r", eight(late(rank(2), "forward", one), late(rank(5), "forward", other)))
        assert (verdict.cause, verdict.rank) == (Cause.SLOW_RANK, 2)
        assert verdict.cost_seconds_per_step == pytest.approx(one)
        assert "so does rank 5" in verdict.evidence
    (verdict,) = rank_causes("r", eight(late(rank(2), "forward", 0.04), late(rank(5), "forward", 0.05)))
    assert verdict.rank == 5


def test_rank_with_more_work_waits_for_cpus_without_contention() -> None:
    # Of 98 ms of its own 20 in the queue; of 158 ms then 32.
    pasts = [replace(rank(number), queued_seconds=0.02) for number in range(8)]
    now = [since(past, changed(past, collective_wait=0.062)) for past in pasts]
    now[2] = since(pasts[2], replace(late(pasts[2], "forward", 0.06), queued_seconds=0.032))
    (verdict,) = rank_causes("r", now)
    assert (verdict.cause, verdict.rank) == (Cause.SLOW_RANK, 2)
    assert verdict.cost_seconds_per_step == pytest.approx(0.06)


def test_lasting_loss_of_all_ranks_needs_a_larger_share() -> None:
    """Without an onset, a loss that all ranks have is reported from a larger share on."""
    some = [replace(rank(number), queued_seconds=0.2 * STEP, device_busy=None) for number in range(8)]
    much = [replace(each, queued_seconds=0.4 * STEP) for each in some]
    more = [since(rank(number), each) for number, each in enumerate(some)]
    assert rank_causes("r", some)[0].cause is Cause.NONE
    assert rank_causes("r", much)[0].cause is Cause.CPU_CONTENTION
    assert rank_causes("r", more)[0].cause is Cause.CPU_CONTENTION


def test_lateness_not_explained_by_a_cause_is_the_ranks_own() -> None:
    found = rank_causes("r", eight(replace(late(rank(2), "forward", 0.05), collected_seconds=0.03)))
    assert [(verdict.cause, verdict.rank) for verdict in found] == [
        (Cause.GARBAGE_COLLECTION, 2),
        (Cause.SLOW_RANK, 2),
    ]
    assert [verdict.cost_seconds_per_step for verdict in found] == pytest.approx([0.03, 0.02])


def test_garbage_collection_is_blamed_before_cpu_contention() -> None:
    odd = replace(late(rank(2), "backward", 0.04), collected_seconds=0.04, queued_seconds=0.01)
    (verdict,) = rank_causes("r", eight(odd))
    assert (verdict.cause, verdict.rank) == (Cause.GARBAGE_COLLECTION, 2)
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)


def test_rank_late_by_its_checkpoints_has_slow_checkpoints() -> None:
    writer = changed(rank(0), checkpoint=0.0)
    (verdict,) = rank_causes("r", eight(late(writer, "checkpoint", 0.02)))
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.CHECKPOINT, 0, "checkpoint")


def test_loader_that_waits_for_storage_has_no_other_cause() -> None:
    mostly = eight(replace(late(rank(7), "data", 0.04), disk_seconds=0.03))
    (verdict,) = rank_causes("r", mostly)
    assert (verdict.cause, verdict.rank) == (Cause.SLOW_IO, 7)
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)
    partly = eight(replace(late(rank(7), "data", 0.04), disk_seconds=0.01))
    assert [(each.cause, each.rank) for each in rank_causes("r", partly)] == [
        (Cause.INPUT_BOUND, 7),
        (Cause.SLOW_IO, 7),
    ]


def test_exchanges_that_wait_for_cpus_are_no_network_cause() -> None:
    pasts = [rank(number) for number in range(8)]
    slower = [since(past, changed(past, collective_wait=0.05)) for past in pasts]
    assert rank_causes("r", slower)[0].cause is Cause.COLLECTIVE
    starved = [replace(each, queued_seconds=0.022) for each in slower]
    assert all(each.cause is not Cause.COLLECTIVE for each in rank_causes("r", starved))


@pytest.mark.parametrize(
    ("seen", "full_in", "results"), [(10, 1400, True), (10, 1600, False), (300, 3500, True)]
)
def test_growth_is_extrapolated_to_a_multiple_of_its_history(
    seen: float, full_in: float, results: bool
) -> None:
    growing = replace(rank(5), grows_by=5e7, grows_for_seconds=seen, full_in_seconds=full_in)
    (verdict,) = rank_causes("r", eight(growing))
    assert (verdict.cause is Cause.MEMORY_PRESSURE, verdict.rank == 5) == (results, results)


def test_collective_threads_that_wait_for_cpus_name_their_rank() -> None:
    def now(number: int) -> RankEvidence:
        return since(rank(number), changed(rank(number), collective_wait=0.032))

    starved = replace(now(5), exchange_queued_seconds=0.028)
    first = rank_causes("bert", [starved if number == 5 else now(number) for number in range(8)])[0]
    assert (first.cause, first.rank) == (Cause.CPU_CONTENTION, 5)
    assert first.cost_seconds_per_step == pytest.approx(0.03), "all that steps have grown by"


@pytest.mark.parametrize(("past", "named"), [(True, 5), (False, None)])
def test_rank_that_lacks_cpus_most_is_named_after_a_slowdown(past: bool, named: int | None) -> None:
    def now(number: int) -> RankEvidence:
        slow = replace(changed(rank(number), forward=0.09), queued_seconds=0.06 if number == 5 else 0.036)
        return since(rank(number), slow) if past else slow

    first = rank_causes("bert", [now(number) for number in range(8)])[0]
    if past:
        assert (first.cause, first.rank) == (Cause.CPU_CONTENTION, named)
    assert first.rank == named


def test_collective_threads_that_always_waited_are_no_cause() -> None:
    waiting = [replace(rank(number), exchange_queued_seconds=0.06) for number in range(8)]
    assert rank_causes("bert", waiting)[0].cause is Cause.NONE
    assert rank_causes("bert", [since(each, each) for each in waiting])[0].cause is Cause.NONE


@pytest.mark.parametrize(("compiled", "cost"), [(0.031, 0.04), (0.029, 0.029)])
def test_compilations_that_are_most_lateness_explain_all_of_it(compiled: float, cost: float) -> None:
    slow = replace(late(rank(3), "forward", 0.04), compiled_seconds=compiled)
    first = rank_causes("bert", eight(slow))[0]
    assert (first.cause, first.rank) == (Cause.RECOMPILATION, 3)
    assert first.cost_seconds_per_step == pytest.approx(cost)


@pytest.mark.parametrize(
    ("others", "compiled", "cost"),
    [(0.004, 0.038, 0.04), (0.004, 0.029, 0.029), (0.02, 0.019, 0.02), (0.02, 0.038, 0.02)],
)
def test_compilation_cost_is_full_beside_slower_ranks(others: float, compiled: float, cost: float) -> None:
    """Compilations cost all that their rank does more, also where others have become slower."""
    pasts = [rank(number) for number in range(8)]
    now = [since(past, changed(past, forward=past.phase_seconds["forward"] + others)) for past in pasts]
    slow = replace(late(rank(3), "forward", 0.04), compiled_seconds=compiled, late_seconds=0.04 - others)
    now[3] = since(pasts[3], slow)
    first = next(each for each in rank_causes("bert", now) if each.cause is Cause.RECOMPILATION)
    assert first.rank == 3
    assert first.cost_seconds_per_step == pytest.approx(cost)


def test_a_quota_costs_what_it_holds_the_exchange_up_for_as_well() -> None:
    pasts = [rank(number) for number in range(8)]
    now = [since(past, changed(past, collective_wait=0.062)) for past in pasts]
    held_back = replace(late(rank(3), "forward", 0.04), throttled_seconds=0.08)
    now[3] = since(pasts[3], changed(held_back, collective_wait=0.022))
    (verdict,) = rank_causes("r", now)
    assert (verdict.cause, verdict.rank) == (Cause.CGROUP_THROTTLING, 3)
    assert verdict.cost_seconds_per_step == pytest.approx(0.06)


def test_past_cost_of_a_cause_is_not_deducted_from_growth() -> None:
    """What a cause has always cost is not taken out of what has grown."""
    pasts = [replace(rank(number), queued_seconds=0.01) for number in range(8)]
    starving = [since(past, replace(changed(past, data=0.052), queued_seconds=0.01)) for past in pasts]
    (verdict,) = rank_causes("r", starving)
    assert (verdict.cause, verdict.rank) == (Cause.INPUT_BOUND, None)
    assert verdict.cost_seconds_per_step == pytest.approx(0.05)


def test_loss_of_a_rank_costs_what_the_others_wait() -> None:
    """Without what it lacks, a rank is as fast as the others, which lack some of it as well."""
    pasts = [rank(number) for number in range(8)]
    now = [
        since(past, changed(replace(past, queued_seconds=0.006), forward=0.036, collective_wait=0.036))
        for past in pasts
    ]
    now[3] = since(pasts[3], replace(late(rank(3), "forward", 0.02), queued_seconds=0.02))
    (verdict,) = rank_causes("r", now)
    assert (verdict.cause, verdict.rank) == (Cause.CPU_CONTENTION, 3)
    assert verdict.cost_seconds_per_step == pytest.approx(0.014)


def test_unexplained_late_rank_is_late_by_its_growth() -> None:
    def growing(of: RankEvidence) -> list[RankEvidence]:
        return eight(replace(of, grows_by=5e7, grows_for_seconds=10, full_in_seconds=60))

    (verdict,) = rank_causes("r", growing(late(rank(5), "optimizer", 0.02)))
    assert (verdict.cause, verdict.rank) == (Cause.MEMORY_PRESSURE, 5)
    assert verdict.cost_seconds_per_step == pytest.approx(0.02)
    slow_loader = rank_causes("r", growing(late(rank(5), "data", 0.02)))
    assert [each.cause for each in slow_loader] == [Cause.INPUT_BOUND, Cause.MEMORY_PRESSURE]


def absorbed(cause: Cause, grown: float, busy: float | None, error: float = 0.0) -> list[RankEvidence]:
    """Return ranks on devices, one of them 40 ms late, whose steps have grown by so much."""
    throttled = cause is Cause.GPU_THROTTLING
    ranks = []
    for each in eight(late(rank(4), "backward", 0.04)):
        # What a device does is known of the past only: at present it also waits for the late rank.
        now = replace(each, on_device=True, device_busy=None)
        if throttled and each.rank == 4:
            now = replace(now, device_busy=0.7, device_throttled=1.0, device_slowdown=0.5)
        past = replace(rank(each.rank), on_device=True, device_busy=busy, step_error_seconds=error)
        ranks.append(since(replace(past, step_seconds=now.step_seconds - grown), now))
    return ranks


@pytest.mark.parametrize(
    ("grown", "cost", "words"),
    [
        (0.04, 0.04, "40 ms of each"),
        (0.037, 0.04, "40 ms of each"),  # ranks differ by chance
        (0.02, 0.02, "20 ms more in time for which devices idled before"),
    ],
)
@pytest.mark.parametrize("cause", [Cause.SLOW_RANK, Cause.GPU_THROTTLING])
@pytest.mark.parametrize("busy", [0.7, None])
def test_lateness_that_devices_absorb_costs_the_growth(
    cause: Cause, busy: float | None, grown: float, cost: float, words: str
) -> None:
    """Devices that idled for their hosts have time for one that is late."""
    found = rank_causes("r", absorbed(cause, grown, busy))
    assert [verdict.cause for verdict in found] == [cause]
    assert found[0].rank == 4
    assert found[0].cost_seconds_per_step == pytest.approx(cost)
    assert words in found[0].evidence


def test_busy_devices_absorb_no_lateness() -> None:
    (verdict,) = rank_causes("r", absorbed(Cause.SLOW_RANK, 0.02, busy=1.0))
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)


def test_growth_that_is_uncertain_limits_no_cost() -> None:
    """Steps that vary hide for how much they have grown."""
    (verdict,) = rank_causes("r", absorbed(Cause.SLOW_RANK, 0.02, busy=0.7, error=0.005))
    assert verdict.cost_seconds_per_step == pytest.approx(0.04)


seconds = st.floats(0, 1e6)


phases = st.dictionaries(
    st.sampled_from(["data", "forward", "other", "collective_wait", "checkpoint"]), seconds
)
shares = st.floats(0, 1)


def evidence(before: st.SearchStrategy[RankEvidence | None]) -> st.SearchStrategy[RankEvidence]:
    return st.builds(
        RankEvidence,
        rank=st.integers(0, 9),
        node=st.just("n"),
        step_seconds=seconds,
        phase_seconds=phases,
        collected_seconds=seconds,
        queued_seconds=seconds,
        throttled_seconds=seconds,
        disk_seconds=seconds,
        reclaim_seconds=seconds,
        compiled_seconds=seconds,
        checkpoint_seconds=seconds,
        device_busy=st.one_of(st.none(), shares),
        device_throttled=shares,
        device_slowdown=shares,
        device_shared=shares,
        before=before,
        late_seconds=seconds,
        late_phase=st.sampled_from(["", "data", "forward"]),
    )


@given(
    st.lists(
        evidence(st.one_of(st.none(), evidence(st.none()))), max_size=5, unique_by=lambda each: each.rank
    )
)
def test_any_evidence_has_an_answer_the_costliest_first(ranks: list[RankEvidence]) -> None:
    found = rank_causes("r", ranks)
    costs = [verdict.cost_seconds_per_step for verdict in found if verdict.cause is not Cause.UNKNOWN]
    assert found
    assert costs == sorted(costs, reverse=True)
    assert all(cost >= 0 for cost in costs)
    assert len({verdict.cause for verdict in found}) == len(found)


@pytest.mark.parametrize("known", [True, False])
def test_rank_causes_onset_needs_a_known_past(known: bool) -> None:
    """A rank that has joined after the change has no past: what it loses may always have been so."""
    past = RankEvidence(0, "n", 0.1, {"data": 0.002, "forward": 0.098})
    rank = RankEvidence(0, "n", 0.2, {"data": 0.102, "forward": 0.098}, before=past if known else None)
    (first, *_) = rank_causes("r", [rank])
    assert (first.cause, first.has_grown) == (Cause.INPUT_BOUND, known)


def loading(queued: float = 0.0, **phases: float) -> RankEvidence:
    """Return a rank that waits for data for 90 ms of its step."""
    return replace(changed(rank(0), **({"data": 0.09} | phases)), queued_seconds=queued)


def test_lasting_wait_for_data_stays_beside_a_slowdown() -> None:
    now = since(loading(), loading(queued=0.02, forward=0.05))
    first, second = rank_causes("r", [now])
    assert (first.cause, first.has_grown) == (Cause.INPUT_BOUND, False)
    assert (second.cause, second.has_grown) == (Cause.CPU_CONTENTION, True)
    assert first.cost_seconds_per_step == pytest.approx(0.09, rel=0.01)
    assert first.cost_seconds_per_step + second.cost_seconds_per_step <= now.step_seconds


def test_lasting_wait_for_data_that_grows_is_one_verdict() -> None:
    (only,) = rank_causes("r", [since(loading(), loading(data=0.11))])
    assert (only.cause, only.has_grown) == (Cause.INPUT_BOUND, True)
    assert only.cost_seconds_per_step == pytest.approx(0.11)
    assert "20 ms of it more than before" in only.evidence


def test_wait_for_data_that_has_ended_is_not_lasting() -> None:
    now = since(loading(), loading(data=0.001, optimizer=0.15))
    assert [verdict.cause for verdict in rank_causes("r", [now])] == [Cause.UNKNOWN]


def test_lasting_wait_for_data_outlasts_a_recovery() -> None:
    """Steps that are quicker than their past again have no cause of a slowdown."""
    (only,) = rank_causes("r", [since(loading(forward=0.05), loading())])
    assert (only.cause, only.has_grown) == (Cause.INPUT_BOUND, False)


def newcomer(**changes: Any) -> RankEvidence:
    """Return the only rank of a run on the CPU, whose own function takes 70 % of the step."""
    phases = {"data": 0.0006, "forward": 0.006, "backward": 0.007, "optimizer": 0.0012, "other": 0.0346}
    return replace(RankEvidence(0, "n", 0.0494, phases), **changes)


def test_script_code_of_a_rank_on_the_cpu_is_the_cause() -> None:
    (verdict,) = rank_causes("r", [newcomer()])
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SCRIPT_CODE, None, "other")
    assert verdict.cost_seconds_per_step == pytest.approx(0.0346)
    assert verdict.evidence == "34.6 ms of each 49.4 ms step in the script's own code between the phases"


@pytest.mark.parametrize(("loss", "other", "phase"), [(0.04, 0.0, "loss"), (0.01, 0.03, "other")])
def test_longer_part_of_the_scripts_code_is_reported(loss: float, other: float, phase: str) -> None:
    (verdict,) = rank_causes("r", [changed(newcomer(), loss=loss, other=other)])
    assert (verdict.cause, verdict.phase) == (Cause.SCRIPT_CODE, phase)


def test_loss_that_lasts_outlasts_a_slowdown() -> None:
    past = changed(newcomer(), other=0.0, loss=0.04)
    slower = changed(past, forward=0.012)
    assert Cause.SCRIPT_CODE in {each.cause for each in rank_causes("r", [since(past, slower)])}


@pytest.mark.parametrize("device", [{"on_device": True}, {"device_busy": 0.9}, {"hides_script_code": True}])
def test_script_code_beside_a_device_is_no_cause(device: dict[str, Any]) -> None:
    assert [each.cause for each in rank_causes("r", [newcomer(**device)])] == [Cause.NONE]


@pytest.mark.parametrize(("other", "is_shown"), [(0.0005, False), (0.0016, True)])
def test_script_code_below_its_share_is_no_cause(other: float, is_shown: bool) -> None:
    (verdict,) = rank_causes("r", [changed(newcomer(), other=other)])
    assert verdict.cause is Cause.NONE
    assert is_shown == (
        "in the script's own code between the phases, a cause from 20% on" in verdict.evidence
    )


def test_script_code_of_one_rank_makes_it_a_slow_rank() -> None:
    phases = {"forward": 0.03, "backward": 0.06, "other": 0.002, "collective_wait": 0.06}
    quick = RankEvidence(0, "n", 0.152, phases)
    slow = replace(changed(quick, other=0.06, collective_wait=0.002), rank=1)
    slow = replace(slow, late_seconds=0.058, late_phase="other")
    (verdict,) = rank_causes("r", [quick, slow])
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SLOW_RANK, 1, "other")


def test_script_code_of_all_ranks_costs_what_they_share() -> None:
    phases = {"forward": 0.03, "backward": 0.03, "other": 0.05, "collective_wait": 0.03}
    quick = RankEvidence(0, "n", 0.14, phases)
    slow = replace(changed(quick, other=0.08, collective_wait=0.0), rank=1)
    slow = replace(slow, late_seconds=0.03, late_phase="other")
    first, second = rank_causes("r", [quick, slow])
    assert (first.cause, first.rank) == (Cause.SCRIPT_CODE, None)
    assert first.cost_seconds_per_step == pytest.approx(0.05)
    assert (second.cause, second.rank) == (Cause.SLOW_RANK, 1)
    assert second.cost_seconds_per_step == pytest.approx(0.03)


def test_script_code_costs_what_earlier_causes_leave() -> None:
    """A garbage collection in the same phase takes its part first, in proportion to all own work."""
    first, second = rank_causes("r", [newcomer(collected_seconds=0.01)])
    assert (first.cause, second.cause) == (Cause.SCRIPT_CODE, Cause.GARBAGE_COLLECTION)
    assert second.cost_seconds_per_step == pytest.approx(0.01)
    assert first.cost_seconds_per_step == pytest.approx(0.0346 * (1 - 0.01 / 0.0494), rel=1e-3)


def test_script_code_costs_its_wait_for_processors_too() -> None:
    """The phase has 70 % of the step, most of it without a processor: all of it comes back with the code."""
    (only,) = rank_causes("r", [newcomer(queued_seconds=0.8 * 0.0494)])
    assert only.cause is Cause.SCRIPT_CODE
    assert only.cost_seconds_per_step == pytest.approx(0.0346)
    assert only.note.startswith("busy node: everything takes 5.0 times as long")


def test_script_code_stays_beside_a_slowdown_without_a_cause() -> None:
    now = since(newcomer(), changed(newcomer(), forward=0.026))
    found = rank_causes("r", [now])
    assert {each.cause for each in found} == {Cause.UNKNOWN, Cause.SCRIPT_CODE}
    assert {each.cause: each.has_grown for each in found} == {Cause.UNKNOWN: True, Cause.SCRIPT_CODE: False}
    assert sum(each.cost_seconds_per_step for each in found) <= now.step_seconds


def test_script_code_that_has_grown_is_one_verdict() -> None:
    (verdict,) = rank_causes("r", [since(newcomer(), changed(newcomer(), other=0.06))])
    assert (verdict.cause, verdict.has_grown) == (Cause.SCRIPT_CODE, True)
    assert verdict.cost_seconds_per_step == pytest.approx(0.06)
    assert "25.4 ms of it more than before" in verdict.evidence


def test_script_code_that_is_new_costs_its_growth() -> None:
    past = changed(newcomer(), other=0.001)
    (verdict,) = rank_causes("r", [since(past, newcomer())])
    assert (verdict.cause, verdict.has_grown) == (Cause.SCRIPT_CODE, True)
    assert verdict.cost_seconds_per_step == pytest.approx(0.0336)
    (verdict,) = rank_causes("r", [since(past, changed(past, other=0.0035))])
    assert (verdict.cause, verdict.phase) == (Cause.UNKNOWN, "other")


def test_script_code_and_data_both_outlast_a_slowdown() -> None:
    before = changed(newcomer(), data=0.03)
    found = rank_causes("r", [since(before, changed(before, backward=0.02))])
    assert {each.cause for each in found} == {Cause.UNKNOWN, Cause.INPUT_BOUND, Cause.SCRIPT_CODE}


def starved_input(queued: float, data: float) -> list[RankEvidence]:
    """Return eight ranks on the CPU that wait for data alike, part of the time without a processor."""
    return [
        replace(changed(rank(number), data=data), queued_seconds=queued, device_busy=None)
        for number in range(8)
    ]


def test_rank_causes_data_wait_is_the_cause_on_a_busy_node() -> None:
    (only,) = rank_causes("r", starved_input(queued=0.06, data=0.1))
    assert only.cause is Cause.INPUT_BOUND
    assert only.cost_seconds_per_step == pytest.approx(0.1)
    assert "busy node: everything takes 1.4 times as long" in only.note


def test_rank_causes_data_wait_alone_has_one_time() -> None:
    (only,) = rank_causes("r", starved_input(queued=0.0, data=0.1))
    assert only.evidence.endswith("step waiting for data")


def test_rank_causes_contention_names_threads_and_tune() -> None:
    loader = LoaderFacts(cpus=1.0, rest_cpus=1.0, queued=0.5)
    (verdict,) = rank_causes(
        "r", [replace(rank(0), device_busy=None, queued_seconds=0.4 * STEP, loader=loader)]
    )
    assert verdict.fix.startswith("OMP_NUM_THREADS=1 (now about 2 ")
    assert "`torchperfd tune --only threads SCRIPT`" in verdict.fix
    assert verdict.saves_seconds == 0


@pytest.mark.parametrize(
    ("threads", "setting"), [(3, "torch.set_num_threads(1) (now 3)"), (1, "end or move")]
)
def test_rank_causes_contention_advises_no_threads_in_effect(threads: int, setting: str) -> None:
    loader = LoaderFacts(cpus=1.0, rest_cpus=1.0, queued=0.7)
    much = [
        replace(rank(number), device_busy=None, queued_seconds=0.4 * STEP, loader=loader, threads=threads)
        for number in range(8)
    ]
    (verdict,) = rank_causes("r", much)
    assert verdict.fix.startswith(setting)


def growing(number: int, grown: float = 0.02) -> RankEvidence:
    """Return a rank without a device whose forward is longer by so much than at the start."""
    longer = replace(changed(rank(number), forward=0.03 + grown), device_busy=None)
    return replace(
        longer, step_grows_seconds=grown / 100, step_grown_seconds=grown, step_grows_phase="forward"
    )


def test_growing_steps_cost_what_they_have_grown_by() -> None:
    first = rank_causes("r", [growing(number) for number in range(4)])[0]
    assert (first.cause, first.rank, first.phase) == (Cause.GROWING_STEPS, None, "forward")
    assert first.cost_seconds_per_step == pytest.approx(0.02)
    assert "each step takes 200 µs more than the one before, most of it in forward" in first.evidence
    half = [growing(number) if number < 2 else replace(rank(number), device_busy=None) for number in range(4)]
    assert Cause.GROWING_STEPS not in {each.cause for each in rank_causes("r", half)}


def on_devices(number: int, more: float = 0.0) -> RankEvidence:
    """Return a rank that waits for others on its device, in a step of 100 ms; its forward may be longer."""
    host = {"data": 0.001, "forward": 0.005, "backward": 0.004, "collective_wait": 0.001, "other": 0.089}
    device = {"forward": 0.03 + more, "backward": 0.035, "collective_wait": 0.03 - more, "other": 0.005}
    return RankEvidence(
        number,
        "a",
        STEP,
        host,
        device,
        on_device=True,
        sync_seconds=0.08,
        late_seconds=more,
        late_phase="forward" if more else "",
    )


def test_two_ranks_with_slow_devices_cost_what_both_are_late_by() -> None:
    """Each of them alone costs nothing: the others wait for the second one as long."""
    ranks = [on_devices(number, 0.025 if number in (2, 4) else 0.0) for number in range(6)]
    first = rank_causes("r", ranks)[0]
    assert (first.cause, first.rank, first.phase) == (Cause.SLOW_RANK, 2, "forward")
    assert first.cost_seconds_per_step == pytest.approx(0.025, rel=0.1)
    assert "so does rank 4" in first.evidence


@pytest.mark.parametrize(("periodic", "cost"), [(0.0, 0.042), (0.035, 0.035), (0.06, 0.042)])
def test_saves_on_devices_cost_what_recurring_steps_take_longer(periodic: float, cost: float) -> None:
    """A device works through what was queued while its host saves."""
    ranks = [replace(on_devices(number), checkpoint_seconds=0.042) for number in range(2)]
    first = rank_causes("r", [replace(each, periodic_seconds=periodic) for each in ranks])[0]
    assert first.cause is Cause.CHECKPOINT
    assert first.cost_seconds_per_step == pytest.approx(cost)


def test_loss_on_devices_costs_no_more_than_steps_have_grown() -> None:
    now = [on_devices(0), replace(on_devices(1, 0.025), collected_seconds=0.025)]
    past = replace(
        on_devices(0),
        step_seconds=0.083,
        phase_seconds={**now[0].phase_seconds, "other": 0.072},
        device_phase_seconds={**now[0].device_phase_seconds, "collective_wait": 0.013},
        sync_seconds=0.063,
    )
    ranks = [replace(each, before=replace(past, rank=each.rank)) for each in now]
    first = rank_causes("r", ranks)[0]
    assert (first.cause, first.rank) == (Cause.GARBAGE_COLLECTION, 1)
    assert first.cost_seconds_per_step == pytest.approx(0.017)


def test_held_interpreter_costs_all_of_a_ranks_lateness() -> None:
    """Only what falls into phases that compute is measured."""
    first = rank_causes("r", eight(replace(late(rank(1), "forward", 0.04), blocked_seconds=0.033)))[0]
    assert (first.cause, first.rank) == (Cause.INTERPRETER_LOCK, 1)
    assert first.cost_seconds_per_step == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize(("threads", "cause"), [(2, Cause.TOO_MANY_THREADS), (1, Cause.NONE)])
def test_more_threads_than_cpus_count_from_a_tenth_of_the_step(threads: int, cause: Cause) -> None:
    facts = LoaderFacts(cpus=1.0, rest_cpus=0.6, queued=0.48)
    ranks = [
        replace(rank(number), device_busy=None, queued_seconds=0.024, threads=threads, cpus=1.0, loader=facts)
        for number in range(2)
    ]
    first = rank_causes("r", ranks)[0]
    assert first.cause is cause
    if cause is not Cause.NONE:
        assert first.fix.startswith("torch.set_num_threads(1) (now 2)")


def test_ranks_that_lose_time_alternately_are_not_blamed() -> None:
    """Each waits for the other's loader: without that of one rank, the other's would take nearly as long."""
    data = np.array([[0.06, 0.0] * 12, [0.0, 0.025] * 12])
    forward = np.full(24, 0.04)
    waits = data.max(axis=0) - data
    works = {
        rank: RankWork(rank, {"data": data[rank], "forward": forward, "collective_wait": waits[rank]})
        for rank in range(2)
    }
    ranks = [
        RankEvidence(
            rank,
            "a",
            float((data[rank] + forward + waits[rank]).mean()),
            {name: float(column.mean()) for name, column in work.phase_seconds.items()},
        )
        for rank, work in works.items()
    ]
    first = rank_causes("r", ranks, works=works)[0]
    assert (first.cause, first.rank) == (Cause.INPUT_BOUND, None)
    assert first.cost_seconds_per_step == pytest.approx(0.0425)
