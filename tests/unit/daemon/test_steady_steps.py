"""First steps that are left out, and long steps that are named."""

from array import array
from dataclasses import replace

import pytest
from tests.support.values import some

from torchperfd.model.totals import GcTotals, PhaseTotals
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import whatif
from torchperfd_daemon.diagnosis.detect.straggler import MIN_STEPS
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.mean_step import find_long_steps
from torchperfd_daemon.service import node_survey, translate
from torchperfd_daemon.service.node_survey import verdict_on
from torchperfd_daemon.service.translate_diagnosis import LONG_STEPS_WORDS, run_verdict_to_message
from torchperfd_daemon.store.model import (
    HISTORY_STEPS,
    MIN_PRESENT_STEPS,
    KindTotal,
    RankIdentity,
    StepColumns,
    Totals,
)
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.model import of_the_present, steady

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
                "data": PhaseTotals(len(data[part]), sum(data[part])),
                "forward": PhaseTotals(len(rest[part]), sum(rest[part])),
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
    status = translate.rank_status_to_message(rank)
    assert status.step_seconds == pytest.approx(0.006)
    assert dict(status.phase_seconds) == pytest.approx({"data": 0.002, "forward": 0.004})
    assert status.steps == 3


def test_status_only_one_step_is_shown() -> None:
    _, rank = run_of((900, 100))
    assert translate.rank_status_to_message(rank).step_seconds == pytest.approx(1.0)


def test_status_first_step_not_held_leaves_nothing_out() -> None:
    _, rank = run_of((900, 100), (1, 3), (3, 5), kept=2)
    assert translate.rank_status_to_message(rank).step_seconds == pytest.approx(0.006)


def messages(store: Store) -> list[control_pb2.RankSteps]:
    return list(node_survey.newest_steps(store, control_pb2.GetStepsRequest()).ranks)


def test_ranks_slow_first_step_is_in_no_mean() -> None:
    store, _ = run_of((900, 100), (1, 3), (3, 5))
    [view] = _view.runs(messages(store))
    assert view.step_seconds == pytest.approx(0.006)
    assert view.ranks[0].phase_seconds == pytest.approx({"data": 0.002, "forward": 0.004})
    assert view.ranks[0].window == 2


@pytest.mark.parametrize("changed", [[(240, 400)] * 20, [(0, 5000)] * 3, [(9, 1)] * 2000])
def test_top_shows_the_steps_that_the_daemon_counts(changed: list[tuple[float, float]]) -> None:
    store, rank = run_of(*[(9, 388)] * 60, *changed)
    [view] = _view.runs(map(of_the_present, messages(store)))
    [shown] = view.ranks
    assert shown.window == min(rank.present_steps, HISTORY_STEPS)
    assert shown.step_seconds == pytest.approx(rank.mean_step_seconds())
    assert shown.phase_seconds == pytest.approx(rank.mean_phase_seconds())


def test_blocks_slow_first_step_is_in_none() -> None:
    _, rank = run_of((900, 100), *[(1, 3)] * 60)
    for newest in (0, 256):
        message = node_survey.blocks(rank, newest)
        [view] = _view.runs([message])
        assert view.step_seconds == pytest.approx(0.004)


def test_whatif_slow_first_step_is_not_replayed() -> None:
    store, _ = run_of((5000, 100), *[(1, 3)] * 20)
    replayed = some(whatif.replay_newest([*map(steady, messages(store))], 0))
    assert replayed.steps == 20
    assert replayed.step_seconds == pytest.approx(0.004)


MILLISECOND_NS = 1_000_000


def rank_of(steps: list[dict[str, float]], number: int = 0, store: Store | None = None) -> Rank:
    """A rank whose steps take so many milliseconds in each phase."""
    store = store or Store()
    rank = store.join(RankIdentity("a", number, pid=100 + number))
    names = sorted({name for each in steps for name in each})
    columns = {
        name: array("q", [int(each.get(name, 0) * MILLISECOND_NS) for each in steps]) for name in names
    }
    durations = array("q", map(sum, zip(*columns.values(), strict=True)))
    store.add_steps(rank, StepColumns(durations, durations, columns, next_step=len(steps)))
    phases = {name: PhaseTotals(len(steps), sum(column)) for name, column in columns.items()}
    squares = float(sum(ns * ns for ns in durations))
    rank.totals = Totals(train=KindTotal(len(steps), sum(durations), phases=phases, squares=squares))
    return rank


