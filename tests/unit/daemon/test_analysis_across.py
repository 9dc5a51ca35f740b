"""Across ranks: collectives made up with a known truth, against sums done one by one."""

import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd.document.terminal import render
from torchperfd_daemon import analysis

MS = 1_000_000
WORLD = analysis.Kind("allreduce", "0", "[0, 1, 2, 3]", "kernel")


@dataclass(frozen=True)
class Call:
    """One collective as it was: when each rank came, and when all were through."""

    kind: analysis.Kind
    sequence: int
    came: dict[int, int]
    end: int
    bytes: int = -1


def trace_of(
    rank: int, calls: Iterable[Call], *, ahead: int = 0, steps: tuple[int, ...] = (), world: int | None = None
) -> analysis.Collectives:
    """Return what a trace has of a rank's calls, on a clock that is so far ahead."""
    mine = sorted((call for call in calls if rank in call.came), key=lambda call: call.came[rank])
    origin = min((call.came[rank] for call in mine), default=0)
    kinds = list(dict.fromkeys(call.kind for call in mine))
    return analysis.Collectives(
        origin_ns=origin + ahead,
        duration_ns=max((call.end for call in mine), default=0) - origin,
        world_size=world,
        steps=steps,
        kinds=tuple(kinds),
        kind=np.array([kinds.index(call.kind) for call in mine], np.int32),
        sequence=np.array([call.sequence for call in mine], np.int64),
        start=np.array([call.came[rank] - origin for call in mine], np.int64),
        end=np.array([call.end - origin for call in mine], np.int64),
        bytes=np.array([call.bytes for call in mine], np.int64),
    )


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """Return how many moments between two neighbouring edges are in an interval, edge by edge."""
    intervals = list(intervals)
    edges = sorted({edge for each in intervals for edge in each})
    return sum(
        late - early
        for early, late in pairwise(edges)
        if any(start <= early and late <= end for start, end in intervals)
    )


def one_by_one(seen: dict[int, list[Call]]) -> dict[str, Any]:
    """Find each call's ranks by looking at every one, and sum what they waited."""
    calls = {id(call): call for each in seen.values() for call in each}.values()
    waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for_others: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    last: defaultdict[int, int] = defaultdict(int)
    matched: defaultdict[int, int] = defaultdict(int)
    kinds: defaultdict[analysis.Kind, list[int]] = defaultdict(lambda: [0, 0, 0])
    for call in calls:
        came = {rank: call.came[rank] for rank in sorted(seen) if any(call is each for each in seen[rank])}
        if len(came) < 2:
            continue
        transfer = min(call.end - start for start in came.values())
        latest = max(came.values())
        culprit = min(rank for rank, start in came.items() if start == latest)
        last[culprit] += 1
        kinds[call.kind][0] += 1
        kinds[call.kind][1] += transfer
        for rank, start in came.items():
            wait = call.end - start - transfer
            matched[rank] += 1
            kinds[call.kind][2] += wait
            waits[rank].append((start, start + wait))
            for_others[culprit, rank].append((start, start + min(wait, latest - start)))
    return {
        "wait": {rank: union(waits[rank]) for rank in seen},
        "last": {rank: last[rank] for rank in seen},
        "cost": {rank: sum(union(for_others[rank, other]) for other in seen) for rank in seen},
        "matched": {rank: matched[rank] for rank in seen},
        "unmatched": {rank: len(seen[rank]) - matched[rank] for rank in seen},
        "kinds": {kind: tuple(sums) for kind, sums in kinds.items()},
    }


def ours(across: analysis.Across) -> dict[str, Any]:
    return {
        "wait": {each.rank: each.wait_ns for each in across.ranks},
        "last": {each.rank: each.last for each in across.ranks},
        "cost": {each.rank: each.cost_ns for each in across.ranks},
        "matched": {each.rank: each.matched for each in across.ranks},
        "unmatched": {each.rank: each.unmatched for each in across.ranks},
        "kinds": {each.kind: (each.calls, each.transfer_ns, each.wait_ns) for each in across.kinds},
    }


def cut(draw: Any, calls: list[Call], ranks: Iterable[int], most: int) -> dict[int, list[Call]]:
    """Take some calls off the ends of each rank's sequence: the recordings began and ended elsewhere."""
    seen = {}
    for rank in ranks:
        mine = [call for call in calls if rank in call.came]
        off = [draw(st.integers(0, most)) for _ in "ab"]
        seen[rank] = mine[off[0] : len(mine) - off[1]]
    return seen


