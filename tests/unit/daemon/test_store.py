"""The store: who is there, what is remembered, and what is forgotten when."""

import itertools
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clock import Clock

from torchperfd.model.process import HookState
from torchperfd.model.totals import CudaMemory, PhaseTotals
from torchperfd_daemon.store.history import HISTOGRAM_BOUNDS_S, Histogram, History
from torchperfd_daemon.store.model import KindTotal, RankIdentity, StepColumns, Totals
from torchperfd_daemon.store.store import Store


def who(rank: int = 0, run: str = "bert", pid: int = 10, ticks: int = 1, **more: str) -> RankIdentity:
    return RankIdentity(run=run, rank=rank, node="a", pid=pid, process_start_ticks=ticks, **more)  # type: ignore[arg-type]


def steps(durations: Sequence[int], **phases: Sequence[int]) -> StepColumns:
    ends = array("q", [1_000 + sum(durations[: position + 1]) for position in range(len(durations))])
    return StepColumns(
        ends, array("q", durations), {name: array("q", values) for name, values in phases.items()}
    )


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(grace_seconds=60, clock=clock)


def test_ranks_are_listed_by_run_and_rank(store: Store) -> None:
    for run, rank in (("b", 1), ("a", 10), ("b", 0), ("a", 2)):
        store.join(who(rank, run, pid=rank))
    assert [(rank.identity.run, rank.identity.rank) for rank in store.ranks()] == [
        ("a", 2),
        ("a", 10),
        ("b", 0),
        ("b", 1),
    ]
    assert {run: len(ranks) for run, ranks in store.runs().items()} == {"a": 2, "b": 2}
    assert store.connected() == 4


def test_the_same_process_coming_back_keeps_its_record(store: Store, clock: Clock) -> None:
    rank = store.join(who(script="before"))
    store.add_steps(rank, steps([10, 20]))
    rank.totals = Totals(recorded=2)
    store.leave(rank)
    assert (store.connected(), rank.left_at) == (0, 100.0)
    clock.now += 59
    again = store.join(who(script="after"))
    assert again is rank
    assert (len(again.history), again.totals.recorded, again.identity.script) == (2, 2, "after")
    clock.now += 1000
    store.forget_departed()
    assert list(store.ranks()) == [rank], "it is here, so its grace never runs out"
    assert store.connected() == 1


@pytest.mark.parametrize("other", [who(pid=11), who(ticks=2), RankIdentity("bert", 0, node="b", pid=10)])
def test_another_process_in_its_place_starts_afresh(store: Store, other: RankIdentity) -> None:
    rank = store.join(who())
    store.add_steps(rank, steps([10]))
    rank.totals = Totals(dropped={"ring": 3})
    store.leave(rank)
    fresh = store.join(other)
    assert fresh is not rank
    assert list(store.ranks()) == [fresh]
    assert (len(fresh.history), fresh.totals) == (0, Totals())
    assert store.dropped() == {"ring": 3}, "what was lost stays lost"


def test_join_beside_a_living_process_is_named_apart(store: Store) -> None:
    first = store.join(who(), uid=1000)
    store.add_steps(first, steps([10]))
    second, third = (store.join(who(pid=pid), uid=1000) for pid in (11, 12))
    assert [rank.identity.run for rank in (first, second, third)] == ["bert", "bert#2", "bert#3"]
    assert [rank.process.run for rank in (second, third)] == ["bert", "bert"]
    store.leave(second)
    assert (first.connected, len(first.history), len(list(store.ranks()))) == (True, 1, 3)
    # Its name is free again, and a process that comes back has that which it had.
    assert store.join(who(pid=13), uid=1000).identity.run == "bert#2"
    assert store.join(who(pid=12), uid=1000) is third


def test_join_by_another_user_never_enters_the_run(store: Store) -> None:
    first = store.join(who(0), uid=1000)
    second = store.join(who(1, pid=11), uid=1001)
    third = store.join(who(0, pid=12), uid=1001)
    assert [rank.identity.run for rank in (second, third)] == ["bert@1001", "bert@1001"]
    store.leave(first)
    # As long as its record is kept, so is its name.
    assert store.join(who(0, pid=13), uid=1002).identity.run == "bert@1002"
    assert list(store.runs()["bert"]) == [first]
    assert store.join(who(0), uid=1000) is first


def test_join_by_a_name_with_a_suffix_does_not_join_another_run(store: Store) -> None:
    store.join(who(), uid=1000)
    squatter = store.join(who(run="bert@1001"), uid=1002)
    other = store.join(who(pid=11), uid=1001)
    assert (squatter.identity.run, other.identity.run) == ("bert@1001", "bert@1001#2")


