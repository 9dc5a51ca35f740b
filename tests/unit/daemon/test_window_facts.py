"""The observer's window on a rank: its facts, newest rows, device and saves in the background."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon.watched_job import Watched

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.source_lines import SyncWait, TimedLine
from torchperfd.model.totals import PhaseTotals
from torchperfd_daemon.diagnosis.evidence import RankEvidence, strangers_seconds
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.observer.node_context import GpuState, GpuWatch
from torchperfd_daemon.observer.rank_window import NewestRows, WindowEdge, error_of_means, with_window_facts
from torchperfd_daemon.observer.step_changes import StepsBesideSaves
from torchperfd_daemon.store.model import KindTotal, Totals

EVIDENCE = RankEvidence(
    0, "a", 0.1, {"data": 0.02, "collective_wait": 0.03, "forward": 0.05}, collected_seconds=0.01
)
BEFORE = Totals(train=KindTotal(100))
NOW = Totals(train=KindTotal(200, phases={"data": PhaseTotals(200, 1_500_000_000)}))


def facts(now: Totals, before: Totals = BEFORE) -> RankEvidence:
    return with_window_facts(EVIDENCE, WindowEdge.of(before), now)


def test_nothing_known_changes_nothing() -> None:
    assert facts(NOW) == EVIDENCE
    assert facts(BEFORE) == EVIDENCE


def test_own_collectives_are_per_step_with_the_longest_line() -> None:
    now = (TimedLine("/a/train.py", 22, "all_reduce", 2400, 3 * 10**9), TimedLine("b.py", 1, "barrier", 5, 9))
    before = (TimedLine("/a/train.py", 22, "all_reduce", 1200, 2 * 10**9),)
    seen = facts(replace(NOW, script_collectives=now), replace(BEFORE, script_collectives=before))
    assert seen.script_collectives == pytest.approx(12.05)
    assert seen.script_collective_seconds == pytest.approx(0.01)
    assert seen.script_collective_line == "all_reduce() at train.py:22"


def test_own_collectives_take_no_more_than_the_wait() -> None:
    lines = (TimedLine("t.py", 22, "all_reduce", 1200, 50 * 10**9),)
    assert facts(replace(NOW, script_collectives=lines)).script_collective_seconds == 0.03


def test_calls_of_collect_are_named_by_their_line() -> None:
    lines = (TimedLine("/a/train.py", 31, "collect", 6, 600_000_000),)
    seen = facts(replace(NOW, collect_calls=lines))
    assert (seen.called_collection_seconds, seen.collect_line) == (0.006, "train.py:31")
    again = facts(replace(NOW, collect_calls=lines), replace(BEFORE, collect_calls=lines))
    assert (again.called_collection_seconds, again.collect_line) == (0.0, "")


def test_starts_of_epochs_are_spread_over_all_steps() -> None:
    starts = PhaseTotals(10, 550_000_000)
    seen = facts(replace(NOW, epoch_starts=starts, loader=LoaderFacts(workers=2, starts=11)))
    assert seen.epoch_start_seconds == pytest.approx(0.55 / 200)
    assert facts(replace(NOW, epoch_starts=PhaseTotals(10, 10**11))).epoch_start_seconds == 0.02
    assert facts(replace(NOW, epoch_starts=PhaseTotals(1, 10**9))).epoch_start_seconds == 0.0
    assert seen.workers_respawn


@pytest.mark.parametrize(
    "loader", [None, LoaderFacts(), LoaderFacts(workers=2, starts=2), LoaderFacts(starts=9)]
)
def test_workers_that_persist_do_not_start_anew(loader: LoaderFacts | None) -> None:
    assert not facts(replace(NOW, loader=loader)).workers_respawn


def test_switches_and_limits_are_those_of_now() -> None:
    now = replace(NOW, switches=("CUDA_LAUNCH_BLOCKING=1",), graph_limit="forward() at model.py:12")
    seen = facts(now)
    assert seen.switches == ("CUDA_LAUNCH_BLOCKING=1",)
    assert (seen.graph_limit_reached, seen.graph_limit_function) == (True, "forward() at model.py:12")


def test_deviation_of_the_devices_work_is_the_windows() -> None:
    before = PhaseTotals(100, 100 * 7_000_000, 100 * 7e6**2)
    half = [9_000_000] * 15 + [5_000_000] * 15
    squares = before.squares + sum(float(each) ** 2 for each in half)
    now = PhaseTotals(before.calls + len(half), before.ns + sum(half), squares)
    seen = facts(replace(NOW, device_work=now), replace(BEFORE, device_work=before))
    assert seen.own_deviation_seconds == pytest.approx(0.002)
    # With few timed steps in the window, all of the run count.
    few = replace(
        now, calls=before.calls + 9, ns=9 * 7_000_000 + before.ns, squares=before.squares + 9 * 7e6**2
    )
    seen = facts(replace(NOW, device_work=few), replace(BEFORE, device_work=before))
    assert seen.own_deviation_seconds == pytest.approx(0.0, abs=1e-6)
    fewer = PhaseTotals(9, 9 * 7_000_000, 9 * 7e6**2)
    assert facts(replace(NOW, device_work=fewer)).own_deviation_seconds is None


def test_line_that_waits_longest_in_the_window_is_named() -> None:
    before = replace(BEFORE, sync_waits=(SyncWait("t.py", 5, "item", 900),))
    now = replace(NOW, sync_waits=(SyncWait("t.py", 5, "item", 910), SyncWait("t.py", 9, "cpu", 20)))
    assert facts(now, before).sync_line == "cpu() at t.py:9"


@pytest.mark.parametrize(
    ("ran", "others_ran", "threads", "strangers"),
    [
        (0.002, 0.005, 1, 0.005),
        (0.002, 0.005, 2, 0.003),
        (0.002, 0.005, 8, 0.0),
        (0.0, 0.005, 1, 0.0),
        (0.002, 0.005, None, 0.0),
    ],
)
def test_threads_that_do_not_compute_are_those_beyond(
    ran: float, others_ran: float, threads: int | None, strangers: float
) -> None:
    found = strangers_seconds(ran=ran, others_ran=others_ran, threads=threads)
    assert found == pytest.approx(strangers)


KEPT = 4


@given(
    st.lists(st.integers(1, 5), max_size=12),
    st.integers(0, 60),
    st.integers(1, KEPT + 2),
)
def test_newest_rows_are_the_end_of_all(steps: list[int], least: int, most: int) -> None:
    rows, column = NewestRows(KEPT, 2), np.cumsum(steps).tolist()
    for value in column:
        row = rows.add()
        assert row.tolist() == [0.0, 0.0]
        row[1] = value
    kept = column[-KEPT:]
    assert len(rows) == len(kept)
    assert bool(rows) == bool(kept)
    assert [rows[back][1] for back in range(len(rows))] == kept[::-1]
    assert rows.newest(most)[:, 1].tolist() == kept[-most:]
    if kept:
        newest_first = kept[::-1][: most + 1]
        reached = [back for back, value in enumerate(newest_first) if value >= least]
        assert rows.since(least, 1, most) == max(reached, default=0)


def test_error_of_means_is_that_of_the_samples() -> None:
    # Ten steps a sample, of 1, 2 and 3 each.
    rows = np.array([[0.0, 0.0], [10.0, 10.0], [30.0, 20.0], [60.0, 30.0]])
    assert error_of_means(rows, 0, 1) == pytest.approx(1 / np.sqrt(3))


def test_error_of_means_leaves_out_samples_without_a_step() -> None:
    rows = np.array([[0.0, 0.0], [10.0, 10.0], [10.0, 10.0], [40.0, 20.0]])
    assert error_of_means(rows, 0, 1) == pytest.approx(np.sqrt(2) / np.sqrt(2))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_error_of_means_of_one_sample_is_zero(count: int) -> None:
    assert error_of_means(np.ones((count, 2)).cumsum(axis=0), 0, 1) == 0.0


PID = 7


def test_device_is_not_idle_while_its_use_is_unknown() -> None:
    """A rank's GPU is found some seconds after its first step, and the driver may pause."""
    watch = GpuWatch(0.0)
    for now, use in enumerate((None, None, 0.25, None, 0.5), start=1):
        watch.follow(now, GpuState(utilization=use), PID, frozenset())
        assert watch.is_known is (use is not None)
    assert watch.busy_seconds == pytest.approx(1 + 1 + 0.25 + 1 + 0.5)


