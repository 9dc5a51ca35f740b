"""Kinds of parallelism, and comparing ranks within the stages of a pipeline."""

import numpy as np
import pytest
from tests.support.values import some
from tests.unit.daemon.test_device_waits import steps_of, surveys_of
from tests.unit.daemon.watched_job import RUN, Watched

from torchperfd.document.terminal import render
from torchperfd.model.process import Coordinate
from torchperfd_cli.commands import ranks, whatif
from torchperfd_daemon.diagnosis.detect.straggler import RankWork, find_stragglers
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.predictions import Removed
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.diagnosis.verdicts import rank_causes
from torchperfd_daemon.fleet.translate import judge_all
from torchperfd_daemon.store.model import PARALLELISM_KINDS, coordinates_text, parallelism_kind, rank_in
from torchperfd_daemon.views import live as _view

SLOW = 12


def trained(late_s: float = 0.0) -> Watched:
    """Return two stages on two nodes: the second works 20 ms longer, and one of its ranks even more."""
    watched = Watched(16, stages=2)
    watched.train(
        30, lambda rank, _step: {"forward": 0.02 * (rank >= 8) + late_s * (rank == SLOW), "data": 0.0}
    )
    return watched


def test_ranks_of_a_longer_stage_are_not_slow() -> None:
    watched = trained()
    [view] = _view.runs(steps_of(watched, watched.observer.device_work))
    assert [each.rank for each in view.ranks if each.slow] == []
    assert max(abs(each.behind_ratio or 0.0) for each in view.ranks) < 0.05
    lines = render(ranks.ranks_document(view)).splitlines()
    assert lines[1].split()[:3] == ["RANK", "PLACE", "NODE"]
    assert [line.split()[1] for line in lines[2:18]] == ["pp=0"] * 8 + ["pp=1"] * 8
    document = _view.run_dict(view)
    assert document["ranks"][8]["coordinates"] == "pp=1"
    predictions = some(whatif.replay_newest(steps_of(watched, watched.observer.device_work), 0))
    assert not [each for each in predictions.answers if each.removed is Removed.RANK_EXCESS]


def test_the_slow_rank_of_a_stage_is_slow() -> None:
    watched = trained(late_s=0.03)
    [view] = _view.runs(steps_of(watched, watched.observer.device_work))
    assert [each.rank for each in view.ranks if each.slow] == [SLOW]
    assert view.ranks[SLOW].behind_seconds == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("always_late", [None, 3], ids=["alone", "beside one that was always slow"])
def test_rank_that_becomes_slow_in_one_stage_has_caused_it(always_late: int | None) -> None:
    watched = Watched(16, stages=2)

    def usual(rank: int, _step: int) -> dict[str, float]:
        return {"forward": 0.02 * (rank == always_late)}

    def slower(rank: int, step: int) -> dict[str, float]:
        return {"forward": usual(rank, step)["forward"] + 0.05 * (rank == SLOW)}

    watched.train(30, usual)
    began = watched.job.step
    watched.train(20, slower)
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SLOW_RANK, SLOW, "forward")
    assert verdict.has_grown
    assert abs(some(verdict.onset_step) - began) <= 5


@pytest.mark.parametrize(
    ("late_s", "cause", "rank", "cost"),
    [(0.0, Cause.PIPELINE_IMBALANCE, None, 0.01), (0.03, Cause.SLOW_RANK, SLOW, 0.03)],
)
def test_the_fleet_compares_stages_that_no_node_has_both_of(
    late_s: float, cause: Cause, rank: int | None, cost: float
) -> None:
    watched = trained(late_s)
    [verdict] = judge_all(surveys_of(watched, watched.observer.device_work))
    assert (verdict.run, verdict.cause, verdict.rank) == (RUN, cause, rank)
    assert verdict.cost_seconds_per_step == pytest.approx(cost, rel=0.15)


