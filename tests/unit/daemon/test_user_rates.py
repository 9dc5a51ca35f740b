"""Limits on users and requests."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.clock import Clock
from tests.support.served import RankStream, Served, hello, short_directory, steps_message, with_daemon

from torchperfd.v1 import session_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_daemon.errors import DaemonUnreachableError
from torchperfd_daemon.rpc.callers import (
    BYTES,
    MESSAGES,
    SESSIONS,
    STEPS,
    Caller,
    CallerDirectory,
    IngestRates,
    Rate,
    UserRate,
)
from torchperfd_daemon.rpc.interceptors import (
    CommandRates,
    TooLargeError,
    check_client_message,
    check_request,
)
from torchperfd_daemon.text import LIMIT_PERIOD_S, LogLimiter

ADA, BOB = 1001, 1002
RANKS = 512


def test_rate_lets_the_burst_pass_and_then_counts_debt() -> None:
    clock = Clock()
    rate = UserRate("things", Rate(10, 20), clock)
    assert [rate.take(BOB, 10), rate.take(BOB, 10)] == [0, 0]
    assert [rate.take(BOB, 5), rate.take(BOB, 5)] == pytest.approx([0.5, 1.0])
    assert rate.take(ADA, 20) == 0
    clock.now += 2
    assert rate.take(BOB, 10) == pytest.approx(0)


def test_rate_refills_to_the_burst_and_no_further() -> None:
    clock = Clock()
    rate = UserRate("things", Rate(10, 20), clock)
    clock.now += 3600
    assert rate.take(BOB, 21) == pytest.approx(0.1)


def test_rate_forgets_users_whose_buckets_are_full() -> None:
    clock = Clock()
    rate = UserRate("things", Rate(10, 20), clock)
    for uid in range(5000):
        clock.now += 1
        rate.take(uid, 1)
    assert len(rate) < 2000


def test_a_slowed_user_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rate = UserRate("steps", Rate(10, 20), Clock())
    with caplog.at_level(logging.WARNING, "torchperfd.access"):
        for _ in range(100):
            rate.take(BOB, 10)
    assert caplog.messages == ["user 1002 is slowed: more than 10 steps per second"]


@pytest.mark.parametrize(
    ("rate", "per_second"),
    [
        # 512 ranks of 10 steps a second, and a page is open: two flushes a second of three messages.
        (MESSAGES, RANKS * 2 * 3),
        (STEPS, RANKS * 10),
        (BYTES, RANKS * 10_000),
        # Eight ranks of a step a millisecond.
        (STEPS, 8 * 1000),
    ],
)
def test_ranks_of_a_whole_node_are_never_slowed(rate: Rate, per_second: float) -> None:
    clock = Clock()
    of_user = UserRate("things", rate, clock)
    for _ in range(600):
        assert of_user.take(ADA, per_second) == 0
        clock.now += 1


def test_ranks_of_a_whole_node_reconnect_in_seconds() -> None:
    """After a restart of the daemon each brings the steps of a minute."""
    sessions = UserRate("new sessions", SESSIONS, Clock())
    steps = UserRate("steps", STEPS, Clock())
    assert max(sessions.take(ADA, 1) for _ in range(RANKS)) <= 5
    assert max(steps.take(ADA, 10 * 60) for _ in range(RANKS)) <= 10


def test_a_message_beyond_the_rate_is_taken_in_later() -> None:
    rates = IngestRates(Clock())
    debts = [rates.take(BOB, 1, 50_000) for _ in range(4)]
    assert debts == pytest.approx([0, 0, 50_000 / 40_000, 100_000 / 40_000])
    assert rates.take(ADA, 1, 50_000) == 0


class Call:
    """A call of a user's process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def peer(self) -> str:
        return self._name

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise RefusedError(f"{code.name}: {details}")


class RefusedError(Exception):
    pass


async def test_commands_in_progress_are_limited_per_user() -> None:
    callers = CallerDirectory(100, 100)
    callers.admit("ada", Caller(ADA, 1))
    callers.admit("bob", Caller(BOB, 2))
    answered = asyncio.Event()

    async def method(request: str, _: Any) -> str:
        if request == "slow":
            await answered.wait()
        return request

    async def method_of(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(method)

    details: Any = type("Details", (), {"method": "/torchperfd.v1.Control/ListRuns"})
    handler = await CommandRates(callers).intercept_service(method_of, details)
    limited = handler.unary_unary
    slow = [asyncio.create_task(limited("slow", Call("bob"))) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(RefusedError, match="RESOURCE_EXHAUSTED: this user has 64 requests in progress"):
        await limited("more", Call("bob"))
    assert await limited("another user's", Call("ada")) == "another user's"
    answered.set()
    await asyncio.gather(*slow)
    assert await limited("again", Call("bob")) == "again"


async def test_commands_beyond_the_rate_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    callers = CallerDirectory(100, 100)
    callers.admit("bob", Caller(BOB, 2))

    async def method(request: str, _: Any) -> str:
        return request

    async def method_of(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(method)

    details: Any = type("Details", (), {"method": "/torchperfd.v1.Control/ListRuns"})
    handler = await CommandRates(callers, Clock()).intercept_service(method_of, details)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(320):
        await handler.unary_unary("list", Call("bob"))
    assert slept[:256] == [0] * 256
    assert slept[-1] == pytest.approx(1.0)


def test_busy_daemon_is_told_from_an_absent_one() -> None:
    with short_directory() as directory:
        path = str(Path(directory, "d.sock"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            with pytest.raises(DaemonUnreachableError) as busy, connect(path, answer_seconds=0.2):
                pass
        Path(path).unlink()
        with pytest.raises(DaemonUnreachableError) as absent, connect(path):
            pass
    assert busy.value.problem == f"the daemon at {path} is busy: no answer within 0.2 s"
    assert absent.value.problem == f"no daemon answers at {path}"


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


@with_daemon
async def test_unreadable_messages_are_refused_in_one_log_line(
    served: Served, connected: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
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
    lines = [record for record in caplog.records if "is refused" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].getMessage() == f"{ATTACH}: a request of 3 bytes is refused: the message cannot be read"
    assert not any(record.exc_info for record in caplog.records)


@with_daemon
async def test_a_bundle_of_too_many_messages_is_refused(served: Served, channel: grpc.aio.Channel) -> None:
    rank = RankStream(channel)
    await rank.join()
    many = session_pb2.Bundle(messages=[session_pb2.ClientMessage()] * 65)
    await rank.say(session_pb2.ClientMessage(bundle=many))
    assert await rank.refused() == (grpc.StatusCode.INVALID_ARGUMENT, "a bundle holds more than 64 messages")


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


@with_daemon
async def test_a_session_without_hello_is_ended(
    served: Served, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchperfd_daemon.service.session._HELLO_S", 0.05)
    silent = RankStream(channel)
    assert await silent.refused() == (grpc.StatusCode.DEADLINE_EXCEEDED, "no hello has come")
    await asyncio.sleep(0)
