"""What is refused before it is read, and what is not."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from tests.support.served import RankStream, Served, hello, play, steps_message

from torchperfd.v1 import session_pb2
from torchperfd_daemon.logs import LIMIT_PERIOD_S, LogLimiter
from torchperfd_daemon.rpc.interceptors import TooLargeError, check_client_message, check_request

ATTACH = "/torchperfd.v1.Session/Attach"


def bundle(*messages: session_pb2.ClientMessage) -> bytes:
    return session_pb2.ClientMessage(bundle=session_pb2.Bundle(messages=messages)).SerializeToString()


def test_check_of_many_empty_messages_refuses_them_at_once() -> None:
    # Field 8 of 4,000,000 bytes, which are 2,000,000 empty messages.
    data = b"\x42\x80\x92\xf4\x01" + b"\x0a\x00" * 2_000_000
    with pytest.raises(TooLargeError, match="has more than 128 fields"):
        check_client_message(data)


def test_check_of_many_empty_fields_in_a_part_refuses_it() -> None:
    threads = session_pb2.StackReport.FromString(b"\x12\x00" * 1_000_000)
    data = bundle(session_pb2.ClientMessage(stack_report=threads))
    with pytest.raises(TooLargeError, match="is larger than any of ours"):
        check_client_message(data)


def test_check_of_steps_that_waited_lets_them_pass() -> None:
    waited = steps_message([10**6] * 40_000, **{f"phase{number}": [1] * 40_000 for number in range(12)})
    assert len(waited.SerializeToString()) > 4 * 2**20
    check_client_message(waited.SerializeToString())
    check_client_message(bundle(waited, hello()))


@pytest.mark.parametrize("data", [b"\xff" * 2**21, b"\x42" + b"\xff" * 2**21, b"\x0b" * 2**21])
def test_check_of_what_is_no_message_refuses_it(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"does not end|no fields of kind|longer than its message"):
        check_client_message(data)


def test_check_of_a_large_request_refuses_it() -> None:
    check_request(b"x" * 2**20)
    with pytest.raises(TooLargeError):
        check_request(b"x" * (2**20 + 1))


def test_unreadable_messages_are_refused_in_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(served: Served, connected: grpc.aio.Channel) -> None:
        channel: Any = connected  # its types know no raw bytes
        for _ in range(5):
            raw = channel.stream_stream(ATTACH)()
            await raw.write(hello().SerializeToString())
            assert await raw.read()
            await raw.write(b"\xff\xff\xff")
            assert (await raw.code(), await raw.details()) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "the message cannot be read",
            )
        for method in ("/torchperfd.v1.Control/ListRuns", "/torchperfd.v1.Control/Stacks"):
            kind = channel.unary_unary if method.endswith("Runs") else channel.unary_stream
            call = kind(method)(b"\xff\xff\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    with caplog.at_level(logging.WARNING):
        play(scenario)
    lines = [record for record in caplog.records if "is refused" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].getMessage() == f"{ATTACH}: a request of 3 bytes is refused: the message cannot be read"
    assert not any(record.exc_info for record in caplog.records)


def test_a_bundle_of_too_many_messages_is_refused() -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        rank = RankStream(channel)
        await rank.join()
        many = session_pb2.Bundle(messages=[session_pb2.ClientMessage()] * 65)
        await rank.say(session_pb2.ClientMessage(bundle=many))
        assert await rank.refused() == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "a bundle holds more than 64 messages",
        )

    play(scenario)


def test_log_limiter_within_its_period_counts_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limiter = LogLimiter(logging.getLogger("test"), lambda: now[0])
    for _ in range(3):
        limiter.warning("no %s", "luck")
    now[0] = LIMIT_PERIOD_S
    limiter.warning("no %s", "luck")
    assert [record.getMessage() for record in caplog.records] == [
        "no luck",
        "no luck (2 more like this since)",
    ]


def test_a_session_without_hello_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchperfd_daemon.service.session._HELLO_S", 0.05)

    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        silent = RankStream(channel)
        assert await silent.refused() == (grpc.StatusCode.DEADLINE_EXCEEDED, "no hello has come")
        await asyncio.sleep(0)

    play(scenario)
