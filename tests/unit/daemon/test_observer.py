"""The observer on a simulated job: its verdicts, their ranks, onsets and delays; and cases without one."""

import logging
import random
import re

import numpy as np
import pytest
from benchmarks.accuracy.streams import Change
from tests.support.values import some
from tests.unit.daemon.watched_job import RUN, Watched, assert_named, causes_of, slow

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.detect.onset import OnsetDetector
from torchperfd_daemon.diagnosis.evidence import MIN_FINDINGS, WINDOW_SAMPLES
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.store.model import State


def test_healthy_run_is_none_once_a_window_is_full() -> None:
    reported = Watched().train(60)
    assert reported[: WINDOW_SAMPLES + MIN_FINDINGS] == [None] * (WINDOW_SAMPLES + MIN_FINDINGS)
    assert causes_of(reported) == {Cause.NONE}
    assert reported[WINDOW_SAMPLES + MIN_FINDINGS + 2] is not None


@pytest.mark.parametrize("seed", range(5))
def test_slow_rank_is_named_with_phase_and_cost_within_10_s(seed: int) -> None:
    watched = Watched(seed=seed)
    watched.train(30)
    began = watched.job.step
    assert_named(watched.train(30, slow(seed, forward=0.03)), seed, 10, Cause.SLOW_RANK)
    verdict = watched.verdict
    assert verdict.phase == "forward"
    assert verdict.cost_seconds_per_step == pytest.approx(0.03, rel=0.1)
    assert abs(some(verdict.onset_step) - began) <= 5
    assert watched.observer.stragglers()[RUN].keys() == {seed}


# A rank that is slow now and then, and one with steps that are many times longer.
@pytest.mark.parametrize(("seconds", "every"), [(0.08, 4), (0.25, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_slow_rank_is_named_before_the_window_fills(seed: int, seconds: float, every: int) -> None:
    watched = Watched(seed=seed)
    watched.train(30)
    assert_named(watched.train(20, slow(seed, every=every, forward=seconds)), seed, 8)


@pytest.mark.parametrize("began", [0, 30])
@pytest.mark.parametrize(("phase", "cause"), [("data", Cause.INPUT_BOUND), ("backward", Cause.SLOW_RANK)])
@pytest.mark.parametrize("seed", range(3))
def test_slow_rank_is_named_where_only_devices_wait(seed: int, phase: str, cause: Cause, began: int) -> None:
    """With NCCL the hosts of all ranks spend the same time, but for the loader's."""
    watched = Watched(seed=seed, on_device=True)
    watched.train(began)
    assert_named(
        watched.train(40, lambda rank, _step: {phase: 0.02} if rank == seed else {}), seed, 12, cause
    )
    assert watched.verdict.phase == phase
    # What the ranks have waited for before, the slowest of each step, is no cost of this delay.
    assert 0.017 <= watched.verdict.cost_seconds_per_step <= 0.022


@pytest.mark.parametrize("seed", range(5))
def test_slow_rank_on_a_device_is_named_although_steps_vary(seed: int) -> None:
    """Other users of the machine make all steps longer now and then, which hides the onset."""
    watched = Watched(seed=seed, on_device=True)
    chance = random.Random(seed)
    busy = [chance.random() * 0.12 if step // 40 % 2 else 0.0 for step in range(1000)]
    watched.train(30, lambda _rank, step: {"forward": busy[step]})
    assert_named(watched.train(20, slow(seed, data=0.03)), seed, 9, Cause.INPUT_BOUND)


@pytest.mark.parametrize("seed", range(5))
def test_healthy_ranks_whose_devices_wait_are_not_blamed(seed: int) -> None:
    assert causes_of(Watched(seed=seed, on_device=True).train(60)) == {Cause.NONE}


def test_a_rank_that_was_always_slow_is_named_without_an_onset() -> None:
    watched = Watched()
    watched.train(20, slow(6, backward=0.02))
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.onset_step) == (Cause.SLOW_RANK, 6, None)
    assert verdict.node == "node-0"


def test_two_slow_ranks_are_both_named() -> None:
    watched = Watched()
    watched.train(20, lambda rank, _step: {"forward": 0.03 + 0.01 * (rank == 5)} if rank in (2, 5) else {})
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.SLOW_RANK, 5)
    assert "so does rank 2" in watched.verdict.evidence
    assert watched.observer.stragglers()[RUN].keys() == {2, 5}


@pytest.mark.parametrize(
    ("change", "cause", "rank", "phase", "cost"),
    [
        (slow(1, data=0.04), Cause.INPUT_BOUND, 1, "data", 0.04),
        (slow(3, gc=0.025), Cause.GARBAGE_COLLECTION, 3, None, 0.025),
        # Without a known cause, the phase that has grown is named.
        (slow(optimizer=0.03), Cause.UNKNOWN, None, "optimizer", 0.03),
    ],
)
def test_change_after_20_s_has_its_cause_rank_and_cost(
    change: Change, cause: Cause, rank: int | None, phase: str | None, cost: float
) -> None:
    watched = Watched()
    watched.train(20)
    watched.train(20, change)
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank) == (cause, rank)
    assert phase in (None, verdict.phase)
    assert verdict.cost_seconds_per_step == pytest.approx(cost, rel=0.1)


def test_rank_that_saves_at_every_sample_still_counts() -> None:
    watched = Watched()
    writer = next(watched.store.ranks())
    for _ in range(12):
        watched.job.train(1.0, slow(0, checkpoint=0.02))
        writer.state = State.CHECKPOINTING
        watched.observer.sample()
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.CHECKPOINT, 0)


