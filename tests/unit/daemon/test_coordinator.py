"""The agreement: every rank profiles the same steps, or it is said which one did not and why."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.served import GIVE_UP_S
from tests.support.values import some

from torchperfd.model.messages import unpack
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd.v1 import session_pb2
from torchperfd_daemon.captures import attempt
from torchperfd_daemon.captures.attempt import Progress, start_step
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureState, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Result
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

FIVE = CaptureOptions(steps=5)
AUTOMATIC = CaptureOptions(steps=5, automatic=True)
Script = Callable[["Rank", str], None]


def ready(next_step: int = 100, step_seconds: float = 0.1) -> Ack:
    return Ack(True, "", next_step, step_seconds)


def done(rank: int, start: int, size: int = 10) -> Result:
    return Result(True, "", False, start, f"rank{rank}.json", size, "ab")


def failed(reason: str, *, retry: bool = False) -> Result:
    return Result(False, reason, retry, 0, "", 0, "")


class Rank:
    """A training process that answers as a test says; by default as it should."""

    def __init__(
        self, node: "CapturingNode", rank: int, *, next_step: int = 100, step_seconds: float = 0.1
    ) -> None:
        self.rank = rank
        self.steps_seen = 0
        self.facts = RankFacts("node-a", 100 + rank, 0, "2.13", "3.11", "0.1", "bert", 8)
        self.node = node
        self.prepared: list[Path] = []
        self.committed: list[int] = []
        self.cancelled: list[str] = []
        self.on_prepare: Callable[[str], None] = lambda capture_id: self.ack(
            capture_id, ready(next_step, step_seconds)
        )
        self.on_commit: Callable[[str, int], None] = lambda capture_id, start: self.result(
            capture_id, done(rank, start)
        )

    def ack(self, capture_id: str, ack: Ack) -> None:
        # Later, as over a network: never from within the coordinator's own call.
        asyncio.get_running_loop().call_soon(self.node.coordinator.on_ack, capture_id, self.rank, ack)

    def result(self, capture_id: str, result: Result) -> None:
        asyncio.get_running_loop().call_soon(self.node.coordinator.on_result, capture_id, self.rank, result)

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        assert options in (FIVE, AUTOMATIC)
        self.max_bytes = max_bytes
        self.prepared.append(directory)
        self.on_prepare(capture_id)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        self.committed.append(start_step)
        self.steps_told = steps
        self.on_commit(capture_id, start_step)

    def cancel(self, capture_id: str, reason: str) -> None:
        self.cancelled.append(reason)


class CapturingNode:
    """A coordinator over a directory."""

    def __init__(self, directory: Path) -> None:
        self.catalog = Catalog(directory / "captures")
        self.coordinator = Coordinator(self.catalog, wall=lambda: 1_700_000_000.0)

    async def capture(self, *ranks: Rank, timeout: float = GIVE_UP_S, run: str = "bert") -> list[Progress]:
        """Capture to the end; return the changes as they were when reported."""
        reported = []
        self.states: list[CaptureState] = []
        self.traces: list[list[tuple[CaptureState, str]]] = []
        async for progress in self.coordinator.capture(run, list(ranks), FIVE, timeout):
            reported.append(progress)
            self.states.append(progress.record.state)
            self.traces.append([(trace.state, trace.reason) for trace in progress.record.ranks])
        return reported

    def idle(self) -> bool:
        """Return whether nothing is left of any capture."""
        return self.coordinator.is_idle


@pytest.fixture
def node(tmp_path: Path) -> CapturingNode:
    return CapturingNode(tmp_path)


async def test_all_ranks_get_one_start_step_ahead_of_the_farthest(node: CapturingNode) -> None:
    ranks = [Rank(node, 0, next_step=100), Rank(node, 1, next_step=104), Rank(node, 2, next_step=90)]
    *_, last = await node.capture(*ranks)
    # A quarter second of 0.1 s steps, rounded up, and two more.
    assert [rank.committed for rank in ranks] == [[104 + 2 + 3]] * 3
    assert node.states == [CaptureState.PREPARING, CaptureState.ARMED, CaptureState.COMPLETE]
    assert not last.timed_out
    assert {path for rank in ranks for path in rank.prepared} == {last.folder}
    assert not any(rank.cancelled for rank in ranks)
    record = last.record
    assert (record.run, record.trigger, record.requested_at) == ("bert", "command", 1_700_000_000.0)
    assert (record.step_range, record.reason, record.options) == ((109, 114), "", FIVE)
    assert [(trace.rank, trace.file, trace.bytes) for trace in record.ranks] == [
        (0, "rank0.json", 10),
        (1, "rank1.json", 10),
        (2, "rank2.json", 10),
    ]
    assert record.capture_id.startswith("20231114-221320-")
    assert node.catalog.get(record.capture_id) == record
    assert node.coordinator.counts.requests == {("command", "complete"): 1}
    assert node.coordinator.counts.bytes == 30
    assert node.coordinator.counts.last_success_unix_seconds == 1_700_000_000.0
    assert node.idle()


async def test_capture_begins_when_the_automatic_one_has_ended(node: CapturingNode) -> None:
    training, armed = Rank(node, 0), asyncio.Event()
    training.on_commit = lambda *_: armed.set()

    async def capture_automatically() -> None:
        async for progress in node.coordinator.capture("bert", [training], AUTOMATIC, GIVE_UP_S):
            states.append(f"automatic {progress.record.state.value}")

    states: list[str] = []
    automatic = asyncio.create_task(capture_automatically())
    await armed.wait()
    [capture_id] = node.coordinator.live
    async for progress in node.coordinator.capture("bert", [Rank(node, 1)], FIVE, GIVE_UP_S):
        states.append(f"{progress.record.state.value} {progress.record.reason}".strip())
        if progress.record.state is CaptureState.QUEUED:
            with pytest.raises(TorchperfdError, match="is in progress"):
                await node.capture(Rank(node, 2))
            training.result(capture_id, done(0, training.committed[0]))
    await automatic
    assert states == [
        "automatic preparing",
        "automatic armed",
        "queued begins when the run's automatic capture has ended",
        "automatic complete",
        "preparing",
        "armed",
        "complete",
    ]
    assert node.idle()


async def test_manifest_exists_when_the_end_is_reported(node: CapturingNode) -> None:
    capture = node.coordinator.capture("bert", [Rank(node, 0)], FIVE, GIVE_UP_S)
    async for progress in capture:
        assert node.coordinator.counts.active == 1
        if progress.record.state.ended:
            assert node.catalog.get(progress.record.capture_id) == progress.record
            break
    await capture.aclose()  # type: ignore[attr-defined]
    [record] = [found.record for found in node.catalog.list().captures]
    assert record.state is CaptureState.COMPLETE
    (node.catalog.folder(record.capture_id) / "rank0.json").touch()
    has_file = node.coordinator.has_file
    assert has_file(record.capture_id, "rank0.json")
    assert not has_file(record.capture_id, "rank1.json")
    assert node.idle()


@pytest.mark.parametrize(
    ("acks", "start"),
    [
        ([(0, 0.0)], 0 + 2 + 1),
        ([(10, 0.0), (5, 0.0)], 10 + 2 + 1),
        ([(10, 1.0), (10, 0.001)], 10 + 2 + 250),
        ([(10, 5.0)], 10 + 2 + 1),
        ([(10, 0.25), (11, 0.0)], 11 + 2 + 1),
    ],
)
def test_the_start_is_a_quarter_second_of_the_fastest_rank_ahead(
    acks: list[tuple[int, float]], start: int
) -> None:
    assert start_step([ready(*ack) for ack in acks]) == start


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.floats(width=64)), min_size=1, max_size=4))
def test_no_ack_leads_to_a_step_that_cannot_be_sent(acks: list[tuple[int, float]]) -> None:
    messages = [session_pb2.CaptureAck(ready=True, next_step=step, step_seconds=took) for step, took in acks]
    start = start_step([unpack(message, Ack) for message in messages])
    assert session_pb2.CommitCapture(start_step=start).start_step > min(2**62, max(step for step, _ in acks))


async def test_a_rank_that_is_not_ready_is_named_and_the_others_go_on(node: CapturingNode) -> None:
    good, bad = Rank(node, 0), Rank(node, 1)
    bad.on_prepare = lambda capture_id: bad.ack(capture_id, Ack(False, "a profiler runs", 0, 0.0))
    *_, last = await node.capture(good, bad)
    assert last.record.state is CaptureState.PARTIAL
    assert last.record.reason == "rank 1: a profiler runs"
    assert [trace.state for trace in last.record.ranks] == [CaptureState.COMPLETE, CaptureState.FAILED]
    assert (len(good.committed), bad.committed, bad.cancelled) == (1, [], [])
    assert not last.timed_out
    assert node.catalog.get(last.record.capture_id).state is CaptureState.PARTIAL
    assert node.coordinator.counts.requests == {("command", "partial"): 1}
    assert node.coordinator.counts.last_success_unix_seconds == 0
    assert node.idle()


async def test_capture_without_a_ready_rank_fails_unarmed(node: CapturingNode) -> None:
    ranks = [Rank(node, rank) for rank in range(3)]
    for rank in ranks:
        rank.on_prepare = lambda capture_id, rank=rank: rank.ack(capture_id, Ack(False, "no", 0, 0.0))  # type: ignore[misc]
    *_, last = await node.capture(*ranks)
    assert node.states == [CaptureState.PREPARING, CaptureState.FAILED]
    assert last.record.reason == "rank 0: no (and 2 more)"
    assert (last.record.step_range, last.timed_out) == (None, False)


async def test_a_rank_that_never_answers_is_named_and_cancelled(
    node: CapturingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_PREPARE_TIMEOUT_S", 0.05)
    good, silent = Rank(node, 0), Rank(node, 1)
    silent.on_prepare = lambda capture_id: None
    *_, last = await node.capture(good, silent)
    reason = "did not answer; the process may be stopped or overloaded"
    assert (last.record.state, last.record.reason) == (CaptureState.PARTIAL, f"rank 1: {reason}")
    assert (silent.cancelled, silent.committed) == ([reason], [])
    # A late answer belongs to no capture any more.
    node.coordinator.on_ack(last.record.capture_id, 1, ready())
    node.coordinator.on_result(last.record.capture_id, 1, done(1, 0))
    assert last.record.state is CaptureState.PARTIAL
    assert node.idle()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (0, "makes no training steps, so there is nothing to capture"),
        (3, "made only 3 training steps in time"),
    ],
)
async def test_rank_that_never_finishes_is_cancelled_and_timed_out(
    node: CapturingNode, made: int, reason: str
) -> None:
    stuck = Rank(node, 0)
    stuck.steps_seen = 40

    def go_on(_capture_id: str, _start: int) -> None:
        stuck.steps_seen += made

    stuck.on_commit = go_on
    *_, last = await node.capture(stuck, timeout=0.05)
    assert (last.record.state, last.record.reason) == (CaptureState.FAILED, f"rank 0: {reason}")
    assert last.timed_out
    assert stuck.cancelled == [reason]
    assert len(stuck.prepared) == 1, "no time is left for another attempt"
    assert node.catalog.get(last.record.capture_id).state is CaptureState.FAILED
    assert node.idle()


async def test_one_finished_and_one_failed_rank_are_partial(node: CapturingNode) -> None:
    good, stuck = Rank(node, 0), Rank(node, 1)
    stuck.on_commit = lambda capture_id, start: None
    *_, last = await node.capture(good, stuck, timeout=0.05)
    assert (last.record.state, last.timed_out) == (CaptureState.PARTIAL, True)
    assert (good.cancelled, len(stuck.cancelled)) == ([], 1)


@pytest.mark.parametrize("moment", ["preparing", "armed"])
async def test_a_rank_that_leaves_midway_is_named_at_once(node: CapturingNode, moment: str) -> None:
    good, leaver = Rank(node, 0), Rank(node, 1)
    # Another run's rank of the same number is not concerned.
    stranger = Rank(node, 1)

    def leave(*_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(node.coordinator.on_departure, stranger, "wrong one")
        loop.call_soon(node.coordinator.on_departure, leaver, "the process left during the capture")

    if moment == "preparing":
        leaver.on_prepare = leave
    else:
        leaver.on_commit = leave
    *_, last = await node.capture(good, leaver)
    assert last.record.state is CaptureState.PARTIAL
    assert last.record.reason == "rank 1: the process left during the capture"
    assert len(leaver.committed) == (moment == "armed")
    assert not last.timed_out


async def test_a_wrong_moment_is_tried_again_in_the_same_folder(node: CapturingNode) -> None:
    rank = Rank(node, 0)
    again = rank.on_commit

    def miss(capture_id: str, start: int) -> None:
        rank.on_commit = again
        rank.result(capture_id, failed("step 105 was missed", retry=True))

    rank.on_commit = miss
    *_, last = await node.capture(rank)
    assert node.states == [
        *(CaptureState.PREPARING, CaptureState.ARMED),
        *(CaptureState.PREPARING, CaptureState.ARMED, CaptureState.COMPLETE),
    ], "the failure in between is not shown"
    assert node.traces == [[(state, "")] for state in node.states]
    assert last.record.reason == ""
    assert rank.prepared == [last.folder] * 2
    assert node.coordinator.counts.requests == {("command", "complete"): 1}
    assert node.idle()


@pytest.mark.parametrize(("retry", "attempts"), [(True, 3), (False, 1)])
async def test_capture_is_tried_three_times_only_if_it_may_be_retried(
    node: CapturingNode, retry: bool, attempts: int
) -> None:
    rank = Rank(node, 0)
    rank.on_commit = lambda capture_id, start: rank.result(capture_id, failed("missed", retry=retry))
    *_, last = await node.capture(rank)
    assert len(rank.committed) == attempts
    assert (last.record.state, last.record.reason) == (CaptureState.FAILED, "rank 0: missed")
    assert node.states[-1] is CaptureState.FAILED
    assert node.states.count(CaptureState.FAILED) == 1


async def test_a_partial_capture_is_kept_rather_than_tried_again(node: CapturingNode) -> None:
    good, late = Rank(node, 0), Rank(node, 1)
    late.on_commit = lambda capture_id, start: late.result(capture_id, failed("missed", retry=True))
    *_, last = await node.capture(good, late)
    assert (last.record.state, len(good.committed)) == (CaptureState.PARTIAL, 1)


async def test_two_at_once_on_one_run_are_refused_and_two_runs_are_not(node: CapturingNode) -> None:
    waiting = Rank(node, 0)
    waiting.on_prepare = lambda capture_id: None
    first = node.coordinator.capture("bert", [waiting], FIVE, GIVE_UP_S)
    progress = await anext(first)
    with pytest.raises(TorchperfdError, match="a capture of run bert is in progress; wait"):
        await node.capture(Rank(node, 0))
    assert node.coordinator.counts.active == 1
    *_, other = await node.capture(Rank(node, 0), run="gpt")
    assert other.record.state is CaptureState.COMPLETE

    waiting.ack(progress.record.capture_id, ready())
    reported = [progress.record.state async for progress in first]
    assert reported == [CaptureState.ARMED, CaptureState.COMPLETE]
    *_, again = await node.capture(Rank(node, 0))
    assert again.record.state is CaptureState.COMPLETE


@pytest.mark.parametrize("moment", [CaptureState.PREPARING, CaptureState.ARMED])
async def test_when_the_caller_goes_away_everything_is_given_up(
    node: CapturingNode, moment: CaptureState
) -> None:
    ranks = [Rank(node, 0), Rank(node, 1)]
    for rank in ranks:
        rank.on_commit = lambda capture_id, start: None
    capture = node.coordinator.capture("bert", list(ranks), FIVE, GIVE_UP_S)
    async for progress in capture:
        if progress.record.state is moment:
            break
    await capture.aclose()  # type: ignore[attr-defined]
    assert [rank.cancelled for rank in ranks] == [["cancelled"]] * 2
    assert node.idle()
    [record] = [found.record for found in node.catalog.list().captures]
    assert (record.state, record.reason) == (CaptureState.FAILED, "cancelled")
    assert [(trace.state, trace.reason) for trace in record.ranks] == [(CaptureState.FAILED, "cancelled")] * 2
    assert node.coordinator.counts.requests == {("command", "failed"): 1}
    *_, again = await node.capture(Rank(node, 0))
    assert again.record.state is CaptureState.COMPLETE


async def test_a_cancelled_task_gives_everything_up_too(node: CapturingNode) -> None:
    rank = Rank(node, 0)
    armed = asyncio.Event()
    rank.on_commit = lambda capture_id, start: armed.set()
    task = asyncio.create_task(node.capture(rank))
    await armed.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert rank.cancelled == ["cancelled"]
    assert node.idle()


async def test_unwritable_directory_is_reported_and_frees_the_run(tmp_path: Path) -> None:
    node = CapturingNode(tmp_path)
    (tmp_path / "captures").write_text("a file")
    rank = Rank(node, 0)
    with pytest.raises(TorchperfdError, match=r"cannot write to .*captures"):
        await node.capture(rank)
    assert rank.prepared == []
    assert node.idle()
    (tmp_path / "captures").unlink()
    *_, last = await node.capture(rank)
    assert last.record.state is CaptureState.COMPLETE


@pytest.mark.parametrize("leave", [False, True])
async def test_a_manifest_that_cannot_be_written_costs_only_itself(
    node: CapturingNode, leave: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(node, 0)
    capture = node.coordinator.capture("bert", [rank], FIVE, GIVE_UP_S)
    first = await anext(capture)
    (first.folder / "manifest.json").unlink()
    (first.folder / "manifest.json").mkdir()
    if leave:
        await capture.aclose()  # type: ignore[attr-defined]
    else:
        reported = [progress.record.state async for progress in capture]
        assert reported[-1] is CaptureState.COMPLETE
    assert node.idle(), "else the run could never be captured again"


def test_a_scripts_own_capture_is_adopted(node: CapturingNode) -> None:
    node.catalog.create("own-1")
    node.coordinator.adopt("own-1", "bert", FIVE, 3, done(3, 40))
    record = node.catalog.get("own-1")
    assert (record.run, record.trigger, record.step_range) == ("bert", "script", (40, 45))
    assert (record.state, [trace.rank for trace in record.ranks]) == (CaptureState.COMPLETE, [3])
    assert record.requested_at == 1_700_000_000.0
    node.catalog.create("own-2")
    node.coordinator.adopt("own-2", "bert", FIVE, 3, failed("disk full"))
    assert node.catalog.get("own-2").reason == "rank 3: disk full"
    assert node.coordinator.counts.requests == {("script", "complete"): 1, ("script", "failed"): 1}
    assert node.coordinator.counts.bytes == 10


def test_capture_elsewhere_is_counted_without_an_empty_folder(node: CapturingNode) -> None:
    node.coordinator.adopt("own-1", "bert", FIVE, 3, done(3, 40))
    assert not node.catalog.list().captures
    assert not node.catalog.directory.exists()
    assert node.coordinator.counts.requests == {("script", "complete"): 1}


async def test_adopting_does_not_rewrite_anothers_manifest(node: CapturingNode) -> None:
    *_, last = await node.capture(Rank(node, 0))
    node.coordinator.adopt(last.record.capture_id, "evil", FIVE, 9, failed("lies"))
    assert node.catalog.get(last.record.capture_id) == last.record


def test_adopted_capture_cannot_leave_the_captures_dir(
    node: CapturingNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(NoSuchTargetError):
        node.coordinator.adopt("../x", "bert", FIVE, 0, done(0, 0))
    node.catalog.directory.mkdir()
    (node.catalog.directory / "link").symlink_to(tmp_path / "x")
    node.coordinator.adopt("link", "bert", FIVE, 0, done(0, 0))
    assert list((tmp_path / "x").iterdir()) == []


async def test_a_trace_beyond_its_share_fails_its_rank_only(tmp_path: Path) -> None:
    node = CapturingNode(tmp_path)
    node.catalog = Catalog(tmp_path / "captures", Quota(capture_bytes=40))
    node.coordinator = Coordinator(node.catalog)
    small, large = Rank(node, 0), Rank(node, 1)
    large.on_commit = lambda capture_id, start: large.result(capture_id, done(1, start, size=21))
    *_, last = await node.capture(small, large)
    assert last.record.state is CaptureState.PARTIAL
    assert last.record.reason.startswith("rank 1: the trace has 21 bytes, 20 are allowed; ")
    assert node.catalog.get(last.record.capture_id) == last.record


async def test_advice_on_the_loader_is_kept_with_the_trace(node: CapturingNode) -> None:
    settled = SettledAdvice(0, 0, 0.1, 0.05)
    asked: list[str] = []

    def advice_of(run: str) -> SettledAdvice:
        asked.append(run)
        return settled

    node.coordinator.advice_of = advice_of
    *_, last = await node.capture(Rank(node, 0))
    assert last.record.loader_advice == settled
    found = some(node.catalog.found(last.record.capture_id))
    assert some(found.record).loader_advice == settled
    assert asked == ["bert"]
