"""What may be claimed: a job is healthy only if all of it was seen and its step is the model's own work."""

from typing import Any

import numpy as np
import pytest
from tests.unit.daemon.watched_job import Watched

from torchperfd_daemon.diagnosis.claims import limit_claim
from torchperfd_daemon.diagnosis.evidence import RankEvidence, blocked_seconds
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.diagnosis.verdicts import diagnose

HEALTHY = Verdict(Cause.NONE, "bert", "", None, "", "nothing stands out", 0.0, "torchperfd capture")
STEP = 0.1


def rank(
    number: int = 0, step: float = STEP, *, facts: dict[str, Any] | None = None, **shares: float
) -> RankEvidence:
    """Return a rank with these shares of its step; the rest is half forward, half backward."""
    rest = (1 - sum(shares.values())) / 2
    phases = {"forward": rest, "backward": rest, **shares}
    return RankEvidence(
        number, "n2", step, {name: step * share for name, share in phases.items()}, **(facts or {})
    )


def claim(*ranks: RankEvidence, unseen: int = 0, p95: float = STEP) -> Verdict:
    return limit_claim(HEALTHY, ranks, unseen, newest=np.full(20, p95))


def test_ranks_that_wait_for_unseen_ones_have_unknown_cause() -> None:
    verdict = claim(rank(2, collective_wait=0.4), rank(3, collective_wait=0.3), unseen=2)
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence == (
        "all ranks here wait in collectives for 30 ms of each 100 ms step, and 2 of the job's 4 ranks are not"
        " seen by this daemon"
    )
    assert verdict.next_command == "torchperfd diagnose --fleet"


def test_healthy_part_of_a_job_is_no_healthy_job() -> None:
    """Ranks that hardly wait may be the ones that the others wait for."""
    verdict = claim(rank(2, collective_wait=0.04), rank(3, collective_wait=0.3), unseen=2)
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence == (
        "2 of the job's 4 ranks are not seen by this daemon; of those here, nothing stands out"
    )


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.NONE])
def test_found_causes_stay_as_they_are(cause: Cause) -> None:
    verdict = Verdict(cause, "bert", "", None, "data", "words", 0.02, "torchperfd capture")
    assert limit_claim(verdict, [rank(2, collective_wait=0.6)], 2, newest=np.full(20, 0.001)) is verdict


@pytest.mark.parametrize("unseen", [0, -1])
def test_job_that_is_seen_and_computes_is_healthy(unseen: int) -> None:
    ranks = [rank(number, data=0.19, collective_wait=0.19, other=0.19) for number in range(4)]
    assert claim(*ranks, unseen=unseen, p95=0.99 * STEP) is HEALTHY
    assert claim(rank(optimizer=0.6)) is HEALTHY


@pytest.mark.parametrize(
    ("phase", "share", "words"),
    [
        ("data", 0.2, "waiting for data takes 20 ms of each 100 ms step (20%)"),
        ("collective_wait", 0.39, "39 ms of each 100 ms step (39%) is waiting in collectives"),
        ("collective_wait", 0.55, "55 ms of each 100 ms step (55%) is waiting in collectives"),
        ("other", 0.2, "20 ms of each 100 ms step (20%) is in no phase"),
        ("loss", 0.46, "loss is the largest part, 46 ms of each 100 ms step (46%), and is no computation"),
        ("rollout", 0.6, "rollout is the largest part, 60 ms of each 100 ms step (60%)"),
        ("checkpoint", 0.5, "checkpoint is the largest part"),
    ],
)
def test_step_that_waits_or_is_unnamed_is_not_healthy(phase: str, share: float, words: str) -> None:
    shares: dict[str, Any] = {phase: share}
    verdict = claim(*(rank(number, **shares) for number in range(2)))
    assert (verdict.cause, verdict.phase) == (Cause.UNKNOWN, phase)
    assert verdict.evidence.startswith(words)
    assert not verdict.cost_seconds_per_step


def test_uneven_work_says_how_long_ranks_wait() -> None:
    """Three ranks of which another one is late in each step."""
    shares = 0.52, 0.5, 0.51
    verdict = claim(*(rank(number, 0.0856, collective_wait=share) for number, share in enumerate(shares)))
    assert verdict.evidence == (
        "44.5 ms of each 85.6 ms step (52%) is waiting in collectives on rank 0, and at least 50% on all"
        " ranks: no rank is slow by itself; their work differs from step to step, or the exchange takes this"
        " long"
    )