def test_finding_of_a_sample_is_not_repeated_without_new_steps() -> None:
    watched = Watched()
    watched.train(20)
    watched.train(4, slow(5, forward=0.03))
    watched.stand(5)
    assert watched.verdict.cause is Cause.NONE


def test_time_without_a_processor_is_contention() -> None:
    watched = Watched(ranks=4)
    delay = Family("process_run_delay_seconds", "", "counter", ("run", "rank"))
    watched.families = [delay]
    for second in range(40):
        delay.samples[:] = [((RUN, str(rank)), 0.0) for rank in range(4)]
        delay.samples[2] = ((RUN, "2"), max(0, second - 19) / 0.13 * 0.03)
        watched.train(1, slow(2, forward=0.03 if second >= 20 else 0.0))
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.CPU_CONTENTION, 2)


@pytest.mark.parametrize("seed", range(5))
def test_throttled_rank_is_named_though_its_lateness_varies(seed: int) -> None:
    watched = Watched(ranks=4, seed=seed)
    held_back = Family("process_throttled_seconds", "", "counter", ("run", "rank"))
    held_back.samples[:] = [((RUN, str(rank)), 0.0) for rank in range(4)]
    watched.families = [held_back]
    watched.train(20)
    late = np.random.default_rng(seed).random(500) < 0.25
    reported = []
    for second in range(12):
        held_back.samples[2] = ((RUN, "2"), 0.6 * (second + 1))
        reported += watched.train(1, lambda rank, step: {"forward": 0.3} if rank == 2 and late[step] else {})
    assert_named(reported[10:], 2, 1, Cause.CGROUP_THROTTLING)


@pytest.mark.parametrize("seed", range(5))
def test_rank_with_gc_in_some_steps_is_named_with_any_lateness(seed: int) -> None:
    watched = Watched(ranks=4, seed=seed, spread=0.1)
    watched.train(20)
    late = np.random.default_rng(seed).random(500) < 0.25
    reported = watched.train(14, lambda rank, step: {"gc": 0.13} if rank == 2 and late[step] else {})
    assert_named(reported[10:], 2, 1, Cause.GARBAGE_COLLECTION)


def test_quota_that_throttles_all_ranks_blames_no_rank() -> None:
    watched = Watched(ranks=4)
    held_back = Family("process_throttled_seconds", "", "counter", ("run", "rank"))
    watched.families = [held_back]
    for second in range(40):
        held_back.samples[:] = [((RUN, str(rank)), 0.6 * max(0, second - 19)) for rank in range(4)]
        watched.train(1, slow(forward=0.06 if second >= 20 else 0.0))
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.CGROUP_THROTTLING, None)
    assert watched.observer.stragglers()[RUN] == {}