@st.composite
def numbered(draw: Any) -> tuple[dict[int, list[Call]], list[int]]:
    """Collectives of two overlapping groups that count, in flight at once, on clocks that differ."""
    ranks = list(range(draw(st.integers(2, 4))))
    part = analysis.Kind("_allgather_base", "1", str(ranks[:2]), "kernel")
    calls, counts, moment = [], defaultdict[analysis.Kind, int](int), 0
    for _ in range(draw(st.integers(5, 12))):
        kind = draw(st.sampled_from([WORLD, WORLD, part]))
        counts[kind] += 1
        moment += draw(st.integers(0, 60))
        came = {rank: moment + draw(st.integers(0, 50)) for rank in (ranks if kind is WORLD else ranks[:2])}
        calls.append(Call(kind, counts[kind], came, max(came.values()) + draw(st.integers(0, 40))))
    return cut(draw, calls, ranks, 2), [draw(st.integers(-(10**9), 10**9)) for _ in ranks]


@given(numbered())
def test_numbered_collectives_sum_up_as_one_by_one(case: tuple[dict[int, list[Call]], list[int]]) -> None:
    seen, ahead = case
    wanted = one_by_one(seen)
    across = some(analysis.across({rank: trace_of(rank, seen[rank], ahead=ahead[rank]) for rank in seen}))
    found = ours(across)
    reached = {each.rank for each in across.ranks if each.clock_ns is not None}
    # Which rank came last is known only between clocks that some collective sets alike.
    exact = reached == set(seen)
    for key in wanted if exact else set(wanted) - {"last", "cost"}:
        assert found[key] == wanted[key]
    if exact:
        first = ahead[across.reference]
        assert [each.clock_ns for each in across.ranks] == [each - first for each in ahead]
    assert across.by_sequence == across.matched


@st.composite
def uncounted(draw: Any) -> tuple[dict[int, list[Call]], list[int]]:
    """Collectives of one group that does not count, in recordings of different length, no two alike."""
    ranks = list(range(draw(st.integers(2, 4))))
    names = st.sampled_from(["allreduce", "barrier"])
    pauses = draw(st.lists(st.integers(2 * MS, 400 * MS), min_size=8, max_size=20, unique=True))
    calls, moment = [], 0
    for pause in pauses:
        moment += pause
        came = {rank: moment - draw(st.integers(1, MS)) for rank in ranks}
        calls.append(Call(analysis.Kind(draw(names), "0", "", "kernel"), -1, came, moment))
    return cut(draw, calls, ranks, 1), [draw(st.integers(-(10**12), 10**12)) for _ in ranks]


@given(uncounted())
def test_sequences_without_numbers_are_laid_side_by_side(
    case: tuple[dict[int, list[Call]], list[int]],
) -> None:
    seen, ahead = case
    across = some(analysis.across({rank: trace_of(rank, seen[rank], ahead=ahead[rank]) for rank in seen}))
    assert ours(across) == one_by_one(seen)
    assert [each.clock_ns for each in across.ranks] == [each - ahead[0] for each in ahead]
    assert {each.clock_residual_ns for each in across.ranks} == {0}
    # The parts that the longest recording lacks are at the ends of others, where ends decide.
    assert across.by_order > across.by_end
    assert across.by_sequence == 0


@st.composite
def of_unknown_groups(draw: Any) -> dict[int, list[Call]]:
    """Collectives of groups that the files do not distinguish, at least every other one of all ranks."""
    ranks = list(range(draw(st.integers(3, 5))))
    some = st.lists(st.sampled_from(ranks), min_size=2, unique=True)
    kind = analysis.Kind("all_reduce", "", "", "span")
    # Pauses that differ by nanoseconds only are periodic, and where all is alike ends decide nothing.
    pauses = [ms * MS for ms in draw(st.lists(st.integers(3, 400), min_size=2, max_size=9, unique=True))]
    calls, moment = [], 0
    for number, pause in enumerate(pauses):
        moment += pause
        who = draw(some) if number % 2 else ranks
        came = {rank: moment - draw(st.integers(1, MS)) for rank in who}
        calls.append(Call(kind, -1, came, moment))
    return {rank: [call for call in calls if rank in call.came] for rank in ranks}


def of_pauses(*pauses_ms: int) -> dict[int, list[Call]]:
    """Every other collective is of the first two of three ranks; all arrive at one moment."""
    calls, moment = [], 0
    for number, pause in enumerate(pauses_ms):
        moment += pause * MS
        came = dict.fromkeys(range(2 if number % 2 else 3), moment - 1)
        calls.append(Call(analysis.Kind("all_reduce", "", "", "span"), -1, came, moment))
    return {rank: [call for call in calls if rank in call.came] for rank in range(3)}


