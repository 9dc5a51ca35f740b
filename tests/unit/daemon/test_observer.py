"""The observer on a simulated job: its verdicts, their ranks, onsets and delays; and cases without one."""

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Iterable

import numpy as np
import pytest
from benchmarks.accuracy.streams import Change, Job
from tests.support.values import some

from torchperfd.model.formatting import duration
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.detect.onset import OnsetDetector
from torchperfd_daemon.diagnosis.evidence import MIN_FINDINGS, WINDOW_SAMPLES
from torchperfd_daemon.diagnosis.remedies import fix_of
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.observer.run_watch import why_first
from torchperfd_daemon.service.translate import rank_status_to_message
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.views.model import rank_state

RUN = "streamed"


class Watched:
    """A job of some ranks, and the observer that watches it once a second of the job's clock."""

    def __init__(
        self,
        ranks: int = 8,
        seed: int = 0,
        spread: float = 0.03,
        *,
        stages: int = 1,
        on_device: bool = False,
    ) -> None:
        self.store = Store(clock=lambda: 0.0)
        self.job = Job(
            self.store, ranks, np.random.default_rng(seed), spread, stages=stages, on_device=on_device
        )
        self.families: list[Family] = []
        self.stacks: list[RankStacks] = []
        self.asked = 0
        self.observer = Observer(
            self.store,
            self._ask,
            lambda: self.families,
            clock=lambda: self.job.seconds,
            wall=lambda: self.job.wall,
        )

    async def _ask(self, ranks: Iterable[Rank], seconds: float, /) -> AsyncIterator[RankStacks]:
        self.asked += 1
        for reported in self.stacks:
            yield reported

    def train(self, seconds: int, change: Change = lambda _rank, _step: {}) -> list[Verdict | None]:
        """Train so many seconds; return the verdict at the end of each."""
        reported = []
        for _ in range(seconds):
            self.job.train(1.0, change)
            assert self.observer.sample() == []
            reported.append(self.observer.verdict(RUN))
        return reported

    def stand(self, seconds: int) -> list[int]:
        """Let time go by without a step; return after which seconds stacks were asked for."""
        due = []
        for second in range(1, seconds + 1):
            self.job.seconds += 1
            if self.observer.sample():
                due.append(second)
                asyncio.run(self.observer.read_stacks(RUN))
        return due

    @property
    def verdict(self) -> Verdict:
        return some(self.observer.verdict(RUN))


def test_healthy_run_is_none_once_a_window_is_full() -> None:
    reported = Watched().train(60)
    assert reported[: WINDOW_SAMPLES + MIN_FINDINGS] == [None] * (WINDOW_SAMPLES + MIN_FINDINGS)
    assert {each.cause for each in reported if each} == {Cause.NONE}
    assert reported[WINDOW_SAMPLES + MIN_FINDINGS + 2] is not None


@pytest.mark.parametrize("seed", range(5))
def test_slow_rank_is_named_with_phase_and_cost_within_10_s(seed: int) -> None:
    watched = Watched(seed=seed)
    watched.train(30)
    began = watched.job.step

    def slow(rank: int, _step: int) -> dict[str, float]:
        return {"forward": 0.03} if rank == seed else {}

    reported = watched.train(30, slow)
    named = [each is not None and (each.cause, each.rank) == (Cause.SLOW_RANK, seed) for each in reported]
    assert any(named[:10]), [each and each.summary for each in reported[:10]]
    assert all(named[10:])
    verdict = watched.verdict
    assert verdict.phase == "forward"
    assert verdict.cost_seconds_per_step == pytest.approx(0.03, rel=0.1)
    assert abs(some(verdict.onset_step) - began) <= 5
    assert watched.observer.stragglers()[RUN].keys() == {seed}


@pytest.mark.parametrize("seed", range(5))
def test_rank_slow_at_times_is_named_before_the_window_fills(seed: int) -> None:
    """A rank that is slow now and then is named before the window is full of slow steps."""
    watched = Watched(seed=seed)
    watched.train(30)
    reported = watched.train(
        20, lambda rank, step: {"forward": 0.08} if rank == seed and step % 4 == 0 else {}
    )
    named = [each is not None and each.rank == seed for each in reported]
    assert any(named[:8]), [each and each.summary for each in reported[:10]]
    assert all(named[8:])


@pytest.mark.parametrize("seed", range(5))
def test_rank_with_many_times_longer_steps_is_named_as_soon(seed: int) -> None:
    watched = Watched(seed=seed)
    watched.train(30)
    reported = watched.train(20, lambda rank, _step: {"forward": 0.25} if rank == seed else {})
    named = [each is not None and each.rank == seed for each in reported]
    assert any(named[:8]), [each and each.summary for each in reported[:10]]
    assert all(named[8:])


