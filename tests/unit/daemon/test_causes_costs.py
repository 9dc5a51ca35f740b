"""What a cause costs: beside other causes, with what devices absorb, and for any evidence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon.rank_evidence import (
    STEP,
    Expected,
    all_changed,
    changed,
    eight,
    late,
    rank,
    ranks,
    seen,
    since,
    with_odd,
)

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import rank_causes


def on_nccl(odd: RankEvidence) -> list[RankEvidence]:
    """Return four ranks of 117 ms: rank 2 is late by 20 ms, for which the others' hosts wait in ``other``."""
    waits = {"data": 0.002, "forward": 0.03, "backward": 0.05, "collective_wait": 0.0002, "other": 0.0348}
    own = {**waits, **odd.phase_seconds, "other": 0.0148}
    own["forward"] = 0.117 - sum(seconds for name, seconds in own.items() if name != "forward")
    found = [RankEvidence(number, "a", 0.117, waits, device_busy=0.9, on_device=True) for number in range(4)]
    found[2] = replace(odd, phase_seconds=own)
    return found


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


def test_no_waits_on_devices_are_unknown_too() -> None:
    evidence = [replace(changed(each, collective_wait=0.0), on_device=True) for each in ranks()]
    (verdict,) = rank_causes("bert-17", evidence)
    assert (verdict.cause, verdict.rank) == (Cause.UNKNOWN, None)
    assert "no wait for another rank is seen in each 98 ms step" in verdict.evidence
    (alone,) = rank_causes("bert-17", evidence[:1])
    assert alone.cause is Cause.NONE


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


@pytest.mark.parametrize(("exchange", "unknown"), [(0.001, 0.041), (0.008, 0.04), (0.02, 0.06)])
def test_exchange_growth_beside_own_work_is_not_its_cost(exchange: float, unknown: float) -> None:
    past = [changed(each, collective_wait=0.1) for each in ranks()]
    [verdict] = rank_causes("r", all_changed(past, forward=0.07, collective_wait=0.1 + exchange))
    assert (verdict.cause, verdict.phase) == (Cause.UNKNOWN, "forward")
    assert verdict.cost_seconds_per_step == pytest.approx(unknown)
    results = "8 ms in exchanges that have grown with it" in verdict.evidence
    assert results == (unknown == 0.04)


def test_equally_late_ranks_give_the_same_name_each_sample() -> None:
    for one, other in ((0.040, 0.042), (0.042, 0.040)):
        (verdict,) = rank_causes("r", eight(late(2, "forward", one), late(5, "forward", other)))
        assert seen([verdict]) == [Expected(Cause.SLOW_RANK, 2, one)]
        assert "so does rank 5" in verdict.evidence
    (verdict,) = rank_causes("r", eight(late(2, "forward", 0.04), late(5, "forward", 0.05)))
    assert verdict.rank == 5


def test_exchanges_that_wait_for_cpus_are_no_network_cause() -> None:
    slower = all_changed(ranks(), collective_wait=0.05)
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


@pytest.mark.parametrize(("past", "named"), [(True, 5), (False, None)])
def test_rank_that_lacks_cpus_most_is_named_after_a_slowdown(past: bool, named: int | None) -> None:
    def now(of: RankEvidence) -> RankEvidence:
        slow = replace(changed(of, forward=0.09), queued_seconds=0.06 if of.rank == 5 else 0.036)
        return since(of, slow) if past else slow

    first = rank_causes("bert", [now(each) for each in ranks()])[0]
    if past:
        assert (first.cause, first.rank) == (Cause.CPU_CONTENTION, named)
    assert first.rank == named


