"""What the totals at both ends of a window show beside the phases."""

from dataclasses import replace

import pytest

from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.source_lines import SyncWait, TimedLine
from torchperfd_daemon.diagnosis import RankEvidence
from torchperfd_daemon.diagnosis.waits import strangers_seconds
from torchperfd_daemon.observer.rank_window import WindowEdge, with_window_facts
from torchperfd_daemon.store import KindTotal, PhaseTotal, Totals

EVIDENCE = RankEvidence(
    0, "a", 0.1, {"data": 0.02, "collective_wait": 0.03, "forward": 0.05}, collected_seconds=0.01
)
BEFORE = Totals(train=KindTotal(100))
NOW = Totals(train=KindTotal(200, phases={"data": PhaseTotal(200, 1_500_000_000)}))


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
    starts = PhaseTotal(10, 550_000_000)
    seen = facts(replace(NOW, epoch_starts=starts, loader=LoaderFacts(workers=2, starts=11)))
    assert seen.epoch_start_seconds == pytest.approx(0.55 / 200)
    assert facts(replace(NOW, epoch_starts=PhaseTotal(10, 10**11))).epoch_start_seconds == 0.02
    assert facts(replace(NOW, epoch_starts=PhaseTotal(1, 10**9))).epoch_start_seconds == 0.0
    assert seen.epoch_steps == pytest.approx(200 / 11)
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


def test_lag_of_the_device_is_the_windows_mean() -> None:
    before = replace(BEFORE, device_lag=PhaseTotal(10, 10**9))
    assert facts(replace(NOW, device_lag=PhaseTotal(30, 2 * 10**9)), before).device_lag_seconds == 0.05
    assert facts(replace(NOW, device_lag=PhaseTotal(10, 10**9)), before).device_lag_seconds is None


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
