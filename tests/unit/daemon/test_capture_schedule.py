"""When a capture runs: its steps, its place in the queue, and its end without a daemon."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.captures.attempt import QueueEntry, RunQueue, When, agree
from torchperfd_daemon.captures.manifest import (
    CaptureOptions,
    CaptureRecord,
    CaptureState,
    RankManifest,
    RankTrace,
)
from torchperfd_daemon.captures.rank_attempts import Ack
from torchperfd_daemon.errors import TorchperfdError

acks = st.dictionaries(
    st.integers(0, 100),
    st.builds(
        Ack, st.just(True), st.just(""), st.integers(0, 10**6), st.floats(0, 60).map(lambda s: round(s, 3))
    ),
    min_size=1,
    max_size=8,
)


@given(acks, st.integers(1, 1000), st.integers(0, 2 * 10**6))
def test_chosen_step_is_exact_or_refused_with_farthest_ranks(
    acks: dict[int, Ack], steps: int, at_step: int
) -> None:
    soonest, _ = agree(When(), acks, steps)
    assert soonest > max(ack.next_step for ack in acks.values())
    if at_step >= soonest:
        assert agree(When(at_step), acks, steps) == (at_step, at_step + steps)
        return
    with pytest.raises(TorchperfdError) as refused:
        agree(When(at_step), acks, steps)
    named = [
        f"step {at_step} is past or too near: rank {rank} is at step {ack.next_step};"
        f" ask for step {soonest} or a later one"
        for rank, ack in acks.items()
        if ack.next_step == max(each.next_step for each in acks.values())
    ]
    assert str(refused.value) in named


@given(acks, st.floats(0.001, 86_400))
def test_a_duration_is_the_nearest_number_of_mean_steps(acks: dict[int, Ack], seconds: float) -> None:
    means = [ack.step_seconds for ack in acks.values() if ack.step_seconds > 0]
    when = When(duration_seconds=seconds)
    if not means:
        with pytest.raises(TorchperfdError, match="the length of a step is unknown; use --steps"):
            agree(when, acks, 5)
        return
    mean = sum(means) / len(means)
    first, after = agree(when, acks, 5)
    made = after - first
    assert 1 <= made <= 1000
    if made < 1000:
        assert made == 1 or (made - 0.501) * mean <= seconds
        assert seconds <= (made + 0.501) * mean
    else:
        assert seconds >= 999 * mean


def test_ten_seconds_of_steps_of_a_fifth_are_fifty() -> None:
    reported = {0: Ack(True, "", 10, 0.3), 1: Ack(True, "", 12, 0.1), 2: Ack(True, "", 11, 0.0)}
    assert agree(When(duration_seconds=10), reported, 5) == (12 + 2 + 3, 12 + 2 + 3 + 50)


@pytest.mark.parametrize(("pause", "made"), [(0.0, 5), (0.1, 5), (0.3, 3), (0.9, 1)])
def test_short_pause_limits_the_steps(pause: float, made: int) -> None:
    acks = {0: Ack(True, "", 10, 0.1, 0.01), 1: Ack(True, "", 10, 0.1, pause)}
    first, after = agree(When(), acks, 5, 1.0)
    assert after - first == made
    assert agree(When(), acks, 5) == (first, first + 5)


def test_pause_of_one_step_too_long_is_refused() -> None:
    with pytest.raises(TorchperfdError, match=r"would pause for about 1.2 s when one step was captured"):
        agree(When(), {0: Ack(True, "", 10, 0.1, 1.2)}, 5, 1.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.one_of(st.none(), st.integers(0, 20))), max_size=80))
def test_only_the_first_capture_of_each_run_may_start(moves: list[tuple[str, int | None]]) -> None:
    queue = RunQueue()
    lines: dict[str, list[QueueEntry]] = {"a": [], "b": []}
    for run, leaver in moves:
        line = lines[run]
        if leaver is not None:
            if leaver < len(line):
                queue.leave(line.pop(leaver))
        elif len(line) == 17:
            with pytest.raises(TorchperfdError, match=f"16 captures of run {run} are queued already"):
                queue.enter(run, wait=True)
        else:
            line.append(queue.enter(run, wait=True))
        for each in lines.values():
            assert [place.woken.is_set() for place in each] == [
                position == 0 for position in range(len(each))
            ]
        assert len(queue) == sum(map(len, lines.values()))


def test_capture_without_wait_is_refused_while_one_runs() -> None:
    queue = RunQueue()
    first = queue.enter("a", wait=False)
    with pytest.raises(TorchperfdError, match=r"a capture of run a is in progress; .* --queue"):
        queue.enter("a", wait=False)
    assert queue.enter("b", wait=False).woken.is_set()
    queue.leave(first)
    assert queue.enter("a", wait=False).woken.is_set()


def test_queue_every_capture_waits_for_an_automatic_one() -> None:
    queue = RunQueue()
    automatic = queue.enter("a", wait=False, automatic=True)
    users = queue.enter("a", wait=False)
    assert (automatic.woken.is_set(), users.woken.is_set()) == (True, False)
    for is_automatic in (False, True):
        with pytest.raises(TorchperfdError, match="a capture of run a is in progress"):
            queue.enter("a", wait=False, automatic=is_automatic)
    queue.leave(automatic)
    assert users.woken.is_set()


def test_queue_automatic_capture_waits_for_none() -> None:
    queue = RunQueue()
    first = queue.enter("a", wait=False, automatic=True)
    with pytest.raises(TorchperfdError, match="a capture of run a is in progress"):
        queue.enter("a", wait=False, automatic=True)
    queue.leave(first)
    assert queue.enter("a", wait=False, automatic=True).woken.is_set()


async def test_waiting_capture_is_woken_by_the_previous_one() -> None:
    queue = RunQueue()
    first, second = queue.enter("a", wait=True), queue.enter("a", wait=True)
    woken = asyncio.create_task(second.woken.wait())
    await asyncio.sleep(0)
    assert not woken.done()
    queue.leave(first)
    await asyncio.wait_for(woken, 10)


NO_REPORT = "no report from this rank; the daemon ended during the capture"
live = st.sampled_from([CaptureState.PREPARING, CaptureState.ARMED])
ended = st.sampled_from([CaptureState.COMPLETE, CaptureState.FAILED])


def own(rank: int, state: CaptureState) -> RankManifest:
    whole = state is CaptureState.COMPLETE
    reason, file = ("", f"rank{rank}.json") if whole else ("own words", "")
    return RankManifest(rank, state, reason, file, 9, "ab", (40, 45), CaptureOptions())


@given(
    st.dictionaries(st.integers(0, 9), st.one_of(live, ended), min_size=1),
    st.dictionaries(st.integers(0, 9), ended),
    st.booleans(),
)
def test_each_rank_has_its_own_word_or_none_once_time_is_up(
    known: dict[int, CaptureState], written: dict[int, CaptureState], over: bool
) -> None:
    ranks = [RankTrace(rank, state, clock_offset_ns=-7) for rank, state in sorted(known.items())]
    record = CaptureRecord("one", "bert", "command", 0.0, CaptureState.ARMED, ranks=ranks, ends_by=100.0)
    record.add_rank_manifests([own(rank, state) for rank, state in written.items()], 101.0 if over else 99.0)
    for trace in record.ranks:
        if known[trace.rank].ended:
            assert (trace.state, trace.reason) == (known[trace.rank], "")
        elif trace.rank in written:
            reported = own(trace.rank, written[trace.rank])
            assert (trace.state, trace.reason, trace.file) == (reported.state, reported.reason, reported.file)
            assert trace.clock_offset_ns == -7
        else:
            expected = (CaptureState.FAILED, NO_REPORT) if over else (known[trace.rank], "")
            assert (trace.state, trace.reason) == expected
    states = {trace.state for trace in record.ranks}
    if any(not state.ended for state in states):
        assert record.state is CaptureState.ARMED
    elif states == {CaptureState.COMPLETE}:
        assert record.state is CaptureState.COMPLETE
    else:
        partial = CaptureState.COMPLETE in states
        assert record.state is (CaptureState.PARTIAL if partial else CaptureState.FAILED)


def test_missing_deadline_never_expires() -> None:
    record = CaptureRecord("one", "bert", "command", 0.0, ranks=[RankTrace(0)])
    record.add_rank_manifests([], 1e11)
    assert record.state is CaptureState.PREPARING


def test_complete_trace_has_the_agreed_steps() -> None:
    record = CaptureRecord("one", "bert", "command", 0.0, ranks=[RankTrace(0), RankTrace(1)], ends_by=1.0)
    record.add_rank_manifests([own(1, CaptureState.COMPLETE)], 2.0)
    assert (record.state, record.step_range) == (CaptureState.PARTIAL, (40, 45))
    assert record.reason == f"rank 0: {NO_REPORT}"
