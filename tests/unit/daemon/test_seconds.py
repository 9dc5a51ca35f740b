"""Statistics of the store: means by second, and percentiles of the step time."""

from array import array
from collections.abc import Sequence

import pytest

from torchperfd_daemon.service.translate_diagnosis import percentiles_to_messages as messages
from torchperfd_daemon.store.history import SecondHistory
from torchperfd_daemon.store.model import KindTotal, RankIdentity, StepColumns, Totals
from torchperfd_daemon.store.store import Rank, Store, p50_and_p95
from torchperfd_daemon.views import history
from torchperfd_daemon.views.history import RankPercentiles, StepPercentiles

NS = 1_000_000_000
T = 1_700_000_000


def steps(ends: Sequence[float], durations: Sequence[float], **phases: Sequence[float]) -> StepColumns:
    def column(values: Sequence[float]) -> "array[int]":
        return array("q", [round(value * NS) for value in values])

    return StepColumns(column(ends), column(durations), {name: column(each) for name, each in phases.items()})


def test_seconds_have_means_of_the_steps_that_ended_in_them() -> None:
    history = SecondHistory()
    history.append(
        steps([T + 0.4, T + 0.9, T + 1.5], [0.2, 0.4, 0.6], data=[0.1, 0.1, 0.3], collective_wait=[0, 0.2, 0])
    )
    found = history.since()
    assert found.unix_seconds.tolist() == [T, T + 1]
    assert found.steps.tolist() == [2, 1]
    assert found.step_seconds.tolist() == pytest.approx([0.3, 0.6])
    assert found.longest_seconds.tolist() == pytest.approx([0.4, 0.6])
    assert found.phase_seconds["data"].tolist() == pytest.approx([0.1, 0.3], rel=1e-4)
    assert found.phase_seconds["collective_wait"].tolist() == pytest.approx([0.1, 0.0], abs=1e-5)


def test_steps_of_a_second_in_two_batches_make_one_row() -> None:
    whole, parts = SecondHistory(), SecondHistory()
    whole.append(steps([T + 0.1, T + 0.2, T + 0.9], [0.1, 0.3, 0.8], data=[0.05, 0.1, 0.2]))
    parts.append(steps([T + 0.1, T + 0.2], [0.1, 0.3], data=[0.05, 0.1]))
    parts.append(steps([T + 0.9], [0.8], data=[0.2]))
    for one, other in zip((whole.since(),), (parts.since(),), strict=True):
        assert one.steps.tolist() == other.steps.tolist() == [3]
        assert one.step_seconds.tolist() == pytest.approx(other.step_seconds.tolist())
        assert one.phase_seconds["data"].tolist() == pytest.approx([0.35 / 3], rel=1e-3)
        assert other.phase_seconds["data"].tolist() == pytest.approx([0.35 / 3], rel=1e-3)


def test_seconds_without_a_step_have_no_row() -> None:
    history = SecondHistory()
    history.append(steps([T + 0.5], [0.1]))
    history.append(steps([T + 7.5], [0.1]))
    assert history.since().unix_seconds.tolist() == [T, T + 7]
    assert history.since(T).unix_seconds.tolist() == [T + 7]
    assert history.since(newest=3).unix_seconds.tolist() == [T + 7]
    assert history.since(T + 7).unix_seconds.tolist() == []
    assert SecondHistory().since().unix_seconds.tolist() == []


def test_old_seconds_are_overwritten_and_never_seen_again() -> None:
    history = SecondHistory(10)
    for second in range(25):
        history.append(steps([T + second + 0.5], [0.01 * (second + 1)]))
    found = history.since()
    assert found.unix_seconds.tolist() == [*range(T + 15, T + 25)]
    assert found.step_seconds.tolist() == pytest.approx([0.01 * (second + 1) for second in range(15, 25)])
    history.append(steps([T + 1000.5], [1.0]))
    assert history.since().unix_seconds.tolist() == [T + 1000]


def test_a_clock_that_is_set_back_starts_anew() -> None:
    history = SecondHistory(10)
    history.append(steps([T + 0.5], [0.1]))
    # A little late: merged. Too late to have a place: left out.
    history.append(steps([T - 5 + 0.5], [0.2]))
    history.append(steps([T - 15 + 0.5], [0.3]))
    assert history.since().unix_seconds.tolist() == [T - 5, T]
    history.append(steps([T - 3600 + 0.5], [0.4]))
    assert history.since().unix_seconds.tolist() == [T - 3600]
    assert history.since().step_seconds.tolist() == pytest.approx([0.4])


def test_phases_beyond_the_limit_are_in_other() -> None:
    history = SecondHistory()
    names = [f"phase{number}" for number in range(30)]
    history.append(steps([T + 0.5], [3.1], collective_wait=[0.1], **{name: [0.1] for name in names}))
    found = history.since().phase_seconds
    assert len(found) == 12
    assert found["collective_wait"].tolist() == pytest.approx([0.1], rel=1e-3)
    assert sum(column[0] for column in found.values()) == pytest.approx(3.1, rel=1e-3)


def test_history_of_a_rank_takes_at_most_80_kib() -> None:
    store = Store()
    rank = store.join(RankIdentity("a", 0))
    names = [f"phase{number}" for number in range(40)]
    for start in range(0, 1200, 100):
        ends = [T + start + step for step in range(100)]
        columns: dict[str, list[float]] = {name: [0.01] * 100 for name in names}
        store.add_steps(rank, steps(ends, [0.5] * 100, **columns))
    assert len(rank.seconds.since().unix_seconds) == 600
    assert len(rank.history) == 256
    assert rank.history.nbytes + rank.seconds.nbytes <= 80 * 1024


def test_store_reports_that_steps_were_added() -> None:
    store, called = Store(), []
    rank = store.join(RankIdentity("a", 0))
    store.on_steps = lambda: called.append(len(rank.history))
    store.add_steps(rank, steps([T], [0.1]))
    store.add_steps(rank, steps([], []))
    assert called == [1]


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
