"""The median and the 95th percentile of the step time: one rule for every document."""

from array import array

import pytest

from torchperfd_daemon.service.translate_diagnosis import percentiles as messages
from torchperfd_daemon.store import KindTotal, Rank, RankIdentity, StepColumns, Store, Totals, p50_and_p95
from torchperfd_daemon.views import history
from torchperfd_daemon.views.history import RankPercentiles, StepPercentiles

S = 1_000_000_000


def made(store: Store, number: int, *seconds: float) -> Rank:
    """Return a rank that has made steps of these durations."""
    rank = store.join(RankIdentity("a", number, pid=100 + number))
    durations = array("q", [int(each * S) for each in seconds])
    store.add_steps(rank, StepColumns(durations, durations, {}))
    rank.totals = Totals(train=KindTotal(len(seconds), sum(durations)))
    return rank


def test_percentiles_are_interpolated_between_neighbours() -> None:
    p50, p95 = p50_and_p95([1, 2, 4, 8])
    assert (float(p50), float(p95)) == pytest.approx((3.0, 7.4))
    rows = p50_and_p95([[1, 2, 4, 8], [1, 1, 1, 1]])
    assert [row.tolist() for row in rows] == [[3.0, 1.0], [pytest.approx(7.4), 1.0]]


def test_percentiles_of_a_rank_are_those_of_its_message() -> None:
    store = Store()
    ranks = [made(store, 0, *range(1, 8)), made(store, 1, 0.25, 0.5), made(store, 2, *range(7, 0, -1))]
    found = {each.rank: each for each in history.rank_percentiles(history.recent_durations(ranks))}
    for rank in ranks:
        [whole] = messages(rank.history.newest())
        own = found[rank.identity.rank]
        assert (own.p50_seconds, own.p95_seconds) == pytest.approx((whole.p50_ns / S, whole.p95_ns / S))


def test_percentiles_of_a_run_are_of_all_its_steps() -> None:
    store = Store()
    durations = history.recent_durations([made(store, 0, 1, 1, 1), made(store, 1, 3, 3), made(store, 2)])
    assert history.run_percentiles(durations) == StepPercentiles(1.0, 3.0, RankPercentiles(1, 3.0, 3.0))
    assert history.run_percentiles({}) is None
    assert history.rank_percentiles({}) == []


def test_percentiles_leave_out_the_first_step_of_a_run() -> None:
    rank = made(Store(), 0, 60, 1, 1)
    rank.totals = Totals(train=KindTotal(3, 62 * S), warmup=KindTotal(1, 60 * S))
    assert history.run_percentiles(history.recent_durations([rank])) == StepPercentiles(
        1.0, 1.0, RankPercentiles(0, 1.0, 1.0)
    )


def test_percentiles_leave_out_ranks_that_have_left() -> None:
    store = Store()
    ranks = [made(store, 0, 1), made(store, 1, 2)]
    store.leave(ranks[1])
    assert [*history.recent_durations(ranks)] == [0]
    store.leave(ranks[0])
    assert [*history.recent_durations(ranks)] == [0, 1], "the run has ended"
