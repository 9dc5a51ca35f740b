"""What-if: predictions against jobs that are simulated twice, with the cause and without it."""

import random
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperfd.document.terminal import render
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import whatif
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.edits import Pauses, at_most, quantiles_of, without_pauses
from torchperfd_daemon.diagnosis.predictions import MIN_GAIN, Predictions, Removed, predict

STEPS = 128
WITHIN = 0.05
"""Of the step, that a prediction may be off by."""


@dataclass(frozen=True)
class Job:
    """What each rank does in each step, in seconds; ``[rank][step]``.

    ``data`` and ``forward`` come before the ranks meet, ``checkpoint`` and ``optimizer`` after.
    """

    data: list[list[float]]
    forward: list[list[float]]
    optimizer: list[list[float]]
    checkpoint: list[list[float]]
    exchange: float

    @property
    def ranks(self) -> range:
        return range(len(self.data))


def trained(job: Job) -> tuple[list[RankWork], float]:
    """Run a job's clock, step by step; return what its ranks record, and the mean time of a step."""
    clocks = [0.0 for _ in job.ranks]
    recorded: list[dict[str, list[float]]] = [{} for _ in job.ranks]
    for step in range(STEPS):
        arrivals = [
            clock + job.data[rank][step] + job.forward[rank][step] for rank, clock in enumerate(clocks)
        ]
        leave = max(arrivals) + job.exchange
        for rank, arrival in enumerate(arrivals):
            after = job.optimizer[rank][step] + job.checkpoint[rank][step]
            clocks[rank] = leave + after
            for name, seconds in {
                "data": job.data[rank][step],
                "forward": job.forward[rank][step],
                "collective_wait": leave - arrival,
                "optimizer": job.optimizer[rank][step],
                "checkpoint": job.checkpoint[rank][step],
            }.items():
                recorded[rank].setdefault(name, []).append(seconds)
    works = [
        RankWork(rank, {name: np.array(column) for name, column in columns.items()})
        for rank, columns in enumerate(recorded)
    ]
    return works, max(clocks) / STEPS


def even(ranks: int, noise: float, seed: int) -> Job:
    """Return a job of like ranks with steps of about 100 ms."""
    chance = random.Random(seed)

    def column(mean: float) -> list[list[float]]:
        return [[mean * chance.gauss(1, noise) for _ in range(STEPS)] for _ in range(ranks)]

    never = [[0.0] * STEPS for _ in range(ranks)]
    return Job(column(0.005), column(0.08), column(0.01), never, 0.005)


def later(
    column: list[list[float]], ranks: set[int], seconds: float, often: float, seed: int
) -> list[list[float]]:
    """Return a column in which some ranks take longer in a part of their steps."""
    chance = random.Random(seed)
    return [
        [took + (seconds if rank in ranks and chance.random() < often else 0.0) for took in row]
        for rank, row in enumerate(column)
    ]


def alike(steps: int, *ranks: dict[str, float]) -> list[RankWork]:
    """Return ranks whose steps are all alike, by their phases in seconds."""
    return [
        RankWork(rank, {name: np.full(steps, seconds) for name, seconds in phases.items()})
        for rank, phases in enumerate(ranks)
    ]


def gain(reported: Predictions, removed: Removed, rank: int | None = None, phase: str | None = None) -> float:
    """Return the predicted gain; 0 without a prediction."""
    found = [
        each.gain_seconds
        for each in reported.answers
        if (each.removed, each.rank) == (removed, rank) and phase in (None, each.phase)
    ]
    assert len(found) < 2
    return found[0] if found else 0.0


jobs = st.builds(even, st.integers(2, 6), st.floats(0, 0.03), st.integers(0, 10_000))


@settings(max_examples=60)
@given(jobs, st.floats(0.005, 0.3), st.sampled_from([0.05, 0.3, 1.0]), st.integers(0, 5))
def test_a_ranks_excess(job: Job, seconds: float, often: float, culprit: int) -> None:
    culprit %= len(job.ranks)
    slow = replace(job, forward=later(job.forward, {culprit}, seconds, often, 1))
    works, before = trained(slow)
    _, after = trained(job)
    reported = predict(works)
    assert reported.synchronous
    assert reported.step_seconds == pytest.approx(before, rel=0.01)
    assert gain(reported, Removed.RANK_EXCESS, culprit) == pytest.approx(before - after, abs=WITHIN * before)
    others = [gain(reported, Removed.RANK_EXCESS, rank) for rank in job.ranks if rank != culprit]
    assert max(others) <= WITHIN * before