def test_memory_full_within_the_hour_is_reported_in_advance() -> None:
    watched = Watched(ranks=2)
    resident = Family("process_resident_memory_bytes", "", "gauge", ("run", "rank"))
    available = Family("node_memory_available_bytes", "", "gauge")
    watched.families = [resident, available]
    for _ in range(60):
        grown = watched.job.seconds * 2**20
        resident.samples[:] = [((RUN, "0"), 1e9), ((RUN, "1"), 1e9 + grown)]
        available.samples[:] = [((), 600 * 2**20)]
        watched.train(1)
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.cost_seconds_per_step) == (Cause.MEMORY_PRESSURE, 1, 0.0)
    assert "memory grows by 1 MiB/s and is full in 10 min" in verdict.evidence


def test_what_comes_every_so_many_steps_is_in_the_evidence() -> None:
    watched = Watched()
    watched.train(40, slow(every=5, forward=0.09))
    remark = r"; every 5th step takes (8|9)\d.* ms longer, most of it in forward$"
    assert re.search(remark, watched.verdict.evidence)


def test_what_becomes_slower_bit_by_bit_is_unknown_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchperfd_daemon.diagnosis.detect.onset.OnsetDetector.observe", lambda *_: None)
    watched = Watched(ranks=2)
    reported = watched.train(150)
    began = watched.job.step
    reported += watched.train(90, lambda _rank, step: {"forward": min(0.012, 2e-5 * (step - began))})
    causes = [each.cause for each in reported if each]
    assert set(causes[:150]) == {Cause.NONE}
    assert causes[-1] is Cause.UNKNOWN
    assert "fewer than the" in watched.verdict.evidence


def test_run_after_a_fault_is_healthy_and_keeps_its_cost() -> None:
    watched = Watched()
    watched.train(20)
    watched.train(30, slow(0, forward=0.05))
    assert some(watched.train(30)[-1]).cause is Cause.NONE
    lost = watched.observer.lost_seconds()[RUN][Cause.SLOW_RANK]
    # Of each second a third is lost, from the verdict's start to its end.
    assert 20 / 3 < lost < 40 / 3
    watched.finish()
    watched.observer.sample()
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.SLOW_RANK, 0)


def test_a_slowdown_that_fades_is_over_without_an_onset(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.train(20)
    watched.train(20, slow(optimizer=0.03))
    assert watched.verdict.onset_step is not None
    observe = OnsetDetector.observe

    def keep_quiet(detector: OnsetDetector, seconds: float) -> None:
        observe(detector, seconds)

    with monkeypatch.context() as unseen:
        unseen.setattr(OnsetDetector, "observe", keep_quiet)
        watched.train(40)
    began = watched.job.step
    watched.train(20, slow(optimizer=0.06))
    assert abs(some(watched.verdict.onset_step) - began) <= 5


def test_a_change_of_verdict_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with caplog.at_level(logging.INFO, "torchperfd.observer"):
        watched.train(20)
        watched.train(30, slow(4, forward=0.03))
    words = [record.getMessage() for record in caplog.records]
    assert [word.split(" · ")[0] for word in words] == ["run streamed: none", "run streamed: slow rank"]


def test_onset_is_not_claimed_of_what_was_there_before() -> None:
    """Rank 1 is slow from the start; later all ranks become slower, which rank 1 has no part in."""
    watched = Watched(ranks=4)
    always = slow(1, forward=0.04)
    watched.train(30, always)
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.SLOW_RANK, 1)
    watched.train(30, lambda rank, step: {**always(rank, step), "optimizer": 0.06})
    found = {each.cause: each for each in (watched.verdict, *watched.verdict.others)}
    assert found[Cause.UNKNOWN].onset_step is not None
    assert found[Cause.SLOW_RANK].onset_step is None
    assert "since step" not in found[Cause.SLOW_RANK].summary


def test_verdict_on_an_ended_run_is_of_its_last_window() -> None:
    """Live figures are held while windows differ as much as at the start; the end says "in its last 10 s"."""
    watched = Watched(1)
    watched.train(14, lambda _rank, _step: {"data": 0.08, "forward": 0.03})
    watched.train(24, lambda _rank, _step: {"data": 0.08})
    live = watched.verdict
    watched.finish()
    assert live.cause is watched.verdict.cause is Cause.INPUT_BOUND
    steps = watched.job.ranks[0].newest_step_seconds()
    last = steps[np.cumsum(steps[::-1])[::-1] <= 10]
    assert watched.verdict.step_seconds == pytest.approx(last.mean(), rel=0.02)
    assert watched.verdict.account is not None
    assert watched.verdict.account.step_seconds == pytest.approx(watched.verdict.step_seconds, rel=0.02)