@pytest.mark.parametrize("began", [0, 30])
@pytest.mark.parametrize(("phase", "cause"), [("data", Cause.INPUT_BOUND), ("backward", Cause.SLOW_RANK)])
@pytest.mark.parametrize("seed", range(3))
def test_slow_rank_is_named_where_only_devices_wait(seed: int, phase: str, cause: Cause, began: int) -> None:
    """With NCCL the hosts of all ranks spend the same time, but for the loader's."""
    watched = Watched(seed=seed, on_device=True)
    watched.train(began)
    reported = watched.train(40, lambda rank, _step: {phase: 0.02} if rank == seed else {})
    named = [each is not None and (each.cause, each.rank) == (cause, seed) for each in reported]
    assert any(named[:12]), [each and each.summary for each in reported[:12]]
    assert all(named[12:])
    assert watched.verdict.phase == phase
    # What the ranks have waited for before, the slowest of each step, is no cost of this delay.
    assert 0.017 <= watched.verdict.cost_seconds_per_step <= 0.022


@pytest.mark.parametrize("seed", range(5))
def test_slow_rank_on_a_device_is_named_although_steps_vary(seed: int) -> None:
    """Other users of the machine make all steps longer now and then, which hides the onset."""
    watched = Watched(seed=seed, on_device=True)
    chance = random.Random(seed)
    busy = [chance.random() * 0.12 if step // 40 % 2 else 0.0 for step in range(1000)]
    watched.train(30, lambda _rank, step: {"forward": busy[step]})
    reported = watched.train(20, lambda rank, _step: {"data": 0.03} if rank == seed else {})
    named = [each is not None and (each.cause, each.rank) == (Cause.INPUT_BOUND, seed) for each in reported]
    assert any(named[:9]), [each and each.summary for each in reported[:12]]
    assert all(named[9:])


@pytest.mark.parametrize("seed", range(5))
def test_healthy_ranks_whose_devices_wait_are_not_blamed(seed: int) -> None:
    reported = Watched(seed=seed, on_device=True).train(60)
    assert {each.cause for each in reported if each} == {Cause.NONE}


def test_a_rank_that_was_always_slow_is_named_without_an_onset() -> None:
    watched = Watched()
    watched.train(20, lambda rank, _step: {"backward": 0.02} if rank == 6 else {})
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.onset_step) == (Cause.SLOW_RANK, 6, None)
    assert verdict.node == "node-0"


def test_two_slow_ranks_are_both_named() -> None:
    watched = Watched()
    watched.train(20, lambda rank, _step: {"forward": 0.03 + 0.01 * (rank == 5)} if rank in (2, 5) else {})
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.SLOW_RANK, 5)
    assert "so does rank 2" in watched.verdict.evidence
    assert watched.observer.stragglers()[RUN].keys() == {2, 5}


def test_a_starving_rank_is_input_bound() -> None:
    watched = Watched()
    watched.train(20)
    watched.train(20, lambda rank, _step: {"data": 0.04} if rank == 1 else {})
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.INPUT_BOUND, 1, "data")
    assert verdict.cost_seconds_per_step == pytest.approx(0.04, rel=0.1)


def test_collections_on_one_rank_are_the_cause_of_its_lateness() -> None:
    watched = Watched()
    watched.train(20)
    watched.train(20, lambda rank, _step: {"gc": 0.025} if rank == 3 else {})
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank) == (Cause.GARBAGE_COLLECTION, 3)
    assert verdict.cost_seconds_per_step == pytest.approx(0.025, rel=0.1)


def test_rank_that_saves_at_every_sample_still_counts() -> None:
    watched = Watched()
    writer = next(watched.store.ranks())
    for _ in range(12):
        watched.job.train(1.0, lambda rank, _step: {"checkpoint": 0.02} if rank == 0 else {})
        writer.state = State.CHECKPOINTING
        watched.observer.sample()
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.CHECKPOINT, 0)


def test_finding_of_a_sample_is_not_repeated_without_new_steps() -> None:
    watched = Watched()
    watched.train(20)
    watched.train(4, lambda rank, _step: {"forward": 0.03} if rank == 5 else {})
    watched.stand(5)
    assert watched.verdict.cause is Cause.NONE