def test_clock_is_compared_with_its_highest_value() -> None:
    watch = GpuWatch(0.0)
    assert watch.slowdown == 0.0
    for now, clock in enumerate((1.5e9, 2e9, 1.5e9), start=1):
        watch.follow(now, GpuState(clock_hertz=clock), PID, frozenset())
    assert watch.slowdown == pytest.approx(0.25)


@pytest.mark.parametrize(("held_by", "foreign"), [({PID, 8, 9}, 1), ({8, 9}, 0), ({PID, 8}, 0)])
def test_others_are_counted_where_the_driver_shows_the_rank(held_by: set[int], foreign: int) -> None:
    watch = GpuWatch(0.0)
    watch.follow(1.0, GpuState(processes=frozenset(held_by)), PID, frozenset({PID, 8}))
    assert watch.foreign == foreign


STEPS = 12


def compared(*samples: tuple[float, float], scatter: float = 0.01) -> float:
    """Return the extra of a step, after samples of its saving part and its mean step in seconds."""
    chance = random.Random(3)
    beside = StepsBesideSaves()
    for saving, step_seconds in samples:
        beside.add(saving, STEPS, STEPS * step_seconds * chance.gauss(1, scatter))
    return beside.extra_seconds


def test_steps_beside_a_save_are_compared_with_those_around_it() -> None:
    fast, slow = (0.0, 0.08), (1.0, 0.11)
    assert compared(*[fast] * 10, *[slow] * 5) == pytest.approx(0.03, rel=0.1)
    assert compared(*[fast] * 10, *[slow] * 5, *[fast] * 5) == pytest.approx(0.03, rel=0.1)
    assert compared(*([fast] * 6 + [slow] * 6) * 5) == pytest.approx(0.03, rel=0.1)


