"""The observer on a simulated job that hangs or has ended."""

import re

import pytest
from tests.support.values import some
from tests.unit.daemon.watched_job import RUN, Watched, slow

from torchperfd.model.formatting import duration
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.run_watch import why_first
from torchperfd_daemon.service.translate import rank_status_to_message
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.store.model import State
from torchperfd_daemon.views.model import rank_state


def frames(*places: tuple[str, int, str]) -> tuple[Frame, ...]:
    return tuple(Frame(*place) for place in places)


REDUCE = frames(
    ("/x/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce"),
    ("/s/train.py", 22, "sync"),
)
COMPUTE = frames(("/s/train.py", 31, "compute"))


def stacks(rank: int, where: tuple[Frame, ...], outcome: Outcome = Outcome.ANSWERED) -> RankStacks:
    threads = (Thread(1, "MainThread", True, False, where),) if outcome.has_stacks else ()
    return RankStacks(
        rank, 4, "node-0", 1000 + rank, outcome, threads=threads, step=50, seconds_since_step=11.0
    )


def hanging() -> Watched:
    """Return a job of four ranks, three of which wait for rank 2 as soon as no step ends."""
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, COMPUTE if rank == 2 else REDUCE) for rank in range(4)]
    return watched


def states(watched: Watched) -> list[str]:
    return [rank_state(rank_status_to_message(rank)) for rank in watched.job.ranks]


def test_hang_within_10_s_names_rank_line_and_collective() -> None:
    watched = hanging()
    assert watched.stand(15) == [9]
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank) == (Cause.HANG, 2)
    assert "rank 2 is at train.py:31 in compute" in verdict.evidence
    assert "ranks 0-1,3 wait in all_reduce (train.py:22 in sync)" in verdict.evidence
    assert verdict.stalled_seconds == pytest.approx(15, abs=1)
    assert verdict.cost_seconds_per_step == 0
    assert verdict.evidence.startswith("no step for 15 s: ")
    assert watched.observer.lost_seconds()[RUN][Cause.HANG] == pytest.approx(6, abs=1)
    watched.train(5)
    assert watched.verdict.cause is Cause.NONE


def test_stall_reported_3_s_late_counts_from_the_last_step() -> None:
    watched = hanging()
    watched.job.train(1.0)
    # Ranks with steps below 5 ms report every four seconds.
    watched.job.seconds += 3
    assert watched.observer.sample() == []
    assert watched.stand(12) == [6]
    assert watched.verdict.rank == 2
    assert watched.verdict.stalled_seconds == pytest.approx(15, abs=0.2)


def test_rank_that_saves_for_a_minute_is_no_hang() -> None:
    watched = Watched(ranks=4)
    watched.train(20)
    watched.job.ranks[0].state = State.CHECKPOINTING
    assert watched.stand(60) == []
    watched.job.ranks[0].state = State.TRAINING
    watched.train(5)
    assert watched.asked == 0
    assert watched.verdict.cause is Cause.NONE


def test_nothing_is_asked_of_a_run_that_has_finished_or_goes_on() -> None:
    watched = Watched(ranks=2)
    watched.train(20)
    watched.finish()
    assert watched.stand(30) == []


def test_stall_without_a_culprit_requests_stacks_again() -> None:
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, REDUCE) for rank in range(4)]
    assert watched.stand(35) == [9, 19, 29]
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.HANG, None)


def test_hang_duration_in_evidence_grows_each_sample() -> None:
    watched = hanging()
    watched.stand(12)
    assert watched.verdict.evidence.startswith("no step for 12 s: rank 2 is at")
    watched.stand(13)
    assert watched.verdict.evidence.startswith("no step for 25 s: rank 2 is at")
    assert watched.verdict.summary.startswith("hang · rank 2 on node-0 · no step for 25 s: ")