def staged(*ranks: tuple[int | None, float, float]) -> list[Verdict]:
    """Return the verdicts on ranks, of each its stage, its own work and its wait for others, in seconds."""
    return rank_causes(
        RUN,
        [
            RankEvidence(number, "node", own + wait, {"forward": own, "collective_wait": wait}, stage=stage)
            for number, (stage, own, wait) in enumerate(ranks)
        ],
    )


@pytest.mark.parametrize(
    "ranks",
    [
        [(None, 0.1, 0.4), (None, 0.5, 0.0)],
        [(0, 0.1, 0.4), (0, 0.5, 0.0), (None, 1.0, 0.0)],
        [(0, 0.10, 0.03), (0, 0.10, 0.03), (1, 0.10, 0.03), (1, 0.13, 0.0)],
    ],
    ids=["no stage", "one stage", "a slow rank of two makes its stage no longer"],
)
def test_equal_or_single_stages_are_not_unequal(ranks: list[tuple[int | None, float, float]]) -> None:
    assert all(each.cause is not Cause.PIPELINE_IMBALANCE for each in staged(*ranks))


def test_the_longest_stage_is_its_ranks_median() -> None:
    found = staged((0, 0.10, 0.10), (0, 0.10, 0.10), (1, 0.14, 0.06), (1, 0.20, 0.0), (1, 0.14, 0.06))
    [unequal] = [each for each in found if each.cause is Cause.PIPELINE_IMBALANCE]
    assert unequal.evidence.startswith("stage 1 works 140 ms of each 200 ms step, the 2 stages 120 ms")
    assert unequal.cost_seconds_per_step == pytest.approx(0.02)


def test_stragglers_are_sorted_over_all_stages() -> None:
    rng = np.random.default_rng(1)

    def work(rank: int, own: float) -> RankWork:
        return RankWork(rank, {"forward": own + rng.normal(0, 1e-3, 60)}, rank // 4)

    works = [work(rank, 0.1 + 0.1 * (rank // 4) + {1: 0.02, 6: 0.05}.get(rank, 0.0)) for rank in range(8)]
    assert [each.rank for each in find_stragglers(works)] == [6, 1]


@pytest.mark.parametrize(
    ("dimension", "kind"),
    [
        *(("dp", "data"), ("dp_shard", "data"), ("fsdp", "data"), ("DATA_PARALLEL_GROUP", "data")),
        *(("tp", "tensor"), ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("tensor-parallel", "tensor")),
        *(("pp", "pipeline"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"), ("stage", "pipeline")),
        *(("ep", "expert"), ("EXPERT_MODEL_PARALLEL_GROUP", "expert")),
        *(("cp", "context"), ("CONTEXT_PARALLEL_GROUP", "context")),
        *(
            ("dp_cp", ""),
            ("EMBEDDING_GROUP", ""),
            ("DATA_PARALLEL_GROUP_WITH_CP", ""),
            ("", ""),
            ("mine", ""),
        ),
    ],
)
def test_a_dimension_is_of_the_kind_that_its_name_says(dimension: str, kind: str) -> None:
    assert parallelism_kind(dimension) == kind


def test_a_rank_has_a_place_in_each_kind() -> None:
    places = (
        Coordinate("pp", 1, 2),
        Coordinate("dp", 0, 2),
        Coordinate("tp", 3, 4),
        Coordinate("mine", 1, 2),
    )
    assert [rank_in(kind, places) for kind in PARALLELISM_KINDS] == [0, 3, 1, None, None]
    assert coordinates_text(places) == "pp=1 dp=0 tp=3 mine=1"
    assert (rank_in("data", ()), coordinates_text(())) == (None, "")


def test_hybrid_sharding_is_one_data_dimension() -> None:
    places = (Coordinate("dp_replicate", 2, 3), Coordinate("dp_shard", 1, 4))
    assert rank_in("data", places) == 2 * 4 + 1
