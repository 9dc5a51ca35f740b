"""The daemon's metrics about itself: its process, the calls on its socket, and its log."""

import asyncio
import logging
import os
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.support.node import eventually
from tests.support.served import GIVE_UP_S, RankStream, Served, control, with_daemon

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.metrics.health import CallCounts, DaemonHealth
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.rpc.interceptors import CallCounter


def shown(health: DaemonHealth) -> dict[str, float]:
    """Return the series without labels, by their names without the prefix."""
    page = MetricsPage([health.families]).render("")[0].decode()
    return {
        sample.name.removeprefix("torchperfd_daemon_"): sample.value
        for family in parse_text(page)
        for sample in family.samples
        if not sample.labels
    }


def test_process_series_are_those_of_this_process() -> None:
    found = shown(DaemonHealth())
    usage = os.times()
    assert 0 < found["process_cpu_seconds_total"] <= usage.user + usage.system + 0.02
    assert 2**20 < found["process_resident_memory_bytes"] < found["process_virtual_memory_bytes"]
    assert found["process_start_time_seconds"] < time.time()
    first = os.open("/dev/null", os.O_RDONLY)
    try:
        assert shown(DaemonHealth())["process_open_fds"] == found["process_open_fds"] + 1
    finally:
        os.close(first)
    assert found["process_open_fds"] < found["process_max_fds"]


async def ended(served: Served, calls: int) -> Counter[tuple[str, str]]:
    """Return the calls by method and code, once the server has seen the end of so many."""
    await asyncio.to_thread(eventually, lambda: sum(served.calls.ended.values()) >= calls, GIVE_UP_S)
    return served.calls.ended


@with_daemon
async def test_call_counts_by_method_and_code(served: Served, channel: grpc.aio.Channel) -> None:
    stub = control(channel)
    await stub.ListRuns(control_pb2.ListRunsRequest())
    await stub.ListRuns(control_pb2.ListRunsRequest())
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await stub.GetRun(control_pb2.GetRunRequest(run="gpt"))
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await stub.Capture(
            control_pb2.CaptureRequest(run="gpt", options=session_pb2.CaptureOptions(steps=1))
        ).read()
    assert [each async for each in stub.ListCaptures(control_pb2.ListCapturesRequest())] == []
    assert await ended(served, 5) == {
        ("Control/ListRuns", "OK"): 2,
        ("Control/GetRun", "NOT_FOUND"): 1,
        ("Control/Capture", "NOT_FOUND"): 1,
        ("Control/ListCaptures", "OK"): 1,
    }
    assert served.calls.seconds.keys() == {method for method, _ in served.calls.ended}


@with_daemon
async def test_session_counts_once_it_has_ended(served: Served, channel: grpc.aio.Channel) -> None:
    began = time.monotonic()
    rank = RankStream(channel)
    await rank.join()
    await asyncio.sleep(0.2)
    assert served.calls.ended == {}
    await rank.leave()
    assert await ended(served, 1) == {("Session/Attach", "OK"): 1}
    assert 0.2 <= served.calls.seconds["Session/Attach"] <= time.monotonic() - began


class Context:
    """A call's context, with the code that its method has set."""

    def __init__(self, code: grpc.StatusCode | int | None) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | int | None:
        return self._code


@pytest.mark.parametrize(
    ("code", "raised", "counted"),
    [
        (None, None, "OK"),
        (5, None, "NOT_FOUND"),
        (77, None, "UNKNOWN"),
        (grpc.StatusCode.INTERNAL, grpc.aio.AbortError(), "INTERNAL"),
        (None, asyncio.CancelledError(), "CANCELLED"),
        (None, ValueError(), "UNKNOWN"),
    ],
)
async def test_call_ends_as_its_method_ended_it(
    code: grpc.StatusCode | int | None, raised: BaseException | None, counted: str
) -> None:
    async def method(_request: object, _context: object) -> str:
        if raised is not None:
            raise raised
        return "answer"

    async def method_of(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(method)

    counts = CallCounts()
    details: Any = type("Details", (), {"method": "/torchperfd.v1.Control/GetRun"})
    handler = await CallCounter(counts).intercept_service(method_of, details)
    if raised is None:
        assert await handler.unary_unary(b"", Context(code)) == "answer"
    else:
        with pytest.raises(type(raised)):
            await handler.unary_unary(b"", Context(code))
    assert counts.ended == {("Control/GetRun", counted): 1}


@with_daemon
async def test_unknown_method_is_not_counted(served: Served, channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await channel.unary_unary("/torchperfd.v1.Control/Invented", bytes, bytes)(b"")
    await control(channel).ListRuns(control_pb2.ListRunsRequest())
    assert await ended(served, 1) == {("Control/ListRuns", "OK"): 1}


def test_errors_of_any_logger_count_within_the_block() -> None:
    health = DaemonHealth()
    log = logging.getLogger("torchperfd.of_this_test")
    log.error("before")
    with health.counting_errors():
        log.error("one")
        logging.getLogger("another").critical("two")
        log.warning("no error")
    log.error("after")
    assert shown(health)["logged_errors_total"] == 2