def test_hang_ranks_are_stalled_and_the_stopped_one_stopped() -> None:
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, REDUCE) for rank in (0, 1, 3)]
    watched.stacks.append(stacks(2, (), Outcome.STOPPED))
    watched.stand(8)
    assert states(watched) == ["training"] * 4
    watched.stand(12)
    assert states(watched) == ["stalled", "stalled", "stopped", "stalled"]
    assert [rank.stalled_seconds for rank in watched.job.ranks] == pytest.approx([20] * 4, abs=1)
    watched.train(3)
    assert states(watched) == ["training"] * 4


def test_long_pause_without_waiting_ranks_is_no_state() -> None:
    """A lone rank that computes something else for a minute may have its reasons."""
    watched = Watched(ranks=1)
    watched.train(20)
    watched.stacks = [stacks(0, COMPUTE)]
    watched.stand(60)
    assert states(watched) == ["training"]


def test_verdict_second_cause_is_beside_the_first() -> None:
    def both(rank: int, _step: int) -> dict[str, float]:
        return {"data": 0.08, "forward": 0.04 if rank == 2 else 0.0}

    watched = Watched(ranks=4)
    watched.train(40, both)
    verdict = watched.verdict
    found = [(each.cause, each.rank) for each in (verdict, *verdict.others)]
    assert found == [(Cause.INPUT_BOUND, None), (Cause.SLOW_RANK, 2)]
    costs = [each.cost_seconds_per_step for each in (verdict, *verdict.others)]
    assert costs == pytest.approx([0.08, 0.04], rel=0.15)
    step = watched.job.ranks[0].mean_step_seconds()
    assert sum(costs) < step
    assert verdict.window_seconds == pytest.approx(9.5, abs=1)
    assert re.search(r"\(last (9|10) s\)$", verdict.summary)


def test_verdict_of_ended_run_below_another_has_the_reason() -> None:
    """What has cost the whole run most is first, although another cause had the larger share at last."""
    unknown = Verdict(Cause.UNKNOWN, RUN, "", None, "", "", 0.05, "", step_seconds=0.185)
    contention = Verdict(Cause.CPU_CONTENTION, RUN, "", None, "", "", 0.04, "", step_seconds=0.1)
    assert why_first(unknown, [contention]) == "; of all causes it has cost the whole run most"
    assert why_first(contention, [unknown]) == ""


def test_verdict_of_ended_run_names_window_and_whole_run() -> None:
    watched = Watched(ranks=2)
    watched.train(40, slow(data=0.08))
    watched.finish()
    verdict = watched.verdict
    assert verdict.cause is Cause.INPUT_BOUND
    steps, step_seconds, phases = max(
        (rank.totals.steady_means() for rank in watched.job.ranks), key=lambda each: each[1]
    )
    assert steps
    assert re.match(r"in its last (9|10) s .* of each .* step waiting for data", verdict.evidence)
    assert "; over the whole run " in verdict.evidence
    assert verdict.evidence.endswith(
        f"data takes {duration(phases['data'])} of each {duration(step_seconds)} step"
    )


def test_switch_comes_before_a_busy_node_at_the_end_as_well() -> None:
    """What it costs is not measured; it is the owner's to change."""
    watched = Watched(ranks=2)
    watched.job.switches = ("torch.autograd.set_detect_anomaly(True)",)
    delay = Family("process_run_delay_seconds", "", "counter", ("run", "rank"))
    watched.families = [delay]
    for second in range(40):
        delay.samples[:] = [((RUN, str(rank)), 0.4 * second) for rank in range(2)]
        watched.train(1)
    assert watched.verdict.cause is Cause.DEBUG_SWITCH
    watched.finish()
    assert watched.verdict.cause is Cause.DEBUG_SWITCH
    assert [each.cause for each in watched.verdict.others] == [Cause.CPU_CONTENTION]


@pytest.mark.parametrize("data", [0.0, 0.08])
def test_ended_run_keeps_the_account_of_its_step(data: float) -> None:
    watched = Watched(ranks=2)
    watched.train(40, slow(data=data))
    watched.finish()
    account = some(watched.verdict.account)
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds, rel=1e-3)