def run_of_long_steps(phase: str, *, every: int = 50, steps: int = 400, longer: float = 200) -> Rank:
    usual = {"forward": 1.0, "backward": 1.0}
    return rank_of([{**usual, phase: longer if at % every == every - 1 else 0.2} for at in range(steps)])


def words(*ranks: Rank) -> str:
    found = find_long_steps(ranks)
    return "" if found is None else found.words()


def test_long_steps_name_first_batches_of_epochs() -> None:
    rank = run_of_long_steps("data")
    rank.totals = replace(rank.totals, train_pass=PhaseTotals(8, 1))
    assert words(rank) == (
        "about 8 of 400 steps are long, 202 ms each: the mean is 6.2 ms, and 95% of the newest steps take"
        " at most 2.2 ms; most of what they take longer is in data: the first batch of an epoch (8 have"
        " ended); the newest of them: 299, 349, 399"
    )


@pytest.mark.parametrize(
    ("phase", "totals", "why"),
    [
        ("checkpoint", {}, "is in checkpoint: 400 saves within steps"),
        ("validate", {}, "is in validate: validation within steps"),
        (
            "other",
            {"gc": (GcTotals(8, 1500 * MILLISECOND_NS),)},
            "is in other: Python's garbage collector (8 collections)",
        ),
        ("forward", {"compiled": PhaseTotals(3, 1500 * MILLISECOND_NS)}, "is in forward: compilations (3)"),
        ("data", {}, "is in data;"),
    ],
)
def test_long_steps_name_what_makes_them_long(phase: str, totals: dict[str, object], why: str) -> None:
    rank = run_of_long_steps(phase)
    rank.totals = replace(rank.totals, **totals)  # type: ignore[arg-type]
    assert why in words(rank)


def test_long_steps_name_the_rank_that_others_wait_for() -> None:
    store = Store()
    long = {"forward": 2.0, "other": 200.0}
    waiting = {"forward": 2.0, "collective_wait": 200.0}
    usual = {"forward": 2.0, "other": 0.1}
    at = [each % 50 == 49 for each in range(200)]
    ranks = [
        rank_of([waiting if each else usual for each in at], 0, store),
        rank_of([long if each else usual for each in at], 1, store),
    ]
    assert "is in other" in words(*ranks)
    assert "wait for other ranks, which are not on this node" in words(ranks[0])


@pytest.mark.parametrize(
    "rank",
    [
        run_of_long_steps("data", longer=0.2),
        run_of_long_steps("data", every=5),
        # Slow for a while, and then not any more.
        rank_of([{"forward": 100.0 if at < 200 else 2.0} for at in range(456)]),
        rank_of([]),
    ],
    ids=["even", "every fifth", "slow at first", "no steps"],
)
def test_long_steps_that_are_none_or_not_few(rank: Rank) -> None:
    assert words(rank) == ""


def test_long_steps_of_compilations_at_the_start_are_over() -> None:
    rank = rank_of([{"forward": 4000.0 if at == 2 else 2.0} for at in range(600)])
    assert "about 1 of 600 steps is long, 4 s: the mean is" in words(rank)
    rank.totals = replace(rank.totals, compiled=PhaseTotals(3, 3900 * MILLISECOND_NS))
    assert words(rank) == ""


def test_long_steps_of_an_unknown_deviation_are_none() -> None:
    rank = run_of_long_steps("data")
    rank.totals = replace(rank.totals, train=replace(rank.totals.train, squares=0.0))
    assert words(rank) == ""


def test_long_steps_are_remarked_beside_any_verdict() -> None:
    rank = run_of_long_steps("data")
    verdict = Verdict(Cause.INPUT_BOUND, "a", "", None, "data", "waits", 0.001, "")
    assert [*run_verdict_to_message(verdict, [rank]).remarks] == [words(rank)]
    assert [*run_verdict_to_message(verdict, [], ended=[rank]).remarks] == [words(rank)]


def test_long_steps_mean_stands_in_one_place() -> None:
    rank = run_of_long_steps("data")
    verdict = Verdict(Cause.UNKNOWN, "a", "", None, "", f"most of it {LONG_STEPS_WORDS}", 0.0, "")
    [remark] = run_verdict_to_message(verdict, [rank]).remarks
    assert "about 8 of 400 steps are long, 202 ms each; most of" in remark
