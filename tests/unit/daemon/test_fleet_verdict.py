"""One verdict on a run of several nodes: who is blamed, and what it costs the whole run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.accounts import uneven_account
from tests.support.golden import check_golden
from tests.support.values import some

from torchperfd.document.terminal import render
from torchperfd.model.step_account import PartKind
from torchperfd_cli.commands import diagnose
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.fleet.verdict import NodePart, judge
from torchperfd_daemon.service.translate_verdict import verdict_to_message

RUN = "bert 17"
STEPS = 48
USUAL = {"data": 0.001, "forward": 0.012, "backward": 0.025, "other": 0.002}


def job(ranks: int, more: Mapping[int, tuple[str, float]] | None = None, seed: int = 7) -> list[RankWork]:
    """Return ranks in step, some of them with more of a phase; all wait for the latest in each step."""
    chance = np.random.default_rng(seed)
    own = []
    for rank in range(ranks):
        slow, seconds = (more or {}).get(rank, ("", 0.0))
        own.append(
            {
                name: (usual + (seconds if name == slow else 0.0)) * chance.normal(1, 0.01, STEPS)
                for name, usual in USUAL.items()
            }
        )
    totals = [np.sum(list(phases.values()), axis=0) for phases in own]
    latest = np.max(totals, axis=0)
    return [
        RankWork(rank, {**phases, "collective_wait": latest - total + 0.002})
        for rank, (phases, total) in enumerate(zip(own, totals, strict=True))
    ]


def says(
    cause: Cause, cost: float = 0.0, node: str = "", rank: int | None = None, evidence: str = "words"
) -> Verdict:
    if cause is Cause.HANG:
        return Verdict(cause, RUN, node, rank, "", evidence, 0.0, "rm -rf", stalled_seconds=cost)
    phase = "data" if cause is Cause.INPUT_BOUND else ""
    return Verdict(cause, RUN, node, rank, phase, evidence, cost, "rm -rf")


def parts(works: Sequence[RankWork], *verdicts: Verdict) -> list[NodePart]:
    """Return the ranks spread over as many nodes as there are verdicts, in order."""
    each = len(works) // len(verdicts)
    return [
        NodePart(f"node-{number + 1}", verdict, tuple(works[number * each : (number + 1) * each]))
        for number, verdict in enumerate(verdicts)
    ]


def on_device(ranks: int) -> list[RankWork]:
    """Return ranks whose hosts do not wait for each other."""
    return [
        RankWork(work.rank, {**work.phase_seconds, "collective_wait": np.full(STEPS, 1e-5)})
        for work in job(ranks)
    ]


def test_waits_that_no_host_sees_are_unknown_on_all_nodes() -> None:
    blind = says(Cause.UNKNOWN, evidence="cannot determine which rank is slow")
    blind = replace(blind, phase="collective_wait")
    assert judge(RUN, parts(on_device(4), blind, blind)).evidence == blind.evidence
    assert judge(RUN, parts(job(4), blind, blind)).cause is Cause.NONE


NONE = says(Cause.NONE, evidence="nothing stands out")
CASES = {
    "healthy": parts(job(4), NONE, NONE),
    "a whole node is slow and does not know": parts(
        job(4, {2: ("forward", 0.02), 3: ("forward", 0.022)}), NONE, NONE
    ),
    "starved of data, one node": parts(
        job(4, {2: ("data", 0.02), 3: ("data", 0.022)}), NONE, says(Cause.INPUT_BOUND, 0.022)
    ),
    "a victim is blamed by its own node": parts(
        job(4, {1: ("other", 0.005), 3: ("forward", 0.03)}),
        says(Cause.SLOW_RANK, 0.005, "node-1", 1),
        says(Cause.GARBAGE_COLLECTION, 0.03, "node-2", 3),
    ),
    "an exchange that is only a wait": parts(
        job(4, {3: ("forward", 0.02)}),
        says(Cause.COLLECTIVE, 0.02, "node-1"),
        says(Cause.SLOW_RANK, 0.02, "node-2", 3),
    ),
    "all nodes alike": parts(
        job(4, dict.fromkeys(range(4), ("data", 0.012))),
        says(Cause.INPUT_BOUND, 0.01),
        says(Cause.INPUT_BOUND, 0.012),
    ),
    "one node hangs and names the rank": parts(
        job(4), says(Cause.HANG, 40.0, "node-1"), says(Cause.HANG, 39.0, "node-2", 2)
    ),
    "two nodes hang and name themselves": parts(
        job(2), says(Cause.HANG, 40.0, "node-1", 0), says(Cause.HANG, 39.0, "node-2", 1)
    ),
    "memory grows": parts(job(4), NONE, says(Cause.MEMORY_PRESSURE, 0.0, "node-2", 2)),
}


def test_the_verdicts_are_the_golden_file() -> None:
    reported = [
        f"# {name}\n{render(diagnose.verdict_document(message))}"
        for name, case in CASES.items()
        for message in [verdict_to_message(judge(RUN, case))]
    ]
    text = "\n\n".join(reported) + "\n"
    check_golden("fleet_diagnose.txt", text)


@pytest.mark.parametrize("name", CASES)
def test_node_order_has_no_effect_and_nodes_give_no_command(name: str) -> None:
    case = CASES[name]
    assert judge(RUN, case[::-1]) == judge(RUN, case)
    assert judge(RUN, case).next_command.startswith("torchperfd ")


@given(st.integers(2, 4), st.integers(1, 4), st.data())
def test_the_slow_rank_is_found_on_whichever_node_it_is(nodes: int, each: int, data: st.DataObject) -> None:
    ranks = nodes * each
    slow = data.draw(st.integers(0, ranks - 1))
    phase = data.draw(st.sampled_from([name for name in USUAL if name != "other"]))
    works = job(ranks, {slow: (phase, 0.03)}, seed=data.draw(st.integers(0, 1000)))
    # The nodes' own verdicts are wrong: the culprit's node has none, another node blames a rank that waits.
    verdicts = [
        says(Cause.NONE)
        if slow // each == number
        else says(Cause.SLOW_RANK, 0.01, f"node-{number + 1}", number * each)
        for number in range(nodes)
    ]
    verdict = judge(RUN, parts(works, *verdicts))
    own = [
        sum(float(column.mean()) for name, column in work.phase_seconds.items() if name != "collective_wait")
        for work in works
    ]
    excess = own[slow] - float(np.median(own[:slow] + own[slow + 1 :]))
    assert verdict.cause is (Cause.INPUT_BOUND if phase == "data" else Cause.SLOW_RANK)
    assert (verdict.rank, verdict.node, verdict.phase) == (slow, f"node-{slow // each + 1}", phase)
    # Without its excess the run still waits for the latest of all ranks, by chance another one in each step.
    assert 0.95 * excess <= verdict.cost_seconds_per_step <= excess


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_healthy_ranks_are_not_blamed(nodes: int, each: int, seed: int) -> None:
    blamed = [says(Cause.SLOW_RANK, 0.02, f"node-{number + 1}", number * each) for number in range(nodes)]
    verdict = judge(RUN, parts(job(nodes * each, seed=seed), *blamed))
    assert verdict.cause is (Cause.SLOW_RANK if nodes == 1 else Cause.NONE), "one node knows all its ranks"


def test_without_waits_each_nodes_own_verdict_is_kept() -> None:
    alone = [
        RankWork(work.rank, {name: c for name, c in work.phase_seconds.items() if name != "collective_wait"})
        for work in job(4, {3: ("forward", 0.05)})
    ]
    verdict = judge(RUN, parts(alone, says(Cause.CPU_CONTENTION, 0.01), NONE))
    assert (verdict.cause, verdict.rank, verdict.evidence) == (
        Cause.CPU_CONTENTION,
        None,
        "words, on node-1",
    )


def test_a_cause_costs_no_more_than_its_rank_is_late_by() -> None:
    works = job(4, {3: ("forward", 0.02)})
    verdict = judge(RUN, parts(works, NONE, says(Cause.CPU_CONTENTION, 0.5, "node-2", 3)))
    assert verdict.cause is Cause.CPU_CONTENTION
    assert verdict.cost_seconds_per_step == pytest.approx(0.02, rel=0.05)


def test_saving_costs_the_run_what_its_node_says() -> None:
    works = job(4)
    saving = says(Cause.CHECKPOINT, 0.004, "node-2", 2)
    reported = judge(RUN, parts(works, NONE, saving))
    assert reported.step_seconds > 0
    assert replace(reported, next_command="rm -rf", step_seconds=0.0, account=None) == saving


def test_unreported_ranks_are_not_called_healthy() -> None:
    here = job(4, {3: ("forward", 0.02)})[:2]
    verdict = judge(RUN, parts(here, NONE), missing=2)
    assert (verdict.cause, verdict.rank, verdict.next_command) == (
        Cause.UNKNOWN,
        None,
        "torchperfd ps --fleet",
    )
    assert re.fullmatch(
        r"all ranks here wait in collectives for 2[12]\.?\d? ms of each 6[12]\.?\d? ms step, and 2 of the"
        r" job's 4 ranks are on no node that answers",
        verdict.evidence,
    )
    blamed = says(Cause.GARBAGE_COLLECTION, 0.02, "node-1", 1)
    part = judge(RUN, parts(here, blamed), missing=2)
    assert (part.cause, part.unseen_ranks) == (Cause.GARBAGE_COLLECTION, 2)
    assert part.evidence.endswith("; 2 of the job's 4 ranks are on no node that answers")


def test_ranks_that_all_nodes_see_together_are_healthy() -> None:
    """Each node has seen half of the job, and says so."""
    half = replace(says(Cause.UNKNOWN, evidence="2 of the job's 4 ranks are not seen"), unseen_ranks=2)
    assert judge(RUN, parts(job(4), half, half)).cause is Cause.NONE
    assert judge(RUN, parts(on_device(4), half, half)).cause is Cause.NONE
    assert judge(RUN, parts(job(4)[:2], half), missing=2).cause is Cause.UNKNOWN


def test_unnamed_part_of_one_nodes_step_is_not_healthy() -> None:
    hidden = replace(says(Cause.UNKNOWN, evidence="the forward is not seen"), phase="other")
    assert judge(RUN, parts(job(4), NONE, hidden)).evidence == "the forward is not seen"
    early = says(Cause.UNKNOWN, evidence="too early: 9 steps so far")
    assert judge(RUN, parts(job(4), early, early)).cause is Cause.UNKNOWN


def test_ranks_of_all_nodes_that_wait_alike_are_not_healthy() -> None:
    works = [
        RankWork(
            work.rank, {**work.phase_seconds, "collective_wait": work.phase_seconds["collective_wait"] + 0.05}
        )
        for work in job(4)
    ]
    verdict = judge(RUN, parts(works, NONE, NONE))
    assert (verdict.cause, verdict.phase) == (Cause.UNKNOWN, "collective_wait")
    assert "no rank is slow by itself" in verdict.evidence


def test_before_and_after_training_the_nodes_are_believed() -> None:
    unseen = says(Cause.UNKNOWN, evidence="no training step was seen")
    assert judge(RUN, [NodePart("node-1", unseen, ()), NodePart("node-2", unseen, ())]).evidence == (
        "no training step was seen"
    )
    over = [NodePart("node-1", NONE, ()), NodePart("node-2", says(Cause.HANG, 9.0), ())]
    assert judge(RUN, over).cause is Cause.HANG
    assert judge(RUN, [NodePart("node-1", NONE, ()), NodePart("node-2", NONE, ())]).evidence == (
        "nothing stands out"
    )
    works = tuple(job(2))
    assert judge(RUN, [NodePart("node-1", NONE, works), NodePart("node-2", unseen, ())]).cause is Cause.NONE


def test_script_code_of_one_node_makes_its_rank_slow() -> None:
    own = says(Cause.SCRIPT_CODE, 0.03, "node-2")
    verdict = judge(RUN, parts(job(4, {3: ("other", 0.03)}), NONE, own))
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SLOW_RANK, 3, "other")
    assert judge(RUN, parts(job(4), own, own)).cause is Cause.SCRIPT_CODE


def test_account_of_all_nodes_sums_to_the_step_of_all_ranks() -> None:
    works = job(4, {2: ("forward", 0.02)})
    account = some(judge(RUN, parts(works, NONE, NONE)).account)
    means = [sum(float(column.mean()) for column in work.phase_seconds.values()) for work in works]
    assert account.step_seconds == pytest.approx(np.median(means))
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds, rel=1e-3)
    (late,) = [part for part in account.parts if part.kind is PartKind.LATE_RANK]
    assert late.rank == 2
    assert late.seconds == pytest.approx(0.015, rel=0.05)


def test_account_of_all_nodes_has_the_uneven_work_of_one() -> None:
    """Nodes send means of blocks, in which work that differs from step to step evens out."""
    uneven = replace(NONE, account=uneven_account())
    waiting = [
        RankWork(work.rank, {**work.phase_seconds, "collective_wait": np.full(STEPS, 0.04)})
        for work in job(4)
    ]
    account = some(judge(RUN, parts(waiting, NONE, uneven)).account)
    share = uneven_account().share(PartKind.UNEVEN_WORK)
    assert account.share(PartKind.UNEVEN_WORK) == pytest.approx(share)
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds, rel=1e-3)


def test_script_collectives_are_of_the_run() -> None:
    waiting = [
        RankWork(work.rank, {**work.phase_seconds, "collective_wait": np.full(STEPS, 0.02)})
        for work in job(4)
    ]
    own = says(Cause.SCRIPT_COLLECTIVES, 0.015, "node-2")
    blamed = replace(says(Cause.SLOW_RANK, 0.02, "node-2", 3), others=(own,))
    verdict = judge(RUN, parts(waiting, NONE, blamed))
    assert (verdict.cause, verdict.rank, verdict.node) == (Cause.SCRIPT_COLLECTIVES, None, "")
    assert verdict.cost_seconds_per_step == pytest.approx(0.015)


def test_work_that_differs_between_nodes_is_uneven() -> None:
    """Each node has one rank, and no other to compare it with."""
    chance = np.random.default_rng(3)
    own = chance.lognormal(-3, 0.5, (4, STEPS))
    works = [
        RankWork(rank, {"forward": mine, "collective_wait": own.max(axis=0) - mine})
        for rank, mine in enumerate(own)
    ]
    verdict = judge(RUN, parts(works, NONE, NONE, NONE, NONE))
    assert (verdict.cause, verdict.rank) == (Cause.UNEVEN_WORK, None)
    lost = float(own.max(axis=0).mean() - own.mean(axis=1).max())
    assert verdict.cost_seconds_per_step == pytest.approx(lost, rel=0.1)


def test_memory_that_grows_on_one_node_is_never_left_out() -> None:
    growing = says(Cause.MEMORY_PRESSURE, rank=1, evidence="memory grows by 8.2 MiB/s and is full in 39 min")
    slow = says(Cause.SLOW_RANK, 0.02, "node-2", 2)
    beside = replace(slow, others=(growing,), account=uneven_account())
    works = job(4, {2: ("forward", 0.02)})
    found = judge(RUN, parts(works, NONE, beside))
    assert found.cause is Cause.SLOW_RANK
    assert [(each.cause, each.node) for each in found.others] == [(Cause.MEMORY_PRESSURE, "node-2")]
    assert some(found.account) != uneven_account(), "one node's ranks are not the run's"
    assert judge(RUN, parts(works, beside)).account == uneven_account()
    alone = judge(RUN, parts(job(4), NONE, growing))
    assert (alone.cause, alone.others) == (Cause.MEMORY_PRESSURE, ())


def test_verdict_of_a_lone_node_keeps_the_step_of_its_cost() -> None:
    """Its cost is that of the moment when it was found: of a newer step it would be another share."""
    found = replace(says(Cause.INPUT_BOUND, 0.08), step_seconds=0.1)
    assert judge(RUN, parts(job(4), found)).step_seconds == 0.1
    assert judge(RUN, parts(job(4), found, found)).step_seconds < 0.05
