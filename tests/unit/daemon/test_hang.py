"""Hangs: the rank to blame, from stacks and from the collectives that ranks wait in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd.model.process import GroupProgress
from torchperfd_daemon.diagnosis.detect.straggler import Stall
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.stragglers import find_culprit
from torchperfd_daemon.stacks.merge import Missed, culprits, merge, missed
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.stacks.report import sentence

LIBRARY = "/x/site-packages/torch/"
SCRIPT = "/s/train.py"


def frames(*places: tuple[str, int, str]) -> tuple[Frame, ...]:
    return tuple(Frame(*place) for place in places)


REDUCE = frames((f"{LIBRARY}distributed/distributed_c10d.py", 3000, "all_reduce"), (SCRIPT, 22, "sync"))
BROADCAST = frames((f"{LIBRARY}distributed/distributed_c10d.py", 2000, "broadcast"), (SCRIPT, 25, "share"))
BACKWARD = frames((f"{LIBRARY}autograd/graph.py", 800, "_engine_run_backward"), (SCRIPT, 18, "<module>"))
DATA = frames((f"{LIBRARY}utils/data/dataloader.py", 1400, "_get_data"), (SCRIPT, 12, "<module>"))
COMPUTE = frames((SCRIPT, 31, "compute"))
SAVE = frames((f"{LIBRARY}serialization.py", 900, "save"), (SCRIPT, 40, "<module>"))
EVALUATE = frames((SCRIPT, 50, "score"), (SCRIPT, 55, "evaluate"))


def reported(rank: int, where: tuple[Frame, ...], step: int | None = 50, since: float = 12.0) -> RankStacks:
    thread = Thread(1, "MainThread", True, False, where)
    return RankStacks(
        rank, 4, "node-a", 100 + rank, Outcome.ANSWERED, "", (thread,), "backward", step, 0.1, since
    )


def without_stacks(rank: int, outcome: Outcome, reason: str = "") -> RankStacks:
    return RankStacks(rank, 4, "node-a", 100 + rank, outcome, reason)


def verdict(*ranks: RankStacks, waited: float = 12.0, run_ranks: int = 4) -> Verdict | None:
    return find_culprit("r", ranks, Stall(waited, 10.0, 0.1), run_ranks)


def waiting(*ranks: int, where: tuple[Frame, ...] = REDUCE, step: int = 50) -> list[RankStacks]:
    return [reported(rank, where, step) for rank in ranks]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            reported(2, COMPUTE),
            "rank 2 is at train.py:31 in compute; ranks 0-1,3 wait in all_reduce (train.py:22",
        ),
        (reported(2, BROADCAST), "rank 2 waits in broadcast (train.py:25 in share); ranks 0-1,3 wait in"),
        (
            reported(2, DATA),
            "rank 2 waits for data (train.py:12 in <module>); ranks 0-1,3 wait in all_reduce",
        ),
        (reported(2, BACKWARD), "rank 2 is in backward (train.py:18 in <module>); ranks 0-1,3 wait in"),
        (
            without_stacks(2, Outcome.STOPPED),
            "rank 2 is stopped; ranks 0-1,3 wait in all_reduce (train.py:22 in sync)",
        ),
        (without_stacks(2, Outcome.GONE), "rank 2 is gone; ranks 0-1,3 wait in all_reduce"),
        (without_stacks(2, Outcome.NO_ANSWER), "rank 2 does not answer; ranks 0-1,3 wait in all_reduce"),
    ],
)
def test_rank_away_from_the_waiting_others_is_named_with_line(odd: RankStacks, words: str) -> None:
    found = some(verdict(*waiting(0, 1, 3), odd))
    assert (found.cause, found.rank, found.node) == (Cause.HANG, 2, "node-a")
    assert found.evidence.startswith(f"no step for 12 s: {words}")
    assert found.next_command == "torchperfd stacks --run r"


def test_rank_ahead_of_its_peer_has_skipped_a_collective() -> None:
    """Of two ranks that wait in different places, the one ahead has skipped a collective."""
    found = some(verdict(reported(0, REDUCE, 50), reported(1, BACKWARD, 51), run_ranks=2))
    assert found.rank == 1
    assert found.evidence.endswith("; rank 1 is ahead of the others")


def test_two_ranks_in_different_collectives_blame_none() -> None:
    found = some(verdict(reported(0, REDUCE), reported(1, BROADCAST), run_ranks=2))
    assert found.rank is None
    assert "rank 0 waits in all_reduce" in found.evidence
    assert "rank 1 waits in broadcast" in found.evidence


def test_dead_rank_is_blamed_before_a_finished_one() -> None:
    found = some(
        verdict(
            *waiting(2, 3),
            without_stacks(0, Outcome.GONE, "it has finished"),
            without_stacks(1, Outcome.GONE, "no such process"),
        )
    )
    assert found.rank == 1


@pytest.mark.parametrize("aside", [SAVE, EVALUATE])
def test_saving_and_validating_have_ten_minutes(aside: tuple[Frame, ...]) -> None:
    assert verdict(*waiting(1, 2, 3), reported(0, aside), waited=300) is None
    assert some(verdict(*waiting(1, 2, 3), reported(0, aside), waited=601)).rank == 0


def test_rank_without_a_waiting_peer_hangs_after_ten_minutes() -> None:
    """The script may have its reasons to compute for long."""
    alone = reported(0, COMPUTE)
    assert verdict(alone, run_ranks=1, waited=60) is None
    assert verdict(reported(0, BACKWARD), run_ranks=1, waited=60) is None
    late = some(verdict(alone, run_ranks=1, waited=601))
    assert (late.rank, "train.py:31 in compute" in late.evidence) == (0, True)


def test_a_single_rank_that_waits_for_data_hangs_there() -> None:
    assert some(verdict(reported(0, DATA), run_ranks=1)).rank == 0


def test_all_waiting_here_leaves_the_cause_to_the_other_node() -> None:
    assert verdict(*waiting(0, 1, 2, 3), run_ranks=8) is None
    assert some(verdict(*waiting(0, 1, 2, 3), run_ranks=4)).rank is None


def test_a_run_that_has_made_a_step_meanwhile_goes_on() -> None:
    assert verdict(*(reported(rank, REDUCE, since=0.1) for rank in range(4))) is None
    assert verdict() is None


BACKWARD_FRAME = (
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
    thread = Thread(1, "MainThread", True, False, BACKWARD_FRAME)
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
