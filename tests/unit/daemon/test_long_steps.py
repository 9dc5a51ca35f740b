"""A mean step far above nearly all steps is explained: which steps are long, and what makes them so."""

from array import array
from dataclasses import replace

import pytest

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.observer.mean_step import find_long_steps
from torchperfd_daemon.service.translate_diagnosis import LONG_STEPS_WORDS, verdict_on_ranks
from torchperfd_daemon.store import (
    GcTotal,
    KindTotal,
    PhaseTotal,
    Rank,
    RankIdentity,
    StepColumns,
    Store,
    Totals,
)

MS = 1_000_000


def rank_of(steps: list[dict[str, float]], number: int = 0, store: Store | None = None) -> Rank:
    """A rank whose steps take so many milliseconds in each phase."""
    store = store or Store()
    rank = store.join(RankIdentity("a", number, pid=100 + number))
    names = sorted({name for each in steps for name in each})
    columns = {name: array("q", [int(each.get(name, 0) * MS) for each in steps]) for name in names}
    durations = array("q", map(sum, zip(*columns.values(), strict=True)))
    store.add_steps(rank, StepColumns(durations, durations, columns, next_step=len(steps)))
    phases = {name: PhaseTotal(len(steps), sum(column)) for name, column in columns.items()}
    squares = float(sum(ns * ns for ns in durations))
    rank.totals = Totals(train=KindTotal(len(steps), sum(durations), phases=phases, squares=squares))
    return rank


def run_of(phase: str, *, every: int = 50, steps: int = 400, longer: float = 200) -> Rank:
    usual = {"forward": 1.0, "backward": 1.0}
    return rank_of([{**usual, phase: longer if at % every == every - 1 else 0.2} for at in range(steps)])


def words(*ranks: Rank) -> str:
    found = find_long_steps(ranks)
    return "" if found is None else found.words()


def test_long_steps_name_first_batches_of_epochs() -> None:
    rank = run_of("data")
    rank.totals = replace(rank.totals, train_pass=PhaseTotal(8, 1))
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
            {"gc": (GcTotal(8, 1500 * MS),)},
            "is in other: Python's garbage collector (8 collections)",
        ),
        ("forward", {"compiled": PhaseTotal(3, 1500 * MS)}, "is in forward: compilations (3)"),
        ("data", {}, "is in data;"),
    ],
)
def test_long_steps_name_what_makes_them_long(phase: str, totals: dict[str, object], why: str) -> None:
    rank = run_of(phase)
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
        run_of("data", longer=0.2),
        run_of("data", every=5),
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
    rank.totals = replace(rank.totals, compiled=PhaseTotal(3, 3900 * MS))
    assert words(rank) == ""


def test_long_steps_of_an_unknown_deviation_are_none() -> None:
    rank = run_of("data")
    rank.totals = replace(rank.totals, train=replace(rank.totals.train, squares=0.0))
    assert words(rank) == ""


def test_long_steps_are_remarked_beside_any_verdict() -> None:
    rank = run_of("data")
    verdict = Verdict(Cause.INPUT_BOUND, "a", "", None, "data", "waits", 0.001, "")
    assert [*verdict_on_ranks(verdict, [rank]).remarks] == [words(rank)]
    assert [*verdict_on_ranks(verdict, [], ended=[rank]).remarks] == [words(rank)]


def test_long_steps_mean_stands_in_one_place() -> None:
    rank = run_of("data")
    verdict = Verdict(Cause.UNKNOWN, "a", "", None, "", f"most of it {LONG_STEPS_WORDS}", 0.0, "")
    [remark] = verdict_on_ranks(verdict, [rank]).remarks
    assert "about 8 of 400 steps are long, 202 ms each; most of" in remark