@settings(max_examples=30)
@given(jobs.filter(lambda job: len(job.ranks) > 4), st.floats(0.02, 0.2))
def test_two_slow_ranks_are_only_worth_something_together(job: Job, seconds: float) -> None:
    slow = replace(job, forward=later(job.forward, {0, 3}, seconds, 1.0, 1))
    works, before = trained(slow)
    _, after = trained(job)
    reported = predict(works)
    assert gain(reported, Removed.SLOW_RANKS) == pytest.approx(before - after, abs=WITHIN * before)
    assert max(gain(reported, Removed.RANK_EXCESS, rank) for rank in (0, 3)) <= WITHIN * before


@settings(max_examples=30)
@given(jobs, st.floats(0.01, 0.3), st.sampled_from([0.1, 1.0]), st.sets(st.integers(0, 5), min_size=1))
def test_data(job: Job, seconds: float, often: float, ranks: set[int]) -> None:
    starved = replace(job, data=later(job.data, ranks, seconds, often, 2))
    works, before = trained(starved)
    _, after = trained(replace(job, data=[[0.0] * STEPS for _ in job.ranks]))
    reported = gain(predict(works), Removed.PHASE, phase="data")
    assert reported == pytest.approx(before - after, abs=WITHIN * before)


@settings(max_examples=20)
@given(jobs, st.floats(0.1, 2.0))
def test_checkpoints_of_one_rank(job: Job, seconds: float) -> None:
    saved = [
        [seconds if rank == 0 and step % 16 == 5 else 0.0 for step in range(STEPS)] for rank in job.ranks
    ]
    works, before = trained(replace(job, checkpoint=saved))
    _, after = trained(job)
    reported = gain(predict(works), Removed.PHASE, phase="checkpoint")
    assert reported == pytest.approx(before - after, abs=WITHIN * before)


@settings(max_examples=20)
@given(jobs, st.floats(0.001, 0.1))
def test_the_exchange(job: Job, seconds: float) -> None:
    works, before = trained(replace(job, exchange=seconds))
    _, after = trained(replace(job, exchange=0.0))
    assert gain(predict(works), Removed.EXCHANGE) == pytest.approx(before - after, abs=WITHIN * before)


@settings(max_examples=30)
@given(jobs, st.floats(0.02, 0.2), st.integers(4, 20))
def test_collections_that_each_rank_has_at_its_own_time(job: Job, seconds: float, period: int) -> None:
    paused = [
        [took + (seconds if (step + 3 * rank) % period == 0 else 0.0) for step, took in enumerate(row)]
        for rank, row in enumerate(job.forward)
    ]
    works, before = trained(replace(job, forward=paused))
    _, after = trained(job)
    reported = predict(works, {rank: [Pauses(1 / period, seconds)] for rank in job.ranks})
    assert gain(reported, Removed.GARBAGE_COLLECTION) == pytest.approx(before - after, abs=WITHIN * before)


@settings(max_examples=30)
@given(jobs, st.floats(0.0, 0.1), st.floats(0.0, 0.1), st.integers(0, 5))
def test_what_has_grown_since_the_past(job: Job, seconds: float, exchange: float, culprit: int) -> None:
    slow = replace(
        job,
        forward=later(job.forward, {culprit % len(job.ranks)}, seconds, 0.7, 1),
        exchange=job.exchange + exchange,
    )
    past, after = trained(job)
    works, before = trained(slow)
    reported = gain(predict(works, past=past), Removed.GROWTH)
    assert reported == pytest.approx(before - after, abs=WITHIN * before)
    assert gain(predict(works), Removed.GROWTH) == 0


@settings(max_examples=30)
@given(jobs, st.floats(0.02, 0.1), st.floats(0.0, 0.2), st.integers(0, 5))
def test_what_grows_with_a_slow_rank_goes_too(job: Job, seconds: float, part: float, culprit: int) -> None:
    culprit %= len(job.ranks)
    slow = replace(
        job,
        forward=later(job.forward, {culprit}, seconds, 1.0, 1),
        exchange=job.exchange + part * seconds,
    )
    past, after = trained(job)
    works, before = trained(slow)
    reported = gain(predict(works, past=past), Removed.RANK_EXCESS, culprit)
    assert reported == pytest.approx(before - after, abs=WITHIN * before)