def test_time_without_a_processor_is_contention() -> None:
    watched = Watched(ranks=4)
    delay = Family("process_run_delay_seconds", "", "counter", ("run", "rank"))
    watched.families = [delay]
    late = 0.03
    for second in range(40):
        on = second >= 20
        delay.samples[:] = [((RUN, str(rank)), 0.0) for rank in range(4)]
        waited = max(0, second - 19) / 0.13 * late
        delay.samples[2] = ((RUN, "2"), waited)
        watched.train(1, lambda rank, _step, on=on: {"forward": late} if on and rank == 2 else {})  # type: ignore[misc]
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.CPU_CONTENTION, 2)


@pytest.mark.parametrize("seed", range(5))
def test_throttled_rank_is_named_though_its_lateness_varies(seed: int) -> None:
    watched = Watched(ranks=4, seed=seed)
    held_back = Family("process_throttled_seconds", "", "counter", ("run", "rank"))
    held_back.samples[:] = [((RUN, str(rank)), 0.0) for rank in range(4)]
    watched.families = [held_back]
    watched.train(20)
    late = np.random.default_rng(seed).random(500) < 0.25
    reported = []
    for second in range(12):
        held_back.samples[2] = ((RUN, "2"), 0.6 * (second + 1))
        reported += watched.train(1, lambda rank, step: {"forward": 0.3} if rank == 2 and late[step] else {})
    named = [
        each is not None and (each.cause, each.rank) == (Cause.CGROUP_THROTTLING, 2) for each in reported
    ]
    assert all(named[10:]), [each and each.summary for each in reported]


@pytest.mark.parametrize("seed", range(5))
def test_rank_with_gc_in_some_steps_is_named_with_any_lateness(seed: int) -> None:
    watched = Watched(ranks=4, seed=seed, spread=0.1)
    watched.train(20)
    late = np.random.default_rng(seed).random(500) < 0.25
    reported = watched.train(14, lambda rank, step: {"gc": 0.13} if rank == 2 and late[step] else {})
    named = [
        each is not None and (each.cause, each.rank) == (Cause.GARBAGE_COLLECTION, 2) for each in reported
    ]
    assert all(named[10:]), [each and each.summary for each in reported]


def test_quota_that_throttles_all_ranks_blames_no_rank() -> None:
    watched = Watched(ranks=4)
    held_back = Family("process_throttled_seconds", "", "counter", ("run", "rank"))
    watched.families = [held_back]
    for second in range(40):
        held_back.samples[:] = [((RUN, str(rank)), 0.6 * max(0, second - 19)) for rank in range(4)]
        watched.train(1, lambda _rank, _step, on=second >= 20: {"forward": 0.06} if on else {})  # type: ignore[misc]
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.CGROUP_THROTTLING, None)
    assert watched.observer.stragglers()[RUN] == {}


def test_memory_full_within_the_hour_is_reported_in_advance() -> None:
    watched = Watched(ranks=2)
    resident = Family("process_resident_memory_bytes", "", "gauge", ("run", "rank"))
    available = Family("node_memory_available_bytes", "", "gauge")
    watched.families = [resident, available]
    for _ in range(60):
        grown = watched.job.seconds * 2**20
        resident.samples[:] = [((RUN, "0"), 1e9), ((RUN, "1"), 1e9 + grown)]
        available.samples[:] = [((), 600 * 2**20)]
        watched.train(1)
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.cost_seconds_per_step) == (Cause.MEMORY_PRESSURE, 1, 0.0)
    assert "memory grows by 1 MiB/s and is full in 10 min" in verdict.evidence


def test_slowdown_of_all_ranks_is_unknown_with_the_grown_phase() -> None:
    """A slowdown of all ranks without a known cause names the phase that grew."""
    watched = Watched()
    watched.train(20)
    watched.train(20, lambda _rank, _step: {"optimizer": 0.03})
    verdict = watched.verdict
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.UNKNOWN, None, "optimizer")
    assert verdict.cost_seconds_per_step == pytest.approx(0.03, rel=0.1)


def test_what_comes_every_so_many_steps_is_in_the_evidence() -> None:
    watched = Watched()
    watched.train(40, lambda _rank, step: {"forward": 0.09} if step % 5 == 0 else {})
    remark = r"; every 5th step takes (8|9)\d.* ms longer, most of it in forward$"
    assert re.search(remark, watched.verdict.evidence)


