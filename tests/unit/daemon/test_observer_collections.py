"""The observer on a simulated job whose ranks collect garbage, or are stages of a pipeline."""

import pytest
from tests.unit.daemon.watched_job import RUN, Watched, assert_named, causes_of, collecting, slow

from torchperfd_daemon.diagnosis.remedies import fix_of
from torchperfd_daemon.diagnosis.verdict import Cause


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_collections_at_different_steps_cost_their_sum(seed: int, on_device: bool) -> None:
    """Each rank collects for 2.5 % of its steps, and so one of eight does in every twelfth."""
    watched = Watched(seed=seed, on_device=on_device)
    reported = watched.train(40, collecting(0.25, every=100, apart=12))
    assert causes_of(reported[20:]) == {Cause.GARBAGE_COLLECTION}
    assert watched.verdict.rank is None
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.02, rel=0.2)
    assert "ranks collect at different steps" in watched.verdict.evidence
    assert "gc.freeze()" in fix_of(watched.verdict)


@pytest.mark.parametrize("seed", range(3))
def test_collections_that_begin_late_are_counted_from_then_on(seed: int) -> None:
    watched = Watched(4, seed=seed)
    watched.train(60)
    began = watched.job.step
    storm = collecting(0.05, every=20, apart=5)
    reported = watched.train(20, lambda rank, step: storm(rank, step) if step >= began else {})
    assert causes_of(reported[12:]) == {Cause.GARBAGE_COLLECTION}
    assert watched.verdict.rank is None
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_earlier_short_collections_do_not_shorten_long_ones(seed: int) -> None:
    """The mean of a whole run's collections is that of thousands of short ones."""
    watched = Watched(4, seed=seed)
    watched.train(60, slow(gc=0.0002))
    storm = collecting(0.05, every=20, apart=5)
    reported = watched.train(40, storm)
    assert causes_of(reported[30:]) == {Cause.GARBAGE_COLLECTION}
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_collections_at_the_same_steps_cost_one_ranks(seed: int) -> None:
    watched = Watched(seed=seed)
    reported = watched.train(40, collecting(0.25, every=100, apart=0))
    assert causes_of(reported[20:]) == {Cause.NONE}


@pytest.mark.parametrize("every", [4, 20, 40])
@pytest.mark.parametrize("seed", range(3))
def test_collections_of_one_rank_are_that_ranks(seed: int, every: int) -> None:
    """However rare they are: a window has two of the rarest, which alone would be chance."""
    watched = Watched(seed=seed)
    reported = watched.train(40, slow(2, every=every, gc=0.0125 * every))
    assert_named(reported[10:], 2, 1, Cause.GARBAGE_COLLECTION)
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.0125, rel=0.15)
    assert "different steps" not in watched.verdict.evidence


@pytest.mark.parametrize("seed", range(3))
def test_collections_of_a_rank_that_is_not_late_cost_nothing(seed: int) -> None:
    """They replace other work, as those do that run while a rank waits anyway."""
    watched = Watched(seed=seed)
    reported = watched.train(40, slow(2, every=2, gc=0.02, forward=-0.02))
    assert causes_of(reported) == {Cause.NONE}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_unequal_stages_are_an_imbalance_and_no_slow_rank(seed: int, on_device: bool) -> None:
    """Four ranks of the second stage work for 20 ms more than those of the first."""
    watched = Watched(seed=seed, stages=2, on_device=on_device)
    reported = watched.train(40, lambda rank, _step: {"forward": 0.02} if rank >= 4 else {})
    assert causes_of(reported[20:]) == {Cause.PIPELINE_IMBALANCE}
    assert watched.verdict.rank is None
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.01, rel=0.15)
    assert watched.verdict.evidence.startswith("stage 1 works ")
    assert watched.observer.stragglers()[RUN] == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rank_in_a_stage_is_named_by_its_lateness_there(seed: int) -> None:
    def unequal(rank: int, _step: int) -> dict[str, float]:
        return {"forward": 0.02 * (rank >= 4) + 0.03 * (rank == 5)}

    watched = Watched(seed=seed, stages=2)
    reported = watched.train(40, unequal)
    assert {(each.cause, each.rank) for each in reported[20:] if each} == {(Cause.SLOW_RANK, 5)}
    verdict = watched.verdict
    assert verdict.cost_seconds_per_step == pytest.approx(0.03, rel=0.15)
    assert [each.cause for each in verdict.others] == [Cause.PIPELINE_IMBALANCE]
    assert verdict.others[0].cost_seconds_per_step == pytest.approx(0.01, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_equal_stages_are_healthy(seed: int) -> None:
    assert causes_of(Watched(seed=seed, stages=4).train(40)) == {Cause.NONE}