@pytest.mark.parametrize(
    ("deviation", "waits", "cause"),
    [
        (0.002, (0.24, 0.22, 0.22, 0.23), Cause.NONE),
        # Ranks that in turn have a step 40 ms longer wait for each other for 30 ms of each.
        (0.0173, (0.3, 0.3, 0.3, 0.3), Cause.UNKNOWN),
        (None, (0.24, 0.22, 0.22, 0.23), Cause.UNKNOWN),
        (0.002, (0.34, 0.34, 0.02, 0.34), Cause.UNKNOWN),
        (0.002, (0.36, 0.36, 0.35, 0.36), Cause.UNKNOWN),
    ],
)
def test_devices_that_exchange_are_no_uneven_work(
    deviation: float | None, waits: tuple[float, ...], cause: Cause
) -> None:
    """By how much a rank's single steps differ bounds how long ranks can wait for each other."""
    facts = {"on_device": True, "own_deviation_seconds": deviation}
    ranks = [
        rank(
            number,
            facts={
                **facts,
                "device_phase_seconds": {
                    "forward": STEP * (0.9 - share),
                    "backward": STEP * 0.1,
                    "collective_wait": STEP * share,
                },
            },
            loss=0.1,
        )
        for number, share in enumerate(waits)
    ]
    assert claim(*ranks).cause is cause


def test_cause_of_all_ranks_names_their_wait() -> None:
    """Three ranks whose uneven work is code of the script."""
    own = Verdict(Cause.SCRIPT_CODE, "bert", "", None, "loss", "words", 0.04, "", step_seconds=STEP)
    ranks = [rank(number, loss=0.4, collective_wait=0.5) for number in range(3)]
    verdict = limit_claim(own, ranks)
    assert (verdict.cause, verdict.cost_seconds_per_step) == (Cause.SCRIPT_CODE, 0.04)
    assert verdict.evidence.startswith("words; 50 ms of each 100 ms step (50%) is waiting in collectives")
    assert "no rank is slow by itself" in verdict.evidence


def test_rank_that_works_longer_is_no_equal_of_its_peers() -> None:
    verdict = claim(rank(0, collective_wait=0.5), rank(1, collective_wait=0.1), rank(2, collective_wait=0.5))
    assert "rank 1 works 40 ms longer than its peers, which may be chance" in verdict.evidence
    assert "no rank is slow" not in verdict.evidence


def test_thread_without_a_cpu_is_not_healthy() -> None:
    """A run that ends before CPU contention could be found."""
    verdict = claim(rank(facts={"queued_seconds": 0.06}))
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence.endswith("the training thread is ready to run and has no CPU")
    assert claim(rank(facts={"queued_seconds": 0.029})) is HEALTHY


@pytest.mark.parametrize("share", [0.79, 0.99])
def test_unseen_forward_names_what_to_do(share: float) -> None:
    verdict = claim(rank(other=share, facts={"hides_script_code": True, "forward_unseen": True}))
    assert (verdict.cause, verdict.phase) == (Cause.UNKNOWN, "other")
    assert verdict.evidence == (
        f"{100 * share:.0f} ms of each 100 ms step ({share:.0%}) is in no phase: the model's forward is not"
        " seen (its methods are called): use attach(model=…) or client.phase()"
    )


def test_thread_that_stands_still_is_not_healthy() -> None:
    verdict = claim(rank(facts={"blocked_seconds": 0.07}))
    assert verdict.cause is Cause.UNKNOWN
    assert "one of them may hold Python's interpreter lock" in verdict.evidence
    assert claim(rank(facts={"blocked_seconds": 0.019})) is HEALTHY