@given(of_unknown_groups())
@example(of_pauses(3, 4, 5, 7))
def test_groups_without_distinct_names_are_matched_by_end(seen: dict[int, list[Call]]) -> None:
    across = some(analysis.across({rank: trace_of(rank, seen[rank]) for rank in seen}))
    assert ours(across) == one_by_one(seen)


def late(by: dict[int, int], *, sequence: bool = True, count: int = 10) -> dict[int, list[Call]]:
    """Return the calls of four ranks, to each of which some come so much later."""
    calls = []
    for number in range(count):
        moment = number * (100 + number) * MS
        came = {rank: moment + by.get(rank, 0) for rank in range(4)}
        calls.append(Call(WORLD, number if sequence else -1, came, max(came.values()) + MS, 8 * MS))
    return dict.fromkeys(range(4), calls)


def test_the_slow_rank_is_blamed_for_what_it_costs_each() -> None:
    traces = {rank: trace_of(rank, calls, steps=(4, 5)) for rank, calls in late({2: 30 * MS}).items()}
    across = some(analysis.across(traces))
    slow = some(across.blamed)
    assert (slow.rank, slow.last, slow.cost_ns, slow.wait_ns) == (2, 10, 3 * 10 * 30 * MS, 0)
    assert across.cost_each_ns(slow) == 10 * 30 * MS
    (kind,) = across.kinds
    assert (kind.calls, kind.bytes, kind.transfer_ns) == (10, 80 * MS, 10 * MS)
    assert kind.bytes_per_second == 8e9


@pytest.mark.parametrize("by", [{}, {1: 30 * MS, 2: 30 * MS - 1}, {1: 100}])
def test_no_rank_is_blamed_where_all_are_similar(by: dict[int, int]) -> None:
    calls = late(by)[0]
    # Alternating: of two that are late, each is the later one every other time.
    for call in calls[::2]:
        call.came[1], call.came[2] = call.came[2], call.came[1]
    assert some(analysis.across({rank: trace_of(rank, calls) for rank in range(4)})).blamed is None


@pytest.mark.parametrize("sequence", [True, False])
def test_steps_that_are_on_some_ranks_only_are_left_unmatched(sequence: bool) -> None:
    seen = late({1: 5 * MS}, sequence=sequence)
    traces = {
        0: trace_of(0, seen[0], steps=tuple(range(10))),
        1: trace_of(1, seen[1][3:], steps=tuple(range(3, 10))),
        2: trace_of(2, seen[2][:8], steps=tuple(range(8))),
    }
    across = some(analysis.across(traces))
    assert [(each.matched, each.unmatched) for each in across.ranks] == [(10, 0), (7, 0), (8, 0)]
    assert across.steps == 5
    assert {each.kind: each.calls for each in across.kinds} == {WORLD: 10}


def test_a_rank_without_a_trace_is_named() -> None:
    seen = late({})
    across = some(analysis.across({rank: trace_of(rank, seen[rank], world=4) for rank in (0, 2, 3)}))
    assert across.missing == (1,)
    assert "no trace of rank 1\n" in shown(across)


def test_ranks_that_share_nothing_have_no_common_clock() -> None:
    kinds = [analysis.Kind("allreduce", str(group), "", "kernel") for group in range(2)]
    calls = [
        [Call(kinds[at], n, {2 * at: 10 * n, 2 * at + 1: 10 * n}, 10 * n + 5) for n in range(3)]
        for at in range(2)
    ]
    across = some(analysis.across({rank: trace_of(rank, calls[rank // 2]) for rank in range(4)}))
    assert [each.matched for each in across.ranks] == [3, 3, 3, 3]
    assert [each.clock_ns is None for each in across.ranks] == [False, False, True, False]


def test_one_rank_or_none_is_not_several() -> None:
    assert analysis.across({}) is None
    assert analysis.across({0: trace_of(0, late({})[0])}) is None


def test_traces_without_collectives_say_so() -> None:
    across = some(analysis.across({rank: trace_of(rank, []) for rank in range(2)}))
    assert across.blamed is None
    assert shown(across) == "across ranks\n0 collectives found on several of 2 ranks\n"
    assert analysis.across_to_dict(across)["collectives"] == []


def test_columns_go_from_process_to_process() -> None:
    trace = trace_of(0, late({})[0])
    again = pickle.loads(pickle.dumps(trace))
    assert again.kinds == trace.kinds
    assert again.end.tolist() == trace.end.tolist()


def shown(across: analysis.Across) -> str:
    return render(analysis.across_document(across)) + "\n"