@pytest.mark.parametrize(
    ("others", "compiled", "cost"),
    [(0.004, 0.038, 0.04), (0.004, 0.029, 0.029), (0.02, 0.019, 0.02), (0.02, 0.038, 0.02)],
)
def test_compilation_cost_is_full_beside_slower_ranks(others: float, compiled: float, cost: float) -> None:
    """Compilations cost all that their rank does more, also where others have become slower."""
    now = all_changed(ranks(), forward=0.03 + others)
    slow = replace(late(3, "forward", 0.04), compiled_seconds=compiled, late_seconds=0.04 - others)
    found = seen(rank_causes("bert", with_odd(slow, now)))
    expected = [Expected(Cause.RECOMPILATION, 3, cost)]
    assert [each for each in found if each.cause is Cause.RECOMPILATION] == expected


def absorbed(cause: Cause, grown: float, busy: float | None, error: float = 0.0) -> list[RankEvidence]:
    """Return ranks on devices, one of them 40 ms late, whose steps have grown by so much."""
    throttled = cause is Cause.GPU_THROTTLING
    found = []
    for each in eight(late(4, "backward", 0.04)):
        # What a device does is known of the past only: at present it also waits for the late rank.
        now = replace(each, on_device=True, device_busy=None)
        if throttled and each.rank == 4:
            now = replace(now, device_busy=0.7, device_throttled=1.0, device_slowdown=0.5)
        past = replace(rank(each.rank), on_device=True, device_busy=busy, step_error_seconds=error)
        found.append(since(replace(past, step_seconds=now.step_seconds - grown), now))
    return found


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


# Steps that vary hide for how much they have grown.
@pytest.mark.parametrize(("busy", "error"), [(1.0, 0.0), (0.7, 0.005)], ids=["busy", "uncertain growth"])
def test_lateness_that_no_device_absorbs_costs_all_of_it(busy: float, error: float) -> None:
    (verdict,) = rank_causes("r", absorbed(Cause.SLOW_RANK, 0.02, busy=busy, error=error))
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
def test_any_evidence_has_an_answer_the_costliest_first(evidences: list[RankEvidence]) -> None:
    found = rank_causes("r", evidences)
    costs = [verdict.cost_seconds_per_step for verdict in found if verdict.cause is not Cause.UNKNOWN]
    assert found
    assert costs == sorted(costs, reverse=True)
    assert all(cost >= 0 for cost in costs)
    assert len({verdict.cause for verdict in found}) == len(found)


@pytest.mark.parametrize("known", [True, False])
def test_rank_causes_onset_needs_a_known_past(known: bool) -> None:
    """A rank that has joined after the change has no past: what it loses may always have been so."""
    past = RankEvidence(0, "n", 0.1, {"data": 0.002, "forward": 0.098})
    now = RankEvidence(0, "n", 0.2, {"data": 0.102, "forward": 0.098}, before=past if known else None)
    (first, *_) = rank_causes("r", [now])
    assert (first.cause, first.has_grown) == (Cause.INPUT_BOUND, known)


def starved_input(queued: float, data: float) -> list[RankEvidence]:
    """Return eight ranks on the CPU that wait for data alike, part of the time without a processor."""
    return [replace(changed(each, data=data), queued_seconds=queued, device_busy=None) for each in ranks()]


def test_rank_causes_data_wait_is_the_cause_on_a_busy_node() -> None:
    (only,) = rank_causes("r", starved_input(queued=0.06, data=0.1))
    assert seen([only]) == [Expected(Cause.INPUT_BOUND, cost=0.1)]
    assert "busy node: everything takes 1.4 times as long" in only.note


def test_rank_causes_data_wait_alone_has_one_time() -> None:
    (only,) = rank_causes("r", starved_input(queued=0.0, data=0.1))
    assert only.evidence.endswith("step waiting for data")


def test_rank_causes_contention_names_threads_and_tune() -> None:
    loader = LoaderFacts(cpus=1.0, rest_cpus=1.0, queued=0.5)
    (verdict,) = rank_causes("r", ranks(1, device_busy=None, queued_seconds=0.4 * STEP, loader=loader))
    assert verdict.fix.startswith("OMP_NUM_THREADS=1 (now about 2 ")
    assert "`torchperfd tune --only threads SCRIPT`" in verdict.fix
    assert verdict.saves_seconds == 0