@pytest.mark.parametrize(
    ("facts", "blocked"),
    [
        ({}, 0.0145),
        # Its model sleeps, and no other thread runs.
        ({"others_ran": 0.001}, 0.001),
        ({"queued": 0.014}, 0.0005),
        ({"ran": 0.018}, 0.0),
        ({"ran": 0.0}, 0.0),
        ({"on_device": True}, 0.0),
        # Threads that compute with it.
        ({"threads": 4, "others_ran": 0.0075}, 0.0),
        ({"threads": None}, 0.0),
    ],
)
def test_thread_is_blocked_while_others_run(facts: dict[str, Any], blocked: float) -> None:
    """A thread of the script holds the interpreter lock for most of a step of 20.6 ms."""
    phases = {"data": 0.002, "forward": 0.007, "loss": 0.0006, "backward": 0.004, "optimizer": 0.006}
    known = {"ran": 0.0025, "queued": 0.0, "others_ran": 0.018, "threads": 1, "on_device": False, **facts}
    assert blocked_seconds(phases, **known) == pytest.approx(blocked)


def test_few_long_steps_are_named_beside_the_wait() -> None:
    alone = claim(rank(step=0.0165), p95=0.00249)
    assert alone.cause is Cause.UNKNOWN
    assert alone.evidence == (
        "most of the time is in a few long steps: the mean is 16.5 ms, and 95% of the newest steps take at"
        " most 2.49 ms"
    )
    waits = [rank(number, 0.0165, collective_wait=0.78) for number in range(2)]
    verdict = claim(*waits, p95=0.00249)
    assert verdict.evidence.startswith("12.9 ms of each 16.5 ms step (78%) is waiting in collectives")
    assert verdict.evidence.endswith(alone.evidence)


def test_time_in_steps_far_above_the_median_is_no_health() -> None:
    """A thread holds the interpreter for two seconds of a run of 1.7 s: 8 % of the steps are long."""
    newest = np.repeat([0.0018, 0.066], [230, 20])
    verdict = limit_claim(HEALTHY, [rank(step=float(newest.mean()))], newest=newest)
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence == (
        "74% of the time is in 20 of the newest 250 steps, which take 66 ms on average, with a median of"
        " 1.8 ms"
    )


@pytest.mark.parametrize("sigma", [0.2, 0.5])
def test_steps_of_inputs_of_many_lengths_are_healthy(sigma: float) -> None:
    newest = 0.02 * np.random.default_rng(7).lognormal(0, sigma, 256)
    assert limit_claim(HEALTHY, [rank(step=float(newest.mean()))], newest=newest) is HEALTHY


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"device_phase_seconds": {"forward": 0.04, "loss": 0.045, "other": 0.015}}, Cause.NONE),
        ({"device_phase_seconds": {"forward": 0.05, "data": 0.05}}, Cause.UNKNOWN),
        ({"device_phase_seconds": {"forward": 0.07, "collective_wait": 0.03}}, Cause.UNKNOWN),
        ({"device_phase_seconds": {"forward": 0.07, "other": 0.03}}, Cause.UNKNOWN),
        ({"device_busy": 0.9}, Cause.NONE),
        ({"device_busy": 0.6}, Cause.UNKNOWN),
    ],
)
def test_rank_on_a_device_is_judged_by_its_device(facts: dict[str, Any], cause: Cause) -> None:
    """The host waits for its device in ``other`` or for data, and that costs nothing."""
    assert claim(rank(other=0.4, data=0.3, facts={"on_device": True, **facts})).cause is cause


def test_mean_step_of_a_part_of_a_job_is_not_healthy() -> None:
    """The end of a run with two of its four ranks on another node."""
    phases = {"forward": 0.01, "backward": 0.012, "collective_wait": 0.0369}
    profiles = [RankEvidence(number, "n1", 0.0589, phases, steps=700, world_size=4) for number in range(2)]
    verdict = diagnose("both", profiles, has_ended=True)
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence == (
        "all ranks here wait in collectives for 36.9 ms of each 58.9 ms step, and 2 of the job's 4 ranks are"
        " not seen by this daemon"
    )


def test_observer_of_half_a_job_does_not_call_it_healthy() -> None:
    watched = Watched(ranks=2)
    # The slow rank is on another node, whose daemon this one does not know.
    watched.store.leave(watched.job.ranks[1])
    reported = watched.train(20, lambda number, _step: {"data": 0.03 * number})
    assert {verdict.cause for verdict in reported if verdict is not None} == {Cause.UNKNOWN}
    assert watched.verdict.evidence.endswith("1 of the job's 2 ranks is not seen by this daemon")