@settings(max_examples=30)
@given(jobs.filter(lambda job: len(job.ranks) > 4), st.floats(0.02, 0.1), st.floats(0.0, 0.2))
def test_what_grows_with_two_slow_ranks_goes_too(job: Job, seconds: float, part: float) -> None:
    slow = replace(
        job,
        forward=later(job.forward, {0, 3}, seconds, 1.0, 1),
        exchange=job.exchange + part * seconds,
    )
    past, after = trained(job)
    works, before = trained(slow)
    reported = predict(works, past=past)
    assert gain(reported, Removed.SLOW_RANKS) == pytest.approx(before - after, abs=WITHIN * before)


@settings(max_examples=30)
@given(
    jobs.filter(lambda job: len(job.ranks) > 2),
    st.floats(0.03, 0.1),
    st.floats(0.0, 0.3),
    st.integers(1, 2),
)
def test_what_others_gain_by_a_rank_that_sleeps_is_lost_again(
    job: Job, seconds: float, part: float, culprits: int
) -> None:
    culprits = culprits if len(job.ranks) > 4 else 1
    slow = replace(
        job,
        forward=[
            [took + seconds if rank < culprits else took * (1 - part) for took in row]
            for rank, row in enumerate(job.forward)
        ],
        exchange=job.exchange * (1 - part),
    )
    past, after = trained(job)
    works, before = trained(slow)
    removed, rank = (Removed.SLOW_RANKS, None) if culprits > 1 else (Removed.RANK_EXCESS, 0)
    reported = gain(predict(works, past=past), removed, rank)
    assert reported == pytest.approx(before - after, abs=WITHIN * before)


def test_a_past_step_that_took_very_long_does_not_come_back() -> None:
    job = even(4, 0.02, 1)
    hiccup = [row[:] for row in job.forward]
    hiccup[1][60] += 2.0
    past, _ = trained(replace(job, forward=hiccup))
    works, before = trained(replace(job, forward=later(job.forward, {2}, 0.05, 1.0, 1)))
    _, after = trained(job)
    reported = predict(works, past=past)
    for removed, rank in ((Removed.RANK_EXCESS, 2), (Removed.GROWTH, None)):
        assert gain(reported, removed, rank) == pytest.approx(before - after, abs=0.003)


def test_what_all_ranks_take_more_is_no_slow_ranks() -> None:
    job = even(6, 0.02, 1)
    past, _ = trained(job)
    works, _ = trained(replace(job, forward=later(job.forward, set(job.ranks), 0.05, 1.0, 1)))
    reported = predict(works, past=past)
    assert gain(reported, Removed.GROWTH) == pytest.approx(0.05, abs=0.005)
    assert gain(reported, Removed.SLOW_RANKS) < 0.005


def test_what_has_grown_without_a_slow_rank_stays() -> None:
    job = even(4, 0.0, 1)
    past, _ = trained(replace(job, forward=later(job.forward, {2}, 0.05, 1.0, 1)))
    works, _ = trained(
        replace(job, forward=later(job.forward, {2}, 0.06, 1.0, 1), exchange=job.exchange + 0.04)
    )
    reported = predict(works, past=past)
    assert gain(reported, Removed.RANK_EXCESS, 2) == pytest.approx(0.06, abs=0.001)
    assert gain(reported, Removed.GROWTH) == pytest.approx(0.05, abs=0.001)


def test_ranks_that_do_not_wait_are_replayed_alone() -> None:
    quick, slow = {"data": 0.1, "forward": 0.2}, {"data": 0.3, "forward": 0.1, "augment": 0.1}
    reported = predict(alike(20, quick, slow))
    assert not reported.synchronous
    assert reported.step_seconds == pytest.approx(0.5)
    assert [(each.removed, each.phase) for each in reported.answers] == [
        (Removed.PHASE, "data"),
        (Removed.PHASE, "augment"),
    ]
    assert [each.step_seconds for each in reported.answers] == pytest.approx([0.2, 0.4])
    assert reported.answers[0].speedup == pytest.approx(2.5)


def test_only_relevant_gains_are_listed_greatest_first() -> None:
    works, _ = trained(replace(even(3, 0.02, 5), exchange=0.05))
    reported = predict(works)
    gains = [each.gain_seconds for each in reported.answers]
    assert gains == sorted(gains, reverse=True)
    assert gains
    assert min(gains) >= MIN_GAIN * reported.step_seconds


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [RankWork(0, {})],
        [RankWork(0, {"data": np.zeros(3)}), RankWork(1, {"data": np.zeros(4)})],
    ],
)
def test_steps_that_are_not_the_same_are_refused(ranks: list[RankWork]) -> None:
    with pytest.raises(ValueError, match="same steps"):
        predict(ranks)


