"""What a capture can be asked for beyond the next steps: a step, a duration, a queue, an end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.served import GIVE_UP_S
from tests.support.values import some
from tests.unit.daemon.test_coordinator import FIVE, CapturingNode, Rank, done, failed, ready

from torchperfd_daemon.captures.attempt import Progress, When
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.captures.rank_attempts import Result
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError
from torchperfd_daemon.untrusted_files import decode_clean


@pytest.fixture
def node(tmp_path: Path) -> CapturingNode:
    return CapturingNode(tmp_path)


async def ended(node: CapturingNode, *ranks: Rank, **asked: Any) -> Progress:
    """Capture to the end and return the last word."""
    last = None
    async for progress in node.coordinator.capture("bert", list(ranks), FIVE, GIVE_UP_S, **asked):
        last = progress
    return some(last)


async def test_a_step_that_all_can_reach_is_the_first_one(node: CapturingNode) -> None:
    ranks = [Rank(node, 0), Rank(node, 1)]
    last = await ended(node, *ranks, when=When(at_step=5000))
    assert [rank.committed for rank in ranks] == [[5000]] * 2
    assert last.record.step_range == (5000, 5005)


async def test_a_step_that_is_past_is_refused_and_the_ranks_are_let_go(node: CapturingNode) -> None:
    ranks = [Rank(node, 0, next_step=90), Rank(node, 1)]
    last = await ended(node, *ranks, when=When(at_step=95))
    reason = "step 95 is past or too near: rank 1 is at step 100; ask for step 105 or a later one"
    assert (last.record.state, last.record.reason) == (CaptureState.FAILED, reason)
    assert last.record.step_range is None
    assert [rank.cancelled for rank in ranks] == [[reason]] * 2
    assert node.catalog.get(last.record.capture_id).reason == reason
    assert node.idle()


async def test_a_step_that_was_missed_does_not_come_again(node: CapturingNode) -> None:
    rank = Rank(node, 0)
    rank.on_commit = lambda capture_id, start: rank.result(capture_id, failed("missed", retry=True))
    last = await ended(node, rank, when=When(at_step=5000))
    assert (last.record.reason, rank.committed) == ("rank 0: missed", [5000])


async def test_duration_becomes_a_step_range_sent_to_all_ranks(node: CapturingNode) -> None:
    ranks = [Rank(node, 0), Rank(node, 1)]
    last = await ended(node, *ranks, when=When(duration_seconds=4.0))
    assert [rank.steps_told for rank in ranks] == [40, 40]
    assert (last.record.options.steps, last.record.step_range) == (40, (105, 145))
    assert node.catalog.get(last.record.capture_id).options.steps == 40


async def test_a_rank_that_captured_other_steps_has_failed(node: CapturingNode) -> None:
    old = Rank(node, 0)
    other = Result(True, "", False, 105, "rank0.json", 10, "ab", steps=5)
    old.on_commit = lambda capture_id, start: old.result(capture_id, other)
    last = await ended(node, old, Rank(node, 1), when=When(duration_seconds=4.0))
    assert last.record.state is CaptureState.PARTIAL
    assert last.record.reason == "rank 0: it captured steps 105 to 109; its client may be too old"


async def test_manifest_names_its_ranks_from_the_start(node: CapturingNode) -> None:
    rank = Rank(node, 3)
    capture = node.coordinator.capture("bert", [rank], FIVE, 30.0, trigger="rule slow")
    first = await anext(capture)
    record = decode_clean((first.folder / "manifest.json").read_bytes(), CaptureRecord)
    assert (record.state, record.trigger, record.run) == (CaptureState.PREPARING, "rule slow", "bert")
    assert (record.job_name, record.world_size, record.ended_at) == ("bert", 8, 0.0)
    assert record.ends_by > 1_700_000_030.0
    [trace] = record.ranks
    assert (trace.rank, trace.node, trace.pid, trace.clock_offset_ns) == (3, "node-a", 103, 0)
    assert (trace.torch_version, trace.python_version, trace.client_version) == ("2.13", "3.11", "0.1")
    assert [progress async for progress in capture]
    record = node.catalog.get(first.record.capture_id)
    assert (record.ended_at, record.cancelled_by) == (1_700_000_000.0, "")


async def test_each_rank_gets_its_share_of_bytes(tmp_path: Path) -> None:
    node = CapturingNode(tmp_path)
    node.coordinator = Coordinator(Catalog(tmp_path / "captures", Quota(capture_bytes=40)))
    ranks = [Rank(node, rank) for rank in range(3)]
    await ended(node, *ranks)
    assert [rank.max_bytes for rank in ranks] == [13] * 3


async def test_progress_shows_the_state_of_each_rank(node: CapturingNode) -> None:
    quick, slow = Rank(node, 0), Rank(node, 1)
    capture_ids: list[str] = []
    slow.on_commit = lambda capture_id, start: capture_ids.append(capture_id)
    reported = []
    async for progress in node.coordinator.capture("bert", [quick, slow], FIVE, GIVE_UP_S):
        states = [trace.state.value for trace in progress.record.ranks]
        reported.append((progress.record.state.value, states, dict(progress.next_steps)))
        if len(reported) == 3:
            slow.steps_seen = 103
        elif len(reported) == 4:
            slow.result(capture_ids[0], done(1, 105))
    assert reported == [
        ("preparing", ["preparing", "preparing"], {0: 0, 1: 0}),
        ("armed", ["armed", "armed"], {0: 0, 1: 0}),
        ("armed", ["complete", "armed"], {0: 0, 1: 0}),
        ("armed", ["complete", "armed"], {0: 0, 1: 103}),
        ("complete", ["complete", "complete"], {0: 0, 1: 103}),
    ]


async def test_queued_captures_run_in_order_with_the_ranks_present(node: CapturingNode) -> None:
    waiting, newcomer = Rank(node, 0), Rank(node, 7)
    waiting.on_prepare = lambda capture_id: None
    first = node.coordinator.capture("bert", [waiting], FIVE, GIVE_UP_S)
    begun = await anext(first)
    second = node.coordinator.capture(
        "bert", [waiting], FIVE, GIVE_UP_S, queue=True, choose_again=lambda: [newcomer]
    )
    queued = await anext(second)
    assert queued.record.state is CaptureState.QUEUED
    assert not queued.folder.exists()
    waiting.ack(begun.record.capture_id, ready())
    assert [progress.record.state async for progress in first][-1] is CaptureState.COMPLETE
    states = [progress.record.state async for progress in second]
    assert states == [CaptureState.PREPARING, CaptureState.ARMED, CaptureState.COMPLETE]
    assert [trace.rank for trace in node.catalog.get(queued.record.capture_id).ranks] == [7]
    assert (len(waiting.prepared), len(newcomer.prepared)) == (1, 1)
    assert node.idle()


async def test_a_queue_that_is_full_refuses(node: CapturingNode) -> None:
    waiting = Rank(node, 0)
    waiting.on_prepare = lambda capture_id: None
    held = [node.coordinator.capture("bert", [waiting], FIVE, GIVE_UP_S, queue=True) for _ in range(17)]
    for capture in held:
        await anext(capture)
    with pytest.raises(TorchperfdError, match="16 captures of run bert are queued already; cancel some"):
        await ended(node, waiting, queue=True)
    for capture in reversed(held):
        await capture.aclose()  # type: ignore[attr-defined]
    assert node.idle()


async def test_a_queued_capture_that_is_cancelled_leaves_no_folder(node: CapturingNode) -> None:
    waiting = Rank(node, 0)
    waiting.on_prepare = lambda capture_id: None
    first = node.coordinator.capture("bert", [waiting], FIVE, GIVE_UP_S)
    begun = await anext(first)
    second = node.coordinator.capture("bert", [Rank(node, 1)], FIVE, GIVE_UP_S, queue=True)
    queued = await anext(second)
    node.coordinator.cancel(queued.record.capture_id)
    [last] = [progress async for progress in second]
    assert (last.record.state, last.record.reason) == (CaptureState.FAILED, "cancelled by command")
    assert last.record.ranks[0].reason == "cancelled by command"
    assert not last.folder.exists()
    waiting.ack(begun.record.capture_id, ready())
    assert [progress.record.state async for progress in first][-1] is CaptureState.COMPLETE
    assert node.idle()


@pytest.mark.parametrize("moment", ["preparing", "armed"])
async def test_cancelled_capture_ends_and_names_the_canceller(node: CapturingNode, moment: str) -> None:
    ranks = [Rank(node, 0), Rank(node, 1)]

    def give_up(*_: object) -> None:
        [capture_id] = node.coordinator.live
        node.coordinator.cancel(capture_id)

    later = asyncio.get_running_loop().call_soon
    if moment == "preparing":
        ranks[1].on_prepare = lambda capture_id: later(give_up)  # type: ignore[assignment]
    else:
        for rank in ranks:
            rank.on_commit = lambda capture_id, start: None
        ranks[1].on_commit = lambda capture_id, start: later(give_up)  # type: ignore[assignment]
        for rank in ranks:
            cancelled = rank.cancel

            def answer(capture_id: str, reason: str, rank: Rank = rank, then: Any = cancelled) -> None:
                then(capture_id, reason)
                rank.result(capture_id, failed(reason))

            rank.cancel = answer  # type: ignore[method-assign]
    last = await ended(node, *ranks)
    record = node.catalog.get(last.record.capture_id)
    assert (record.state, record.reason) == (CaptureState.FAILED, "cancelled by command")
    assert record.cancelled_by == "command"
    assert [trace.reason for trace in record.ranks] == ["cancelled by command"] * 2
    assert all(set(rank.cancelled) == {"cancelled by command"} for rank in ranks)
    assert not last.timed_out
    assert node.idle()


async def test_rank_with_a_trace_before_the_cancel_keeps_it(node: CapturingNode) -> None:
    quick, late = Rank(node, 0), Rank(node, 1)
    late.on_commit = lambda capture_id, start: None

    def cancel(capture_id: str, reason: str) -> None:
        late.result(capture_id, failed(reason))

    late.cancel = cancel  # type: ignore[method-assign]
    capture = node.coordinator.capture("bert", [quick, late], FIVE, GIVE_UP_S)
    async for progress in capture:
        if progress.record.ranks[0].state is CaptureState.COMPLETE and not progress.record.cancelled_by:
            node.coordinator.cancel(progress.record.capture_id)
    record = progress.record
    assert (record.state, record.reason) == (CaptureState.PARTIAL, "cancelled by command")
    assert [trace.file for trace in record.ranks] == ["rank0.json", ""]


async def test_what_is_not_in_progress_cannot_be_cancelled(node: CapturingNode) -> None:
    last = await ended(node, Rank(node, 0))
    for name in (last.record.capture_id, "nothing", "../x"):
        with pytest.raises(NoSuchTargetError, match="queued or in progress"):
            node.coordinator.cancel(name)