def test_join_after_its_process_has_died_takes_the_name(store: Store) -> None:
    first = store.join(who(), uid=1000)
    again = store.join(who(pid=11), uid=1000, has_ended=lambda rank: rank is first)
    assert (again.identity.run, list(store.ranks())) == ("bert", [again])


def test_join_from_two_pid_namespaces_is_two_processes(store: Store) -> None:
    inside = [
        RankIdentity("bert", 0, node="a", pid=1, process_start_ticks=7, pid_namespace=number)
        for number in (4, 5)
    ]
    assert [store.join(identity, uid=1000).identity.run for identity in inside] == ["bert", "bert#2"]


def test_a_rank_goes_when_its_grace_is_over_and_not_before(store: Store, clock: Clock) -> None:
    gone, stays = store.join(who(0)), store.join(who(1))
    store.leave(gone)
    clock.now += 60
    store.forget_departed()
    assert list(store.ranks()) == [gone, stays]
    clock.now += 0.1
    store.forget_departed()
    assert list(store.ranks()) == [stays]


def test_a_new_rank_sweeps_the_departed_ones(store: Store, clock: Clock) -> None:
    store.leave(store.join(who(0)))
    clock.now += 61
    new = store.join(who(1))
    assert list(store.ranks()) == [new]


def test_what_was_dropped_outlives_the_rank_and_counts_once(store: Store, clock: Clock) -> None:
    first, second = store.join(who(0)), store.join(who(1))
    first.totals = Totals(dropped={"ring": 5, "outbox": 1})
    second.totals = Totals(dropped={"ring": 2})
    assert store.dropped() == {"ring": 7, "outbox": 1}
    store.leave(first)
    clock.now += 61
    store.forget_departed()
    store.forget_departed()
    assert len(list(store.ranks())) == 1
    assert store.dropped() == {"ring": 7, "outbox": 1}


def test_a_runs_histogram_goes_with_its_last_rank(store: Store, clock: Clock) -> None:
    first, second, other = store.join(who(0)), store.join(who(1)), store.join(who(0, "gpt"))
    for rank in (first, second, other):
        store.add_steps(rank, steps([2_000_000]))
    assert {run: sum(found.counts) for run, found in store.histograms.items()} == {"bert": 2, "gpt": 1}
    store.leave(first)
    store.leave(other)
    clock.now += 61
    store.forget_departed()
    assert {run: sum(found.counts) for run, found in store.histograms.items()} == {"bert": 2}


def test_steps_leave_their_mark(store: Store) -> None:
    rank = store.join(who())
    assert rank.last_step_unix_seconds == 0
    store.add_steps(rank, steps([10**9, 10**9]))
    assert rank.last_step_unix_seconds == (1_000 + 2 * 10**9) / 1e9
    store.add_steps(rank, steps([]))
    assert rank.last_step_unix_seconds == (1_000 + 2 * 10**9) / 1e9, "an empty batch changes nothing"


def test_an_empty_history_has_no_mean() -> None:
    history = History(4)
    assert (len(history), history.mean_step_seconds(), history.mean_phase_seconds()) == (0, 0.0, {})


def test_a_full_ring_forgets_the_oldest() -> None:
    history = History(3)
    history.append(steps([10**9, 2 * 10**9], data=[10**9, 0]))
    assert (len(history), history.mean_step_seconds()) == (2, 1.5)
    history.append(steps([3 * 10**9, 4 * 10**9], data=[0, 10**9]))
    assert (len(history), history.mean_step_seconds()) == (3, 3.0)
    assert history.mean_phase_seconds() == {"data": pytest.approx(1 / 3)}


def test_a_batch_longer_than_the_ring_leaves_its_end() -> None:
    history = History(2)
    history.append(steps([10**9, 2 * 10**9, 3 * 10**9]))
    assert (len(history), history.mean_step_seconds()) == (2, 2.5)
    history.append(steps([10 * 10**9]))
    assert history.mean_step_seconds() == 6.5, "the oldest made room"


def test_a_phase_that_a_batch_lacks_counts_as_nothing() -> None:
    history = History(2)
    history.append(steps([4, 4], data=[4_000_000_000, 4_000_000_000]))
    history.append(steps([4], loss=[2_000_000_000]))
    assert history.mean_phase_seconds() == {"data": 2.0, "loss": 1.0}


def test_phases_without_end_cost_bounded_memory() -> None:
    history = History(2)
    for number in range(100):
        history.append(steps([1], **{f"phase{number}": [1]}))
    assert len(history.mean_phase_seconds()) == 28


BATCHES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 10**15), max_size=12),
        st.sets(st.sampled_from(["data", "forward", "loss"])),
    ),
    max_size=8,
)