seconds = st.lists(st.floats(0, 10), min_size=5, max_size=5)


@given(seconds, st.lists(seconds, min_size=1, max_size=4))
def test_as_its_peers(own: list[float], peers: list[list[float]]) -> None:
    usual = np.median([np.sort(np.array(each)) for each in peers], axis=0)
    mapped = at_most(np.array(own), usual).tolist()
    usual = [statistics.median(column) for column in zip(*map(sorted, peers), strict=True)]
    assert sorted(mapped) == pytest.approx(sorted(map(min, sorted(own), usual)))
    assert all(less <= before for less, before in zip(mapped, own, strict=True))
    for one in range(5):
        for other in range(5):
            if own[one] < own[other]:
                assert mapped[one] <= mapped[other], "what was longer stays longer"


@given(seconds, st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_quantiles_of(now: list[float], past: list[float]) -> None:
    mapped = quantiles_of(np.array(now), np.array(past)).tolist()
    assert all(less <= took for less, took in zip(mapped, now, strict=True))
    assert all(less <= max(past) + 1e-9 for less in mapped)
    assert quantiles_of(np.array(now), np.array(now) + 1).tolist() == now
    assert sorted(quantiles_of(np.array(now), np.sort(now)[::-1]).tolist()) == pytest.approx(sorted(now))
    for one in range(5):
        for other in range(5):
            if now[one] < now[other]:
                assert mapped[one] <= mapped[other], "what was longer stays longer"


@given(seconds, st.floats(0, 3), st.floats(0, 10))
def test_pauses_are_taken_out(own: list[float], per_step: float, length: float) -> None:
    left = without_pauses(np.array(own), [Pauses(per_step, length)]).tolist()
    middle = statistics.median(own)
    if per_step >= 1:
        expected = [max(0.0, took - per_step * length) for took in own]
    else:
        longest = set(sorted(range(5), key=lambda step: own[step])[5 - round(per_step * 5) :])
        expected = [
            took - min(length, max(0.0, took - middle)) if step in longest else took
            for step, took in enumerate(own)
        ]
    assert left == pytest.approx(expected)


def test_replay_slow_loader_of_one_rank_is_one_cause() -> None:
    """Rank 1 waits 131 ms for data, its peer 5 ms: the wait and the rank's excess are the same time."""
    ranks = [{"data": data, "forward": 0.03, "collective_wait": 0.139 - data} for data in (0.005, 0.131)]
    reported = predict(alike(40, *ranks))
    found = [(each.removed, each.rank, each.is_part) for each in reported.answers[:2]]
    assert found == [(Removed.PHASE, None, False), (Removed.RANK_EXCESS, 1, True)]
    assert [each.gain_seconds for each in reported.answers[:2]] == pytest.approx([0.131, 0.126])
    lines = render(whatif.run_document("r", 2, reported)).splitlines()
    assert lines[2].startswith("waiting for data")
    assert lines[3].startswith("  of it, what rank 1 needs more than its peers, most of it in data")


def test_replay_excess_in_another_phase_is_a_cause_of_its_own() -> None:
    ranks = [{"data": 0.02, "forward": own, "collective_wait": 0.088 - own} for own in (0.03, 0.08)]
    reported = predict(alike(40, *ranks))
    assert [(each.removed, each.is_part) for each in reported.answers] == [
        (Removed.RANK_EXCESS, False),
        (Removed.PHASE, False),
        (Removed.EXCHANGE, False),
    ]


def test_whatif_without_gain_names_what_is_not_modelled() -> None:
    starved = control_pb2.Verdict(
        cause="CPU contention", rank=-1, cost_seconds_per_step=0.043, step_seconds=0.05
    )
    reported = predict(alike(40, {"forward": 0.05}))
    left_out = whatif.not_modelled(starved, reported)
    text = " ".join(render(whatif.run_document("r", 1, reported, left_out=left_out)).split())
    assert "no phase, rank or exchange that the replay can remove would make a step shorter" in text
    assert "not modelled: CPU contention (43 ms of each 50 ms step)" in text


def test_whatif_growth_removes_what_came_with_it() -> None:
    starved = control_pb2.Verdict(cause="CPU contention", rank=-1, cost_seconds_per_step=0.04)
    now, past = (alike(40, {"forward": seconds}) for seconds in (0.1, 0.05))
    assert whatif.not_modelled(starved, predict(now, past=past)) == []