@pytest.mark.parametrize(
    ("threads", "setting"), [(3, "torch.set_num_threads(1) (now 3)"), (1, "end or move")]
)
def test_rank_causes_contention_advises_no_threads_in_effect(threads: int, setting: str) -> None:
    loader = LoaderFacts(cpus=1.0, rest_cpus=1.0, queued=0.7)
    much = ranks(device_busy=None, queued_seconds=0.4 * STEP, loader=loader, threads=threads)
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
    assert seen([first]) == [Expected(Cause.GROWING_STEPS, None, 0.02, "forward")]
    assert "each step takes 200 µs more than the one before, most of it in forward" in first.evidence
    half = [growing(0), growing(1), *ranks(4, device_busy=None)[2:]]
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
    evidence = [on_devices(number, 0.025 if number in (2, 4) else 0.0) for number in range(6)]
    first = rank_causes("r", evidence)[0]
    assert seen([first]) == [Expected(Cause.SLOW_RANK, 2, pytest.approx(0.025, rel=0.1), "forward")]
    assert "so does rank 4" in first.evidence


@pytest.mark.parametrize(("periodic", "cost"), [(0.0, 0.042), (0.035, 0.035), (0.06, 0.042)])
def test_saves_on_devices_cost_what_recurring_steps_take_longer(periodic: float, cost: float) -> None:
    """A device works through what was queued while its host saves."""
    saving = [replace(on_devices(number), checkpoint_seconds=0.042) for number in range(2)]
    found = rank_causes("r", [replace(each, periodic_seconds=periodic) for each in saving])
    assert seen(found[:1]) == [Expected(Cause.CHECKPOINT, cost=cost)]


def test_loss_on_devices_costs_no_more_than_steps_have_grown() -> None:
    now = [on_devices(0), replace(on_devices(1, 0.025), collected_seconds=0.025)]
    past = replace(
        on_devices(0),
        step_seconds=0.083,
        phase_seconds={**now[0].phase_seconds, "other": 0.072},
        device_phase_seconds={**now[0].device_phase_seconds, "collective_wait": 0.013},
        sync_seconds=0.063,
    )
    first = rank_causes("r", [replace(each, before=replace(past, rank=each.rank)) for each in now])[0]
    assert seen([first]) == [Expected(Cause.GARBAGE_COLLECTION, 1, 0.017)]


@pytest.mark.parametrize(("threads", "cause"), [(2, Cause.TOO_MANY_THREADS), (1, Cause.NONE)])
def test_more_threads_than_cpus_count_from_a_tenth_of_the_step(threads: int, cause: Cause) -> None:
    facts = LoaderFacts(cpus=1.0, rest_cpus=0.6, queued=0.48)
    evidence = ranks(2, device_busy=None, queued_seconds=0.024, threads=threads, cpus=1.0, loader=facts)
    first = rank_causes("r", evidence)[0]
    assert first.cause is cause
    if cause is not Cause.NONE:
        assert first.fix.startswith("torch.set_num_threads(1) (now 2)")


def test_ranks_that_lose_time_alternately_are_not_blamed() -> None:
    """Each waits for the other's loader: without that of one rank, the other's would take nearly as long."""
    data = np.array([[0.06, 0.0] * 12, [0.0, 0.025] * 12])
    forward = np.full(24, 0.04)
    waits = data.max(axis=0) - data
    works = {
        number: RankWork(number, {"data": data[number], "forward": forward, "collective_wait": waits[number]})
        for number in range(2)
    }
    evidence = [
        RankEvidence(
            number,
            "a",
            float((data[number] + forward + waits[number]).mean()),
            {name: float(column.mean()) for name, column in work.phase_seconds.items()},
        )
        for number, work in works.items()
    ]
    first = rank_causes("r", evidence, works=works)[0]
    assert (first.cause, first.rank) == (Cause.INPUT_BOUND, None)
    assert first.cost_seconds_per_step == pytest.approx(0.0425)