def test_a_save_that_changes_nothing_costs_nothing() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        beside = StepsBesideSaves()
        for sample in range(40):
            beside.add(float(sample % 10 >= 5), STEPS, STEPS * 0.1 * chance.gauss(1, 0.1))
            assert beside.extra_seconds < 0.02
    assert compared(*[(0.0, 0.1)] * 10, *[(1.0, 0.104)] * 10) == 0.0


def test_steps_that_stay_slow_after_the_save_have_another_cause() -> None:
    assert compared(*[(0.0, 0.08)] * 10, *[(1.0, 0.11)] * 5, *[(0.0, 0.11)] * 5) == 0.0


def test_without_other_steps_nothing_is_known() -> None:
    assert compared(*[(1.0, 0.11)] * 10) == 0.0
    assert compared(*[(0.0, 0.08)] * 4, *[(1.0, 0.11)] * 10) == 0.0
    assert compared(*[(0.3, 0.08)] * 10, *[(1.0, 0.11)] * 10) == 0.0


def test_a_run_that_slows_while_one_rank_saves_has_that_cause() -> None:
    watched = Watched(4)
    watched.train(30)
    watched.job.saving = {0}
    watched.train(15, lambda rank, _step: {"forward": 0.03} if rank == 0 else {})
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank) == (Cause.CHECKPOINT, 0)
    assert verdict.cost_seconds_per_step == pytest.approx(0.03, rel=0.1)
    assert "beside checkpoints that are saved in the background" in verdict.evidence
    watched.job.saving = set()
    watched.train(30)
    assert watched.verdict.cause is Cause.NONE
