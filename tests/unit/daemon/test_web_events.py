"""Streams of events: what changes is sent, queues are bounded, and streams end."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.support.values import some
from tests.unit.daemon.http_api import Page, with_page
from tests.unit.daemon.live_runs import NOW, STEPS, train

from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.store.model import State, StepColumns
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.web import endpoint, event_hub
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.endpoint import MAX_WAITING, EventStream, event
from torchperfd_daemon.web.event_hub import MAX_STREAMS, EventHub

NS = 1_000_000_000


async def taken(stream: EventStream) -> list[tuple[str, Any]]:
    """Return the events that wait, by name."""
    assert len(stream)
    chunks = stream.chunks()
    assert await anext(chunks) == b"retry: 2000\n\n"
    return parsed(await anext(chunks))


def parsed(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in data.decode().strip().split("\n\n"):
        name, body = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(body.removeprefix("data: "))))
    return found


def opened(page: Page, run: str = "bert-17", access: Access = Access.STRANGER, **more: Any) -> EventStream:
    return some(page.api.hub.open(run, more.get("ranks"), access))


def add_step(page: Page, rank: Rank, seconds: float = 0.5) -> None:
    end = rank.history.newest(1).end_unix_ns[-1] + int(seconds * NS)
    column = array("q", [int(seconds * NS)])
    waits = array("q", [int(seconds * NS) // 5])
    page.served.store.add_steps(rank, StepColumns(array("q", [end]), column, {"collective_wait": waits}))


@with_page
async def test_new_steps_and_seconds_are_sent_once(page: Page) -> None:
    train(page.served.store, "healthy")
    stream = opened(page)
    first = await taken(stream)
    assert [name for name, _ in first[:3]] == ["hello", "run", "verdict"]
    assert first[0][1]["access"] == "stranger"
    ranks = page.served.store.runs()["bert-17"]
    for _ in range(4):
        add_step(page, ranks[1])
    page.api.hub.send_changes()
    events = dict(await taken(stream))
    [row] = events["steps"]["ranks"]
    assert (row["rank"], row["step_seconds"]) == (1, [0.5] * 4)
    assert row["own_seconds"] == [0.4] * 4
    assert row["wait_seconds"] == [0.1] * 4
    page.api.hub.send_changes()
    assert not len(stream)


@with_page
async def test_stream_steps_ahead_of_totals_are_numbered_on(page: Page) -> None:
    """With an open page steps come at half seconds, and totals at whole ones."""
    train(page.served.store, "healthy")
    rank = page.served.store.runs()["bert-17"][1]
    stream = opened(page)
    await taken(stream)
    rows = []
    for reported in range(1001, 1021, 5):
        for step in range(reported, reported + 5):
            end = rank.history.newest(1).end_unix_ns[-1] + NS
            columns = StepColumns(array("q", [end]), array("q", [NS]), {}, next_step=step)
            page.served.store.add_steps(rank, columns)
        page.api.hub.send_changes()
        rows.append(dict(await taken(stream))["steps"]["ranks"][0])
    assert [row["first_step"] for row in rows] == [1000, 1005, 1010, 1015]
    assert [len(row["step_seconds"]) for row in rows] == [5, 5, 5, 5]


@with_page
async def test_a_new_stream_repeats_what_the_history_may_lack(page: Page) -> None:
    train(page.served.store, "healthy")
    whole = (await page.get("runs/bert-17/history"))["ranks"]
    hub = EventHub(page.parts, wall=lambda: NOW + 1)
    for _ in range(2):
        stream = some(hub.open("bert-17", frozenset([0, 2]), Access.STRANGER))
        events = dict(await taken(stream))
        assert [row["rank"] for row in events["steps"]["ranks"]] == [0, 2]
        for row in events["steps"]["ranks"]:
            known = whole[row["rank"]]["steps"]
            assert row["first_step"] + len(row["step_seconds"]) == known["first_step"] + STEPS
            assert row["step_seconds"] == known["step_seconds"][-len(row["step_seconds"]) :]
    late = some(EventHub(page.parts, wall=lambda: NOW + 60).open("bert-17", None, Access.STRANGER))
    assert "steps" not in dict(await taken(late))


@with_page
async def test_a_stream_has_the_ranks_that_it_asked_for(page: Page) -> None:
    train(page.served.store, "healthy")
    one, all_ranks, other = (opened(page, ranks=frozenset([2])), opened(page), opened(page, run="another"))
    ranks = page.served.store.runs()["bert-17"]
    for stream in (one, all_ranks, other):
        await taken(stream)
    for rank in ranks:
        add_step(page, rank)
    page.api.hub.send_changes()
    assert [row["rank"] for row in dict(await taken(one))["steps"]["ranks"]] == [2]
    assert len(dict(await taken(all_ranks))["steps"]["ranks"]) == len(ranks)
    assert not len(other)


@with_page
async def test_states_and_verdicts_are_sent_when_they_change(page: Page) -> None:
    train(page.served.store, "healthy")
    stream = opened(page)
    await taken(stream)
    page.served.store.runs()["bert-17"][3].state = State.CHECKPOINTING
    page.served.verdicts["bert-17"] = Verdict(Cause.HANG, "bert-17", "", 3, "", "in x.py:3", 0.0, "")
    page.api.hub.send_changes()
    events = dict(await taken(stream))
    assert events["run"]["ranks"][3]["state"] == "checkpointing"
    assert events["verdict"]["verdict"]["rank"] == 3
    # Only the owner sees lines of the script.
    assert "x.py" not in str(events)
    owner = opened(page, access=Access.OWNER)
    assert "x.py" in str(await taken(owner))
    del page.served.verdicts["bert-17"]
    page.api.hub.send_changes()
    assert dict(await taken(stream))["verdict"]["verdict"] is None
    for rank in page.served.store.runs()["bert-17"]:
        rank.state = State.FINISHED
        page.served.store.leave(rank)
    page.api.hub.send_changes()
    assert dict(await taken(stream))["run"]["state"] == "finished"


class Conducted:
    """A coordinator with the captures that a test says."""

    def __init__(self, *records: CaptureRecord) -> None:
        self.live_records = [*records]

    def live_record(self, capture_id: str) -> CaptureRecord | None:
        return next((each for each in self.live_records if each.capture_id == capture_id), None)


@with_page
async def test_captures_are_sent_with_each_change_and_their_end(page: Page) -> None:
    train(page.served.store, "healthy")
    record = CaptureRecord("20260101-000000-abcdef", "bert-17", "command", 1.0, ranks=[RankTrace(0)])
    conducted = Conducted()
    hub = EventHub(replace(page.parts, coordinator=cast(Any, conducted)))
    stream = some(hub.open("bert-17", None, Access.STRANGER))
    await taken(stream)
    conducted.live_records.append(record)
    hub.send_changes()
    assert dict(await taken(stream))["capture"]["capture"]["state"] == "preparing"
    hub.send_changes()
    assert not len(stream)
    record.ranks[0].state = record.state = CaptureState.COMPLETE
    conducted.live_records.clear()
    hub.send_changes()
    assert dict(await taken(stream))["capture"]["capture"]["state"] == "complete"
    hub.send_changes()
    assert not len(stream)


@with_page
async def test_a_stream_without_a_run_has_no_steps(page: Page) -> None:
    train(page.served.store, "healthy")
    stream = opened(page, run="")
    await taken(stream)
    add_step(page, page.served.store.runs()["bert-17"][0])
    train(page.served.store, "healthy", run="second")
    page.api.hub.send_changes()
    names = [name for name, _ in await taken(stream)]
    assert names == ["runs", "run", "verdict"]


@with_page
async def test_streams_are_limited_and_free_their_place(page: Page) -> None:
    streams = [opened(page, access=Access.OWNER) for _ in range(MAX_STREAMS)]
    assert page.api.hub.open("a", None, Access.OWNER) is None
    assert (await page.ask("/api/v1/events")).status_code == 503
    page.api.hub.close_stream(streams[0])
    assert page.api.hub.open("a", None, Access.OWNER) is not None


async def test_a_slow_reader_loses_the_oldest_events_and_is_told() -> None:
    stream = EventStream("a", None, Access.STRANGER)
    for number in range(MAX_WAITING + 10):
        stream.push(event("steps", {"number": number}))
    events = await taken(stream)
    assert events[0] == ("dropped", {"events": 10})
    assert [data["number"] for _, data in events[1:]] == [*range(10, MAX_WAITING + 10)]
    stream.push(event("steps", {"number": 1}))
    assert [name for name, _ in await taken(stream)] == ["steps"]


def test_waiting_events_are_bounded_in_bytes() -> None:
    stream = EventStream("a", None, Access.STRANGER)
    for _ in range(20):
        stream.push(bytes(1 << 20))
    assert stream.waiting_bytes <= 4 << 20


async def test_a_quiet_stream_has_heartbeats_and_ends_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HEARTBEAT_S", 0.001)
    stream = EventStream("a", None, Access.STRANGER)
    extended: list[int] = []
    chunks: AsyncIterator[bytes] = stream.chunks(lambda: extended.append(1))
    await anext(chunks)
    assert (await anext(chunks)).startswith(b":")
    stream.close(event("bye", {"reason": "end"}))
    rest = [chunk async for chunk in chunks]
    assert parsed(rest[-1])[-1] == ("bye", {"reason": "end"})
    assert extended


@with_page
async def test_hub_sleeps_while_no_client_listens(page: Page) -> None:
    looked = asyncio.Event()
    page.api.hub.send_changes = looked.set  # type: ignore[method-assign]
    task = asyncio.create_task(page.api.hub.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not looked.is_set()
    opened(page)
    looked.clear()
    page.served.store.on_steps()  # type: ignore[misc]
    await looked.wait()
    task.cancel()


@with_page
async def test_hub_streams_of_a_run_are_watched(page: Page) -> None:
    train(page.served.store, "healthy")
    watched: list[frozenset[str]] = []
    hub = EventHub(replace(page.parts, watch=watched.append))
    streams = [hub.open(run, None, Access.STRANGER) for run in ("", "bert-17", "bert-17")]
    assert watched == [frozenset(), {"bert-17"}, {"bert-17"}]
    for stream in reversed(streams):
        assert stream is not None
        hub.close_stream(stream)
    assert watched[3:] == [{"bert-17"}, frozenset(), frozenset()]


@with_page
async def test_hub_watches_on_while_a_client_listens(page: Page) -> None:
    again = asyncio.Event()
    hub = EventHub(replace(page.parts, watch=lambda _: again.set()))
    assert hub.open("bert-17", None, Access.STRANGER) is not None
    again.clear()
    task = asyncio.create_task(hub.run())
    await again.wait()
    task.cancel()


@with_page
async def test_hub_steps_during_its_pause_are_sent_after_it(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They must not wait for the steps after them."""
    monkeypatch.setattr(event_hub, "_MAX_WAIT_S", 1e6)
    sent: list[int] = []
    hub, wake = page.api.hub, page.served.store.on_steps
    assert wake is not None

    def send_changes() -> None:
        sent.append(len(sent))
        if len(sent) == 2:
            # During the pause after these.
            asyncio.get_running_loop().call_soon(wake)
        if len(sent) == 3:
            done.set()

    done = asyncio.Event()
    hub.send_changes = send_changes  # type: ignore[method-assign]
    task = asyncio.create_task(hub.run())
    opened(page)
    wake()
    await done.wait()
    task.cancel()