def test_what_becomes_slower_bit_by_bit_is_unknown_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchperfd_daemon.diagnosis.detect.onset.OnsetDetector.observe", lambda *_: None)
    watched = Watched(ranks=2)
    reported = watched.train(150)
    began = watched.job.step
    reported += watched.train(90, lambda _rank, step: {"forward": min(0.012, 2e-5 * (step - began))})
    causes = [each.cause for each in reported if each]
    assert set(causes[:150]) == {Cause.NONE}
    assert causes[-1] is Cause.UNKNOWN
    assert "fewer than the" in watched.verdict.evidence


def test_run_after_a_fault_is_healthy_and_keeps_its_cost() -> None:
    watched = Watched()
    watched.train(20)
    watched.train(30, lambda rank, _step: {"forward": 0.05} if rank == 0 else {})
    reported = watched.train(30)
    assert reported[-1] is not None
    assert reported[-1].cause is Cause.NONE
    lost = watched.observer.lost_seconds()[RUN][Cause.SLOW_RANK]
    # Of each second a third is lost, from the verdict's start to its end.
    assert 20 / 3 < lost < 40 / 3
    for rank in watched.job.ranks:
        rank.state = State.FINISHED
    watched.observer.sample()
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.SLOW_RANK, 0)


def test_a_slowdown_that_fades_is_over_without_an_onset(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.train(20)
    watched.train(20, lambda _rank, _step: {"optimizer": 0.03})
    assert watched.verdict.onset_step is not None
    observe = OnsetDetector.observe

    def keep_quiet(detector: OnsetDetector, seconds: float) -> None:
        observe(detector, seconds)

    with monkeypatch.context() as unseen:
        unseen.setattr(OnsetDetector, "observe", keep_quiet)
        watched.train(40)
    began = watched.job.step
    watched.train(20, lambda _rank, _step: {"optimizer": 0.06})
    assert abs(some(watched.verdict.onset_step) - began) <= 5


def test_a_change_of_verdict_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with caplog.at_level(logging.INFO, "torchperfd.observer"):
        watched.train(20)
        watched.train(30, lambda rank, _step: {"forward": 0.03} if rank == 4 else {})
    words = [record.getMessage() for record in caplog.records]
    assert [word.split(" · ")[0] for word in words] == ["run streamed: none", "run streamed: slow rank"]


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


def test_hang_within_10_s_names_rank_line_and_collective() -> None:
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, COMPUTE if rank == 2 else REDUCE) for rank in range(4)]
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
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, COMPUTE if rank == 2 else REDUCE) for rank in range(4)]
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
    for rank in watched.job.ranks:
        rank.state = State.FINISHED
    assert watched.stand(30) == []


def test_stall_without_a_culprit_requests_stacks_again() -> None:
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, REDUCE) for rank in range(4)]
    assert watched.stand(35) == [9, 19, 29]
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.HANG, None)


def test_hang_duration_in_evidence_grows_each_sample() -> None:
    watched = Watched(ranks=4)
    watched.train(20)
    watched.stacks = [stacks(rank, COMPUTE if rank == 2 else REDUCE) for rank in range(4)]
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
    assert [rank_state(rank_status_to_message(rank)) for rank in watched.job.ranks] == ["training"] * 4
    watched.stand(12)
    states = [rank_state(rank_status_to_message(rank)) for rank in watched.job.ranks]
    assert states == ["stalled", "stalled", "stopped", "stalled"]
    assert [rank.stalled_seconds for rank in watched.job.ranks] == pytest.approx([20] * 4, abs=1)
    watched.train(3)
    assert [rank_state(rank_status_to_message(rank)) for rank in watched.job.ranks] == ["training"] * 4


def test_long_pause_without_waiting_ranks_is_no_state() -> None:
    """A lone rank that computes something else for a minute may have its reasons."""
    watched = Watched(ranks=1)
    watched.train(20)
    watched.stacks = [stacks(0, COMPUTE)]
    watched.stand(60)
    assert rank_state(rank_status_to_message(watched.job.ranks[0])) == "training"


def test_verdict_second_cause_is_beside_the_first() -> None:
    def slow(rank: int, _step: int) -> dict[str, float]:
        return {"data": 0.08, "forward": 0.04 if rank == 2 else 0.0}

    watched = Watched(ranks=4)
    watched.train(40, slow)
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
    watched.train(40, lambda _rank, _step: {"data": 0.08})
    for rank in watched.job.ranks:
        rank.state = State.FINISHED
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
    for rank in watched.job.ranks:
        rank.state = State.FINISHED
    assert watched.verdict.cause is Cause.DEBUG_SWITCH
    assert [each.cause for each in watched.verdict.others] == [Cause.CPU_CONTENTION]


