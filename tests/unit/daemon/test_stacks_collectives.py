"""Who keeps whom waiting, by the numbers of collectives alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.stacks import Frame, GroupProgress, Outcome, RankStacks, Thread, merge
from torchperfd_daemon.stacks.merge import Missed, culprits, missed
from torchperfd_daemon.stacks.report import sentence

BACKWARD = (
    Frame("/x/site-packages/torch/autograd/graph.py", 8, "_engine_run_backward"),
    Frame("/t.py", 3, "f"),
)


def at(number: int, call: str = "all_reduce", group: str = "0") -> GroupProgress:
    """In a collective."""
    return GroupProgress(group, "default_pg" if group == "0" else "undefined", number, number, call, "4")


def past(begun: int, group: str = "0") -> GroupProgress:
    """In none, with all of them over up to this one."""
    return GroupProgress(group, "default_pg", begun, 0, "", "")


def stacks(*groups: tuple[GroupProgress, ...]) -> list[RankStacks]:
    thread = Thread(1, "MainThread", True, False, BACKWARD)
    return [
        RankStacks(rank, len(groups), "a", 1, Outcome.ANSWERED, "", (thread,), collectives=each)
        for rank, each in enumerate(groups)
    ]


def test_missing_rank_is_named_though_all_stacks_are_alike() -> None:
    ranks = stacks((at(9),), (at(9),), (past(8),), (at(9),))
    (found,) = missed(ranks)
    assert found == Missed("default_pg", 9, "all_reduce", "4", (0, 1, 3), (2,), ())
    merged = merge(ranks)
    assert merged.odd == (2,)
    assert sentence(merged) == (
        "ranks 0-3 are in backward (t.py:3 in f);"
        " rank 2 has not entered all_reduce number 9 of default_pg (4)"
    )


def test_of_two_ranks_it_is_the_one_that_has_not_come() -> None:
    assert merge(stacks((past(8),), (at(9),))).odd == (0,)


def test_rank_in_another_collective_blocks_the_others() -> None:
    merged = merge(stacks((at(9),), (at(9, "barrier"),), (at(9),)))
    assert merged.odd == (1,)
    assert sentence(merged).endswith("; all_reduce number 9 of default_pg (4): rank 1 calls barrier")


def test_two_ranks_in_two_collectives_blame_none() -> None:
    assert missed(stacks((at(9),), (at(9, "barrier"),))) == ()


def test_blame_passes_to_the_rank_that_waits_for_none() -> None:
    # Rank 1 is late to the first group for it waits in the second, to which rank 2 has not come.
    ranks = stacks((at(9),), (past(8), at(4, group="5")), (past(3, "5"),))
    found = missed(ranks)
    assert [(each.group, each.waiting, each.absent) for each in found] == [
        ("default_pg", (0,), (1,)),
        ("group 5", (1,), (2,)),
    ]
    assert culprits(found) == (2,)


def test_a_rank_further_on_is_not_to_blame() -> None:
    """A broadcast is over for who sends it."""
    (found,) = missed(stacks((past(9),), (at(9, "broadcast"),), (past(8),)))
    assert (found.waiting, found.absent) == ((1,), (2,))


@pytest.mark.parametrize(
    "groups", [[], [()], [(), ()], [(past(4),), (past(4),)], [(at(4),), (at(4),)], [(past(3),), (past(5),)]]
)
def test_without_a_blocked_collective_the_stacks_decide(
    groups: list[tuple[GroupProgress, ...]],
) -> None:
    merged = merge(stacks(*groups))
    assert (merged.missed, merged.odd) == ((), ())


PROGRESS = st.one_of(st.builds(past, st.integers(0, 4)), st.builds(at, st.integers(1, 4)))


@given(st.lists(PROGRESS, max_size=9))
def test_ranks_behind_in_a_group_are_missing_and_others_wait(members: list[GroupProgress]) -> None:
    ranks = stacks(*((member,) for member in members))
    numbers = [member.number for member in members if member.number]
    behind = [rank for rank, member in enumerate(members) if numbers and member.begun < min(numbers)]
    found = missed(ranks)
    assert [list(each.absent) for each in found] == ([behind] if behind else [])
    assert list(culprits(found)) == behind
    for each in found:
        assert [rank for rank, member in enumerate(members) if member.number == each.number] == [
            *each.waiting
        ]
