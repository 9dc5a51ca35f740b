"""A verdict on a part of a job says what it is a part of, and never that the whole is healthy."""

import pytest
from tests.unit.daemon.test_observer import Watched

from torchperfd_daemon.diagnosis import Cause, RankEvidence, Verdict
from torchperfd_daemon.diagnosis.unseen import limit_to_seen

HEALTHY = Verdict(Cause.NONE, "bert", "", None, "", "nothing stands out", 0.0, "torchperfd capture")


def rank(number: int, waits: float) -> RankEvidence:
    return RankEvidence(number, "n2", 0.1, {"forward": 0.1 - waits, "collective_wait": waits})


def test_ranks_that_wait_for_unseen_ones_have_unknown_cause() -> None:
    verdict = limit_to_seen(HEALTHY, [rank(2, 0.04), rank(3, 0.03)], 2)
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence == (
        "all ranks here wait in collectives for 30 ms of each 100 ms step, and 2 of the job's 4 ranks are not"
        " seen by this daemon"
    )
    assert verdict.next_command == "torchperfd diagnose --fleet"


def test_healthy_part_of_a_job_names_what_it_lacks() -> None:
    verdict = limit_to_seen(HEALTHY, [rank(2, 0.004), rank(3, 0.03)], 2)
    assert verdict.cause is Cause.NONE
    assert verdict.evidence.endswith("; 2 of the job's 4 ranks are not seen by this daemon")


@pytest.mark.parametrize(("unseen", "cause"), [(0, Cause.NONE), (-1, Cause.NONE), (2, Cause.INPUT_BOUND)])
def test_whole_jobs_and_found_causes_stay_as_they_are(unseen: int, cause: Cause) -> None:
    verdict = Verdict(cause, "bert", "", None, "data", "words", 0.02, "torchperfd capture")
    assert limit_to_seen(verdict, [rank(2, 0.04)], unseen) is verdict


def test_observer_of_half_a_job_does_not_call_it_healthy() -> None:
    watched = Watched(ranks=2)
    # The slow rank is on another node, whose daemon this one does not know.
    watched.store.leave(watched.job.ranks[1])
    reported = watched.train(20, lambda number, _step: {"data": 0.03 * number})
    assert {verdict.cause for verdict in reported if verdict is not None} == {Cause.UNKNOWN}
    assert watched.verdict.evidence.endswith("1 of the job's 2 ranks is not seen by this daemon")