@pytest.mark.parametrize("data", [0.0, 0.08])
def test_ended_run_keeps_the_account_of_its_step(data: float) -> None:
    watched = Watched(ranks=2)
    watched.train(40, lambda _rank, _step: {"data": data})
    for rank in watched.job.ranks:
        rank.state = State.FINISHED
    account = some(watched.verdict.account)
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds, rel=1e-3)


def test_onset_is_not_claimed_of_what_was_there_before() -> None:
    """Rank 1 is slow from the start; later all ranks become slower, which rank 1 has no part in."""
    watched = Watched(ranks=4)

    def slow(rank: int, _step: int) -> dict[str, float]:
        return {"forward": 0.04} if rank == 1 else {}

    watched.train(30, slow)
    assert (watched.verdict.cause, watched.verdict.rank) == (Cause.SLOW_RANK, 1)
    watched.train(30, lambda rank, step: {**slow(rank, step), "optimizer": 0.06})
    found = {each.cause: each for each in (watched.verdict, *watched.verdict.others)}
    assert found[Cause.UNKNOWN].onset_step is not None
    assert found[Cause.SLOW_RANK].onset_step is None
    assert "since step" not in found[Cause.SLOW_RANK].summary


def collecting(seconds: float, every: int, apart: int) -> Change:
    """Return collections of all ranks every so many steps, each rank so many steps after the one before."""
    return lambda rank, step: {"gc": seconds} if (step + apart * rank) % every == 0 else {}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_collections_at_different_steps_cost_their_sum(seed: int, on_device: bool) -> None:
    """Each rank collects for 2.5 % of its steps, and so one of eight does in every twelfth."""
    watched = Watched(seed=seed, on_device=on_device)
    reported = watched.train(40, collecting(0.25, every=100, apart=12))
    assert {each.cause for each in reported[20:] if each} == {Cause.GARBAGE_COLLECTION}
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
    assert {each.cause for each in reported[12:] if each} == {Cause.GARBAGE_COLLECTION}
    assert watched.verdict.rank is None
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_earlier_short_collections_do_not_shorten_long_ones(seed: int) -> None:
    """The mean of a whole run's collections is that of thousands of short ones."""
    watched = Watched(4, seed=seed)
    watched.train(60, lambda _rank, _step: {"gc": 0.0002})
    storm = collecting(0.05, every=20, apart=5)
    reported = watched.train(40, storm)
    assert {each.cause for each in reported[30:] if each} == {Cause.GARBAGE_COLLECTION}
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_collections_at_the_same_steps_cost_one_ranks(seed: int) -> None:
    watched = Watched(seed=seed)
    reported = watched.train(40, collecting(0.25, every=100, apart=0))
    assert {each.cause for each in reported[20:] if each} == {Cause.NONE}


@pytest.mark.parametrize("every", [4, 20, 40])
@pytest.mark.parametrize("seed", range(3))
def test_collections_of_one_rank_are_that_ranks(seed: int, every: int) -> None:
    """However rare they are: a window has two of the rarest, which alone would be chance."""
    watched = Watched(seed=seed)
    reported = watched.train(
        40, lambda rank, step: {"gc": 0.0125 * every} if rank == 2 and step % every == 0 else {}
    )
    named = [
        each is not None and (each.cause, each.rank) == (Cause.GARBAGE_COLLECTION, 2) for each in reported
    ]
    assert all(named[10:])
    assert watched.verdict.cost_seconds_per_step == pytest.approx(0.0125, rel=0.15)
    assert "different steps" not in watched.verdict.evidence


@pytest.mark.parametrize("seed", range(3))
def test_collections_of_a_rank_that_is_not_late_cost_nothing(seed: int) -> None:
    """They replace other work, as those do that run while a rank waits anyway."""
    watched = Watched(seed=seed)
    reported = watched.train(
        40, lambda rank, step: {"gc": 0.02, "forward": -0.02} if rank == 2 and step % 2 == 0 else {}
    )
    assert {each.cause for each in reported if each} == {Cause.NONE}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_unequal_stages_are_an_imbalance_and_no_slow_rank(seed: int, on_device: bool) -> None:
    """Four ranks of the second stage work for 20 ms more than those of the first."""
    watched = Watched(seed=seed, stages=2, on_device=on_device)
    reported = watched.train(40, lambda rank, _step: {"forward": 0.02} if rank >= 4 else {})
    assert {each.cause for each in reported[20:] if each} == {Cause.PIPELINE_IMBALANCE}
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
    reported = Watched(seed=seed, stages=4).train(40)
    assert {each.cause for each in reported if each} == {Cause.NONE}