@given(capacity=st.integers(1, 7), batches=BATCHES)
def test_history_is_a_list_that_remembers_its_end(
    capacity: int, batches: list[tuple[list[int], set[str]]]
) -> None:
    history = History(capacity)
    plain: list[tuple[int, dict[str, int]]] = []
    for durations, names in batches:
        columns = {name: [duration // (2 + len(name)) for duration in durations] for name in sorted(names)}
        history.append(steps(durations, **columns) if durations else StepColumns(array("q"), array("q"), {}))
        plain += [
            (duration, {name: column[position] for name, column in columns.items()})
            for position, duration in enumerate(durations)
        ]
    kept = plain[-capacity:]
    assert len(history) == len(kept)
    if kept:
        assert history.mean_step_seconds() == pytest.approx(sum(step for step, _ in kept) / len(kept) / 1e9)
    seen = {name for _, phases in plain for name in phases}
    means = history.mean_phase_seconds()
    assert means.keys() == seen
    for name in seen:
        mean = sum(phases.get(name, 0) for _, phases in kept) / len(kept) / 1e9
        assert means[name] == pytest.approx(mean)


@given(st.lists(st.lists(st.integers(0, 2**62), max_size=30), max_size=4))
def test_every_duration_is_counted_below_the_next_bound(batches: list[list[int]]) -> None:
    histogram = Histogram()
    for durations in batches:
        histogram.observe_ns(array("q", durations))
    every = [ns / 1e9 for durations in batches for ns in durations]
    bounds = [-1.0, *HISTOGRAM_BOUNDS_S, float("inf")]
    expected = [sum(low < each <= high for each in every) for low, high in itertools.pairwise(bounds)]
    assert histogram.counts == expected
    assert histogram.sum_seconds == pytest.approx(sum(every))


def test_a_duration_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram()
    histogram.observe_ns(array("q", [0, 1_000_000, 1_000_001, 60_000_000_000, 60_000_000_001]))
    expected = [0] * (len(HISTOGRAM_BOUNDS_S) + 1)
    expected[0], expected[1], expected[-2], expected[-1] = 2, 1, 1, 1
    assert histogram.counts == expected
    assert histogram.sum_seconds == pytest.approx(120.002000002)


SEEN = KindTotal(phases=dict.fromkeys(("forward", "backward", "other"), PhaseTotals(1)))


@pytest.mark.parametrize(
    ("totals", "hidden"),
    [
        (Totals(SEEN), False),
        (Totals(SEEN, hooks=(HookState("forward"), HookState("wandb", "not installed"))), False),
        (Totals(SEEN, cuda=CudaMemory(1, 1, 1)), True),
        (Totals(SEEN, degradation_level=2), True),
        (Totals(SEEN, hooks=(HookState("backward", "torch has no such name"),)), True),
        (Totals(KindTotal(phases={**SEEN.phases, "backward": PhaseTotals(1, device_calls=1)})), True),
        # Its model was not found.
        (Totals(KindTotal(phases=dict.fromkeys(("backward", "other"), PhaseTotals(1)))), True),
        # The whole step is one graph.
        (Totals(KindTotal(phases={"other": PhaseTotals(1)})), True),
    ],
)
def test_totals_hide_script_code_beside_other_time(totals: Totals, hidden: bool) -> None:
    assert totals.hides_script_code == hidden


@pytest.mark.parametrize(
    ("totals", "unseen"),
    [
        (Totals(SEEN), False),
        (Totals(KindTotal(phases=dict.fromkeys(("backward", "other"), PhaseTotals(1)))), True),
        (
            Totals(
                KindTotal(phases=dict.fromkeys(("backward", "other"), PhaseTotals(1))), degradation_level=2
            ),
            False,
        ),
        (Totals(KindTotal(phases={"other": PhaseTotals(1)})), False),
        (
            Totals(
                KindTotal(phases=dict.fromkeys(("backward", "other"), PhaseTotals(1))),
                hooks=(HookState("forward", "torch has no such name"),),
            ),
            False,
        ),
    ],
)
def test_totals_without_forward_beside_backward_lack_it(totals: Totals, unseen: bool) -> None:
    assert totals.forward_unseen == unseen


def test_device_means_are_shares_of_the_step() -> None:
    phases = {"forward": PhaseTotals(1, 5, device_ns=30), "other": PhaseTotals(1, 9, device_ns=10)}
    assert Totals(KindTotal(1, 14, phases=phases)).device_means(0.1) == {
        "forward": pytest.approx(0.075),
        "other": pytest.approx(0.025),
    }
    assert Totals(SEEN).device_means(0.1) == {}
