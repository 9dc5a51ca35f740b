"""Orders of rank 0's script: the whole job, by name also of those who are not here."""

from typing import Any

import grpc
import pytest
from tests.support.served import RankStream, Served, with_daemon

from torchperfd.v1 import session_pb2


def order(steps: int = 3, timeout: float = 30.0, **more: Any) -> session_pb2.ClientMessage:
    options = session_pb2.CaptureOptions(steps=steps)
    reported = session_pb2.CaptureOrder(order_id=7, options=options, timeout_seconds=timeout, **more)
    return session_pb2.ClientMessage(capture_order=reported)


async def take_part(rank: RankStream, number: int) -> session_pb2.PrepareCapture:
    """Answer prepare and commit as a rank does."""
    prepare = (await rank.receive()).prepare_capture
    ack = session_pb2.CaptureAck(capture_id=prepare.capture_id, ready=True, next_step=9, step_seconds=1)
    await rank.say(session_pb2.ClientMessage(capture_ack=ack))
    return prepare


async def finish(rank: RankStream, number: int, commit: session_pb2.CommitCapture) -> None:
    result = session_pb2.CaptureResult(
        capture_id=commit.capture_id,
        ok=True,
        start_step=commit.start_step,
        steps=commit.steps,
        steps_made=commit.steps,
        file=f"rank{number}.json",
        bytes=9,
    )
    await rank.say(session_pb2.ClientMessage(capture_result=result))


async def next_message(rank: RankStream, body: str) -> Any:
    """Return the next message of a kind."""
    while (message := await rank.receive()).WhichOneof("body") != body:
        pass
    return getattr(message, body)


@with_daemon
async def test_whole_job_is_captured_and_missing_ranks_are_named(
    served: Served, channel: grpc.aio.Channel
) -> None:
    zero, one = RankStream(channel), RankStream(channel)
    await zero.join(rank=0, world_size=3)
    await one.join(rank=1, world_size=3)
    await zero.say(order())
    prepare = await take_part(one, 1)
    await take_part(zero, 0)
    commit = await next_message(one, "commit_capture")
    await finish(one, 1, commit)
    await finish(zero, 0, commit)
    while not (reported := await next_message(zero, "capture_order_result")).ended:
        assert (reported.order_id, reported.capture_id) == (7, prepare.capture_id)
    assert (reported.state, reported.reason) == ("partial", "rank 2: is not connected to this daemon")
    assert [(rank.rank, rank.file) for rank in reported.ranks] == [
        (0, "rank0.json"),
        (1, "rank1.json"),
        (2, ""),
    ]
    assert (reported.start_step, reported.steps) == (commit.start_step, 3)
    record = served.catalog.get(reported.capture_id)
    assert (record.trigger, record.world_size, reported.directory) == (
        "script",
        3,
        str(served.catalog.folder(reported.capture_id)),
    )
    assert record.ranks[1].steps_made == 3
    await one.leave()
    await zero.leave()


@pytest.mark.parametrize(
    ("rank", "asked", "reason"),
    [
        (1, order(), "only rank 0 may order a capture of other ranks; do it there"),
        (0, order(steps=0), "steps must be 1 to 1000"),
        (0, order(timeout=float("nan")), "the timeout must be up to a day"),
        (0, order(ranks=[0, 9]), "run bert-17 has no rank 9; it has 2 ranks"),
    ],
)
@with_daemon
async def test_an_order_that_cannot_be_served_is_answered(
    served: Served, channel: grpc.aio.Channel, rank: int, asked: session_pb2.ClientMessage, reason: str
) -> None:
    stream = RankStream(channel)
    await stream.join(rank=rank)
    await stream.say(asked)
    reported = await next_message(stream, "capture_order_result")
    assert (reported.order_id, reported.ended, reported.state, reported.reason) == (7, True, "failed", reason)
    assert not served.catalog.directory.exists()
    await stream.leave()


@pytest.mark.parametrize("at_once", [True, False])
@with_daemon
async def test_an_order_is_given_up_also_before_it_has_a_name(
    served: Served, channel: grpc.aio.Channel, *, at_once: bool
) -> None:
    zero = RankStream(channel)
    await zero.join(rank=0, world_size=1)
    unwanted = session_pb2.ClientMessage(capture_order=session_pb2.CaptureOrder(order_id=7, cancel=True))
    if at_once:
        both = session_pb2.Bundle(messages=[order(), unwanted])
        await zero.say(session_pb2.ClientMessage(bundle=both))
    else:
        await zero.say(order())
        await take_part(zero, 0)
        await next_message(zero, "commit_capture")
        await zero.say(unwanted)
        cancel = await next_message(zero, "cancel_capture")
        failed = session_pb2.CaptureResult(capture_id=cancel.capture_id, reason=cancel.reason)
        await zero.say(session_pb2.ClientMessage(capture_result=failed))
    while not (reported := await next_message(zero, "capture_order_result")).ended:
        pass
    assert (reported.state, reported.reason) == ("failed", "cancelled by script")
    assert served.catalog.get(reported.capture_id).cancelled_by == "script"
    await zero.leave()


@with_daemon
async def test_caller_that_disconnects_ends_the_capture(served: Served, channel: grpc.aio.Channel) -> None:
    zero, one = RankStream(channel), RankStream(channel)
    await one.join(rank=1)
    await zero.join(rank=0)
    await zero.say(order(ranks=[1]))
    prepare = await take_part(one, 1)
    await zero.leave()
    assert (await next_message(one, "cancel_capture")).reason == "cancelled"
    assert served.catalog.get(prepare.capture_id).cancelled_by == "caller"
    await one.leave()
