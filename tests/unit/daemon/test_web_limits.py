"""What strangers may not do over HTTP: take the owner's places, fill the log, or read by another name."""

import asyncio
import logging
from typing import Any

import pytest
from tests.unit.daemon.http_api import OWNER, Page, with_page
from tests.unit.daemon.live_runs import train

from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.text import LogLimiter
from torchperfd_daemon.views.model import parse_ranks
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.endpoint import MAX_RANK, EventStream, rank_number
from torchperfd_daemon.web.event_hub import MAX_OF_STRANGERS, MAX_STREAMS
from torchperfd_daemon.web.guard import Guard, Sites

HUGE = "9" * 5000


@pytest.mark.parametrize(
    "text", ["0-99999999999999999999", "0-00000000099999999999999999", HUGE, f"0-{HUGE}"]
)
def test_rank_beyond_all_jobs_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no rank"):
        parse_ranks(text)


@pytest.mark.parametrize(
    "text", ["", "-1", "1e3", "0x1", "1_0", " 1", "٣", "²", "-", str(MAX_RANK + 1), HUGE]
)
def test_text_that_names_no_rank_is_none(text: str) -> None:
    assert rank_number(text) is None


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", [0]), ("007", [7]), ("0" * 6000 + "5", [5]), ("2-3,2", [2, 3])]
)
def test_ranks_are_read_with_leading_zeros(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("value", [HUGE, "1e999", "-1", "nan", "inf", "9" * 30, "0x10", "٣" * 400])
@pytest.mark.parametrize(
    "path",
    [
        "events?ranks=0-{}",
        "runs/bert-17/history?ranks={}",
        "runs/bert-17/history?seconds={}",
        "runs/bert-17/history?since={}",
        "runs/bert-17/history?steps={}",
        "runs/bert-17/ranks/{}/steps",
        "runs/bert-17/ranks/0/steps?last={}",
        "runs/bert-17/ranks?last={}",
        "captures?limit={}",
        "runs?fleet={}",
        "runs/bert-17/history?phases={}",
    ],
)
@with_page
async def test_no_number_fails_the_daemon(
    page: Page, path: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(page.served.store, "healthy")
    answer = await page.ask(f"/api/v1/{path.format(value)}")
    # A stream that begins would not end.
    assert 400 <= answer.status_code < 500, answer.text
    assert "Traceback" not in caplog.text


def test_failures_of_requests_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    limiter = LogLimiter(logging.getLogger("test"), lambda: 0.0)
    for _ in range(100):
        try:
            raise ValueError("wrong")
        except ValueError:
            limiter.exception("%s failed", "GET")
    assert [record.getMessage() for record in caplog.records] == ["GET failed"]
    assert caplog.records[0].exc_info is not None


def opened(page: Page, access: Access) -> EventStream | None:
    return page.api.hub.open("", None, access)


@with_page
async def test_streams_of_strangers_leave_half_to_the_owner(page: Page) -> None:
    strangers = [opened(page, Access.STRANGER) for _ in range(3 * MAX_STREAMS)]
    assert None not in strangers
    assert len(page.api.hub) == MAX_OF_STRANGERS
    owners = [opened(page, Access.OWNER) for _ in range(MAX_STREAMS - MAX_OF_STRANGERS)]
    assert None not in owners
    assert len(page.api.hub) == MAX_STREAMS


@with_page
async def test_the_oldest_stream_of_a_stranger_gives_way(page: Page) -> None:
    oldest, second = opened(page, Access.STRANGER), opened(page, Access.STRANGER)
    owners = [opened(page, Access.OWNER) for _ in range(MAX_STREAMS - 1)]
    assert None not in owners
    assert oldest is not None
    assert second is not None
    chunks = [chunk async for chunk in oldest.chunks()]
    assert b"event: bye" in chunks[-1]
    assert len(page.api.hub) == MAX_STREAMS
    assert opened(page, Access.OWNER) is not None
    assert opened(page, Access.OWNER) is None
    assert (await page.ask("/api/v1/events", headers=OWNER)).status_code == 503


@with_page
async def test_a_stranger_never_takes_the_place_of_an_owner(page: Page) -> None:
    assert None not in [opened(page, Access.OWNER) for _ in range(MAX_STREAMS)]
    assert opened(page, Access.STRANGER) is None
    assert (await page.ask("/api/v1/events")).status_code == 503


@pytest.mark.parametrize(
    ("path", "server", "host", "status"),
    [
        ("/metrics", "127.0.0.1", "evil.example", 421),
        ("/metrics", "::1", "evil.example", 421),
        ("/metrics", "127.0.0.1", "127.0.0.1.nip.io", 421),
        ("/metrics", "127.0.0.1", "localhost:9407", 200),
        ("/metrics", "127.0.0.1", "127.0.0.1:9407", 200),
        ("/metrics", "::1", "[::1]:9407", 200),
        ("/metrics", "127.0.0.1", "metrics.example", 200),
        ("/metrics", "127.0.0.1", None, 200),
        ("/metrics", "10.0.0.7", "node7.cluster.example", 200),
        ("/-/ready", "127.0.0.1", "evil.example", 200),
        ("/", "10.0.0.7", "evil.example", 421),
    ],
)
def test_host_is_checked_where_another_site_could_lead_here(
    path: str, server: str, host: str | None, status: int
) -> None:
    answers: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "server": (server, 9407)}
    guard = Guard(app, None, Sites(["metrics.example"]))
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]  # nothing is received
    assert answers == [status]
