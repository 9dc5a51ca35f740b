"""The run's first step is in no mean: not in the verdict's, nor in those that commands show."""

from array import array

import pytest

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import whatif
from torchperfd_daemon.diagnosis import Cause
from torchperfd_daemon.diagnosis.detect.straggler import MIN_STEPS
from torchperfd_daemon.service import node_survey, translate
from torchperfd_daemon.service.node_survey import verdict_on
from torchperfd_daemon.store import (
    MIN_PRESENT_STEPS,
    KindTotal,
    PhaseTotal,
    Rank,
    RankIdentity,
    StepColumns,
    Store,
    Totals,
)
from torchperfd_daemon.views import live as _view

MS = 1_000_000
NS = 1_000_000_000


def run_of(*steps_ms: tuple[float, float], kept: int | None = None, run: str = "r") -> tuple[Store, Rank]:
    """Return a store with one rank.

    Args:
        steps_ms: Of each step, the wait for data and the rest.
        kept: How many of the newest the daemon has seen; all by default.
    """
    store = Store()
    rank = store.join(RankIdentity(run=run, rank=0, node="a", pid=1))
    data = [int(each[0] * MS) for each in steps_ms]
    rest = [int(each[1] * MS) for each in steps_ms]
    whole = [one + other for one, other in zip(data, rest, strict=True)]
    ends = [10_000 * MS + sum(whole[: index + 1]) for index in range(len(whole))]
    newest = slice(len(whole) - (len(whole) if kept is None else kept), None)
    store.add_steps(
        rank,
        StepColumns(
            array("q", ends[newest]),
            array("q", whole[newest]),
            {"data": array("q", data[newest]), "forward": array("q", rest[newest])},
        ),
    )

    def total(part: slice) -> KindTotal:
        return KindTotal(
            len(whole[part]),
            sum(whole[part]),
            phases={
                "data": PhaseTotal(len(data[part]), sum(data[part])),
                "forward": PhaseTotal(len(rest[part]), sum(rest[part])),
            },
        )

    rank.totals = Totals(train=total(slice(None)), warmup=total(slice(1)))
    return store, rank


def test_present_steps_are_of_ten_seconds_and_twelve_steps() -> None:
    _, slow = run_of(*[(0, 600)] * 100)
    assert slow.present_steps == 17
    _, slower = run_of(*[(0, 5000)] * 100)
    assert slower.present_steps == MIN_PRESENT_STEPS == MIN_STEPS
    _, changed = run_of(*[(0, 600)] * 80, *[(0, 100)] * 110)
    assert changed.mean_step_seconds() == pytest.approx(0.1)
    _, short = run_of((1400, 10), *[(0, 600)] * 4)
    assert short.present_steps == 4


def test_present_steps_of_a_rank_that_left_are_all() -> None:
    store, rank = run_of(*[(0, 600)] * 100)
    store.leave(rank)
    assert rank.present_steps == rank.steady_steps == 99


def test_next_step_of_client_without_numbers_is_of_totals() -> None:
    store, rank = run_of(*[(0, 600)] * 100)
    assert rank.next_step == 100
    store.add_steps(rank, StepColumns(array("q", [NS]), array("q", [NS]), {}, next_step=107))
    assert rank.next_step == 107


def test_verdict_slow_first_step_is_in_no_figure() -> None:
    """The first step starts two workers, which takes 1.4 s."""
    _, rank = run_of((1400, 10), *[(2.63, 17.47)] * 699)
    verdict = verdict_on("r", [rank], lambda _: None)
    assert verdict.cause is Cause.NONE
    assert "a 20.1 ms step, data 13%" in verdict.evidence


def test_verdict_only_one_step_is_that_step() -> None:
    _, rank = run_of((30, 10))
    verdict = verdict_on("r", [rank], lambda _: None)
    assert verdict.cause is Cause.INPUT_BOUND
    assert "30 ms of each 40 ms step" in verdict.evidence


def test_status_slow_first_step_is_in_no_mean() -> None:
    _, rank = run_of((900, 100), (1, 3), (3, 5))
    status = translate.rank_status(rank)
    assert status.step_seconds == pytest.approx(0.006)
    assert dict(status.phase_seconds) == pytest.approx({"data": 0.002, "forward": 0.004})
    assert status.steps == 3


def test_status_only_one_step_is_shown() -> None:
    _, rank = run_of((900, 100))
    assert translate.rank_status(rank).step_seconds == pytest.approx(1.0)


def test_status_first_step_not_held_leaves_nothing_out() -> None:
    _, rank = run_of((900, 100), (1, 3), (3, 5), kept=2)
    assert translate.rank_status(rank).step_seconds == pytest.approx(0.006)


def messages(store: Store) -> list[control_pb2.RankSteps]:
    return list(node_survey.newest_steps(store, control_pb2.GetStepsRequest()).ranks)


def test_ranks_slow_first_step_is_in_no_mean() -> None:
    store, _ = run_of((900, 100), (1, 3), (3, 5))
    [view] = _view.runs(messages(store))
    assert view.step_seconds == pytest.approx(0.006)
    assert view.ranks[0].phase_seconds == pytest.approx({"data": 0.002, "forward": 0.004})
    assert view.ranks[0].window == 2


def test_blocks_slow_first_step_is_in_none() -> None:
    _, rank = run_of((900, 100), *[(1, 3)] * 60)
    for newest in (0, 256):
        message = node_survey.blocks(rank, newest)
        [view] = _view.runs([message])
        assert view.step_seconds == pytest.approx(0.004)


def test_whatif_slow_first_step_is_not_replayed() -> None:
    store, _ = run_of((5000, 100), *[(1, 3)] * 20)
    replayed = whatif.replay_newest([*map(_view.steady, messages(store))], 0)
    assert replayed is not None
    assert replayed.steps == 20
    assert replayed.step_seconds == pytest.approx(0.004)
