"""Verdicts on runs from their series: large runs are judged by some of their ranks, with the same result."""

import random
from collections.abc import Callable

import pytest
from tests.support.values import some

from torchperfd.model.step_account import PartKind
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.fleet import series_verdict
from torchperfd_daemon.fleet.series_model import CauseSeries, NodeSeries, RankSeries, RunSeries
from torchperfd_daemon.fleet.series_verdict import verdict_on

RANKS = 800
PER_NODE = 8
LATE = 403
_PHASES = {"data": 0.02, "forward": 0.3, "backward": 0.6, "optimizer": 0.08}


def series() -> RunSeries:
    """Return a healthy run, of which each daemon sees its own ranks only."""
    chance = random.Random(5)
    run = RunSeries("job", "", RANKS)
    for node in range(RANKS // PER_NODE):
        run.nodes[source(node)] = NodeSeries(f"n{node}", PER_NODE, "unknown", unseen=RANKS - PER_NODE)
    run.parts = {
        ("computing", "forward"): 0.03,
        ("computing", "backward"): 0.06,
        ("exchange", ""): 0.009,
        ("uneven_work", ""): 0.001,
        ("of a later version", ""): 1.0,
    }
    run.uneven_seconds = 0.003
    for number in range(RANKS):
        own = 0.09 * chance.gauss(1, 0.002)
        run.ranks[number] = RankSeries(number, source(number // PER_NODE), own, error_seconds=1e-4)
    return run


def source(node: int) -> tuple[str, ...]:
    return "", "torchperfd", f"n{node}:9407"


def late(run: RunSeries, *ranks: int) -> None:
    for number in ranks:
        rank = run.ranks[number]
        rank.own_seconds = some(rank.own_seconds) + 0.03


def late_rank(run: RunSeries) -> None:
    late(run, LATE)


def late_node(run: RunSeries) -> None:
    late(run, *range(LATE // PER_NODE * PER_NODE, LATE // PER_NODE * PER_NODE + PER_NODE))


def late_rank_that_its_daemon_names(run: RunSeries) -> None:
    late(run, LATE)
    cause(run.nodes[source(LATE // PER_NODE)], Cause.SLOW_RANK, LATE, "forward")


def input_bound(run: RunSeries) -> None:
    for node in run.nodes.values():
        cause(node, Cause.INPUT_BOUND, None, "data")


def throttled_node(run: RunSeries) -> None:
    late_node(run)
    cause(run.nodes[source(LATE // PER_NODE)], Cause.CGROUP_THROTTLING, None, "")


def doubtful_node(run: RunSeries) -> None:
    node = run.nodes[source(LATE // PER_NODE)]
    node.unseen, node.cause = 0, "unknown"
    node.causes = [CauseSeries("unknown", None, "other", 0.0)]


def hang(run: RunSeries) -> None:
    cause(run.nodes[source(LATE // PER_NODE)], Cause.HANG, LATE, "")
    run.nodes[source(LATE // PER_NODE)].stalled_seconds = 40.0


def cause(node: NodeSeries, cause: Cause, rank: int | None, phase: str) -> None:
    node.cause, node.unseen = cause.value, 0
    node.causes = [CauseSeries(cause.value, rank, phase, 0.03)]


def healthy(run: RunSeries) -> None:
    """Change nothing."""


def judged(change: Callable[[RunSeries], None]) -> Verdict:
    run = series()
    change(run)
    slowest = max(some(rank.own_seconds) for rank in run.ranks.values())
    for rank in run.ranks.values():
        rank.wait_seconds = slowest - some(rank.own_seconds) + 0.005
    run.find_slowest()
    for rank in run.compared:
        rank.phase_seconds = {**_PHASES, "forward": 0.63} if rank.rank == LATE else dict(_PHASES)
    return some(verdict_on(run))


CASES: list[tuple[Callable[[RunSeries], None], tuple[Cause, int | None, str]]] = [
    (healthy, (Cause.NONE, None, "")),
    (late_rank, (Cause.SLOW_RANK, LATE, "forward")),
    (late_rank_that_its_daemon_names, (Cause.SLOW_RANK, LATE, "forward")),
    (late_node, (Cause.SLOW_RANK, 400, "forward")),
    (input_bound, (Cause.INPUT_BOUND, None, "data")),
    (hang, (Cause.HANG, LATE, "")),
]


@pytest.mark.parametrize(("change", "expected"), CASES, ids=[change.__name__ for change, _ in CASES])
def test_large_run_has_the_verdict_of_all_its_ranks(
    change: Callable[[RunSeries], None],
    expected: tuple[Cause, int | None, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = judged(change)
    if expected[1] != 400:
        assert (found.cause, found.rank, found.phase) == expected
    assert (found.cause, found.rank) == expected[:2]
    monkeypatch.setattr(series_verdict, "MAX_JUDGED", RANKS)
    whole = judged(change)
    assert (whole.cause, whole.rank, whole.phase) == (found.cause, found.rank, found.phase)
    assert whole.cost_seconds_per_step == pytest.approx(found.cost_seconds_per_step, rel=0.02, abs=1e-5)
    if whole.account is not None:
        account = some(found.account)
        for kind in PartKind:
            assert account.seconds(kind) == pytest.approx(whole.account.seconds(kind), abs=0.002)


def test_account_divides_own_work_as_the_nodes_do() -> None:
    account = some(judged(healthy).account)
    computing = {part.name: part.seconds for part in account.parts if part.kind is PartKind.COMPUTING}
    assert computing["backward"] == pytest.approx(2 * computing["forward"])
    assert sum(computing.values()) == pytest.approx(0.09, rel=0.02)
    assert account.share(PartKind.UNEVEN_WORK) == pytest.approx(0.03, rel=0.1)
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds)


def test_cause_of_a_node_is_that_of_its_latest_rank() -> None:
    found = judged(throttled_node)
    assert found.cause is Cause.CGROUP_THROTTLING
    assert some(found.rank) // PER_NODE == LATE // PER_NODE
    assert "all 8 ranks of the node" in found.evidence


def test_cause_costs_no_more_than_the_present_step() -> None:
    def was_slower(run: RunSeries) -> None:
        for node in run.nodes.values():
            node.cause, node.unseen = "input-bound", 0
            node.causes = [CauseSeries("input-bound", None, "data", 0.3)]

    found = judged(was_slower)
    assert found.cause is Cause.INPUT_BOUND
    assert found.cost_seconds_per_step <= found.step_seconds < 0.1
    assert "300 ms of each" not in found.evidence


def test_run_with_a_node_in_doubt_is_not_healthy() -> None:
    assert judged(doubtful_node).cause is Cause.UNKNOWN


def test_waits_that_no_series_has_leave_the_verdict_unknown() -> None:
    run = series()
    found = some(verdict_on(run))
    assert (found.cause, found.phase) == (Cause.UNKNOWN, "collective_wait")


def test_missing_ranks_are_counted_in_the_verdict() -> None:
    run = series()
    run.world_size += 24
    for rank in run.ranks.values():
        rank.wait_seconds = 0.005
    found = some(verdict_on(run))
    assert (found.cause, found.unseen_ranks) == (Cause.UNKNOWN, 24)
    assert f"24 of the job's {RANKS + 24} ranks" in found.evidence


def test_run_without_any_verdict_has_none() -> None:
    run = series()
    for node in run.nodes.values():
        node.cause = ""
    assert verdict_on(run) is None
