"""The control service over a real socket: the answers that commands show."""

import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.served import RankStream, Served, control, steps_message, with_daemon

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import control_pb2, session_pb2

TRAIN = session_pb2.STEP_KIND_TRAIN


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def capture_refusal(channel: grpc.aio.Channel, **request: Any) -> tuple[grpc.StatusCode, str]:
    options = session_pb2.CaptureOptions(steps=5)
    call = control(channel).Capture(control_pb2.CaptureRequest(**{"options": options, **request}))
    return await refusal(call.read())


def account(steps: int, ns: int, **phases: int) -> session_pb2.ClientMessage:
    kind = session_pb2.KindAccount(
        kind=TRAIN,
        steps=steps,
        step_ns=ns,
        phases=[
            session_pb2.PhaseAccount(phase=name, calls=steps, ns=spent) for name, spent in phases.items()
        ],
    )
    return session_pb2.ClientMessage(account=session_pb2.Account(kinds=[kind], dropped_steps={"ring": 2}))


@with_daemon
async def test_info_has_version_node_and_addresses(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    info = await control(channel).GetInfo(control_pb2.GetInfoRequest())
    assert info == control_pb2.GetInfoResponse(
        api=session_pb2.ApiRange(min=1, max=1),
        version=__version__,
        revision=__revision__,
        pid=os.getpid(),
        node="node-a",
        metrics_url="http://127.0.0.1:9407/metrics",
        captures_dir=str(served.catalog.directory),
        clients=1,
    )
    await rank.leave()


@with_daemon
async def test_runs_are_listed_with_their_ranks(served: Served, channel: grpc.aio.Channel) -> None:
    stub = control(channel)
    assert not (await stub.ListRuns(control_pb2.ListRunsRequest())).runs
    ranks = [RankStream(channel), RankStream(channel)]
    for number, rank in enumerate(ranks):
        await rank.join("bert-17", number, world_size=4, job_name="bert", pid=70 + number)
    await ranks[1].say(steps_message([2 * 10**9] * 3, data=[10**9] * 3), account(3, 6 * 10**9))
    await ranks[1].leave()
    [run] = (await stub.ListRuns(control_pb2.ListRunsRequest())).runs
    assert (run.run, run.job_name, run.world_size) == ("bert-17", "bert", 4)
    first, second = run.ranks
    assert (first.identity.rank, first.identity.pid, first.connected, first.steps) == (0, 70, True, 0)
    assert (first.step_seconds, first.last_step_unix_seconds) == (0, 0)
    assert (second.identity.rank, second.connected, second.steps, second.step_seconds) == (1, False, 3, 2.0)
    assert dict(second.phase_seconds) == {"data": 1.0}
    assert (second.last_step_unix_seconds, second.dropped_steps) == (1006.0, 2)
    await ranks[0].leave()


@with_daemon
async def test_run_is_answered_in_full_with_its_verdict(served: Served, channel: grpc.aio.Channel) -> None:
    good, starving = RankStream(channel), RankStream(channel)
    await good.join(rank=0)
    await starving.join(rank=1, node="node-b")
    await good.say(account(10, 10**9, data=10**7, forward=9 * 10**8))
    await starving.say(account(10, 10**9, data=6 * 10**8))
    await good.leave()
    await starving.leave()
    answer = await control(channel).GetRun(control_pb2.GetRunRequest(run="bert-17"))
    assert answer.run == "bert-17"
    assert [rank.identity.rank for rank in answer.ranks] == [0, 1]
    assert answer.ranks[0].account.kinds[0].steps == 10
    assert {phase.phase: phase.ns for phase in answer.ranks[0].account.kinds[0].phases} == {
        "data": 10**7,
        "forward": 9 * 10**8,
    }
    verdict = answer.verdict
    assert (verdict.cause, verdict.rank, verdict.node) == ("input-bound", 1, "node-b")
    assert verdict.cost_seconds_per_step == pytest.approx(0.059), "what its peer waits is usual"
    assert verdict.summary.startswith("input-bound · rank 1 on node-b · 59 ms of each 100 ms step")


@with_daemon
async def test_a_run_that_is_not_there_is_named(served: Served, channel: grpc.aio.Channel) -> None:
    call = control(channel).GetRun(control_pb2.GetRunRequest(run="gpt"))
    assert await refusal(call) == (grpc.StatusCode.NOT_FOUND, "no run gpt on this node")


@with_daemon
async def test_a_run_without_steps_is_unknown(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    answer = await control(channel).GetRun(control_pb2.GetRunRequest(run="bert-17"))
    assert (answer.verdict.cause, answer.verdict.rank) == ("unknown", -1)
    await rank.leave()


@with_daemon
async def test_a_capture_of_nothing_says_what_there_is(served: Served, channel: grpc.aio.Channel) -> None:
    missing = grpc.StatusCode.NOT_FOUND
    assert await capture_refusal(channel) == (
        missing,
        "this node has no run; start one with `torchperfd run`",
    )
    ranks = [RankStream(channel), RankStream(channel), RankStream(channel)]
    for number, (run, rank) in enumerate((("a", 0), ("a", 8), ("b", 0))):
        await ranks[number].join(run, rank)
    assert await capture_refusal(channel) == (missing, "this node has 2 runs: a, b; choose one with --run")
    assert await capture_refusal(channel, run="c") == (
        missing,
        "no run c on this node; `torchperfd ps` lists those there are",
    )
    assert await capture_refusal(channel, run="a", ranks=[8, 9, 3]) == (
        missing,
        "run a has no rank 3, 9 on this node; it has 0, 8",
    )
    await ranks[2].leave()
    assert (await capture_refusal(channel, run="b"))[0] is missing, "it is listed, but gone"
    for steps in (0, 1001):
        options = session_pb2.CaptureOptions(steps=steps)
        assert await capture_refusal(channel, run="a", options=options) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "steps must be 1 to 1000",
        )
    assert served.coordinator.counts.requests == {}
    await ranks[0].leave()
    await ranks[1].leave()


@with_daemon
async def test_a_capture_goes_from_request_to_manifest(served: Served, channel: grpc.aio.Channel) -> None:
    chosen, other = RankStream(channel), RankStream(channel)
    await chosen.join(rank=3)
    await other.join(rank=4)
    options = session_pb2.CaptureOptions(steps=5, with_stack=True, kind=session_pb2.CAPTURE_KIND_TRACE)
    call = control(channel).Capture(control_pb2.CaptureRequest(ranks=[3], options=options))

    preparing = await call.read()
    assert preparing.state == control_pb2.CAPTURE_STATE_PREPARING
    prepare = (await chosen.receive()).prepare_capture
    assert prepare.capture_id == preparing.capture_id
    assert prepare.options == options
    assert Path(prepare.directory) == served.catalog.folder(prepare.capture_id)
    assert Path(prepare.directory).is_dir()
    ack = session_pb2.CaptureAck(capture_id=prepare.capture_id, ready=True, next_step=100, step_seconds=0.125)
    await chosen.say(session_pb2.ClientMessage(capture_ack=ack))

    armed = await call.read()
    assert (armed.state, armed.start_step) == (control_pb2.CAPTURE_STATE_ARMED, 104)
    assert (await chosen.receive()).commit_capture.start_step == 104
    result = session_pb2.CaptureResult(
        capture_id=prepare.capture_id, ok=True, start_step=104, steps=5, file="rank3.json", bytes=9
    )
    await chosen.say(session_pb2.ClientMessage(capture_result=result))

    complete = await call.read()
    assert complete.state == control_pb2.CAPTURE_STATE_COMPLETE
    assert [(rank.rank, rank.file) for rank in complete.ranks] == [(3, "rank3.json")]
    assert await call.code() is grpc.StatusCode.OK
    assert served.catalog.get(prepare.capture_id).step_range == (104, 109)
    [session] = [found for found in served.sessions.of_run("bert-17") if found.rank == 4]
    assert session.outgoing.empty(), "the other rank was not bothered"
    await chosen.leave()
    await other.leave()


@with_daemon
async def test_second_capture_is_refused_until_the_caller_hangs_up(
    served: Served, channel: grpc.aio.Channel
) -> None:
    """A caller that hangs up frees the run for the next capture."""
    rank = RankStream(channel)
    await rank.join(world_size=1)
    options = session_pb2.CaptureOptions(steps=5)
    first = control(channel).Capture(control_pb2.CaptureRequest(options=options))
    await first.read()
    prepare = (await rank.receive()).prepare_capture
    assert await capture_refusal(channel) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "a capture of run bert-17 is in progress; wait until it has ended, or ask with --queue",
    )
    first.cancel()
    cancelled = (await rank.receive()).cancel_capture
    assert (cancelled.capture_id, cancelled.reason) == (prepare.capture_id, "cancelled")
    assert served.coordinator.counts.active == 0
    assert served.catalog.get(prepare.capture_id).reason == "cancelled"
    second = control(channel).Capture(control_pb2.CaptureRequest(options=options))
    assert (await second.read()).state == control_pb2.CAPTURE_STATE_PREPARING
    await rank.receive()
    await rank.leave()
    failed = await second.read()
    assert failed.state == control_pb2.CAPTURE_STATE_FAILED
    assert failed.reason == "rank 0: the process left during the capture"


@with_daemon
async def test_a_directory_that_cannot_be_written_is_said(served: Served, channel: grpc.aio.Channel) -> None:
    served.catalog.directory.write_text("a file")
    rank = RankStream(channel)
    await rank.join()
    code, details = await capture_refusal(channel)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith(f"cannot write to {served.catalog.directory}: ")
    await rank.leave()
