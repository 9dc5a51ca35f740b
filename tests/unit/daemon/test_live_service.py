"""Steps for live views, and ranks that are asked to report frequently."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.served import GIVE_UP_S, RankStream, Served, control, serving_from_a_thread, with_daemon
from tests.unit.daemon.live_runs import STEPS, train

from torchperfd.v1 import contract, control_pb2, session_pb2
from torchperfd_daemon.service.rank_session import LEASE_S, RENEW_S, FrequentReports, Session
from torchperfd_daemon.store.history import History
from torchperfd_daemon.store.model import HISTORY_STEPS, RankIdentity, StepColumns
from torchperfd_daemon.store.store import Rank

batches = st.lists(st.lists(st.integers(1, 10**12), max_size=20), max_size=8)


@given(batches, st.integers(1, 12), st.integers(0, 20))
def test_the_newest_steps_are_the_last_that_came(
    durations: list[list[int]], capacity: int, wanted: int
) -> None:
    history = History(capacity)
    rows: list[tuple[int, int, int, int]] = []
    for number, batch in enumerate(durations):
        # The second phase comes and goes.
        phases = {"data": array("q", batch)}
        if number % 2:
            phases["augment"] = array("q", [duration + 1 for duration in batch])
        ends = array("q", [len(rows) + place for place in range(len(batch))])
        history.append(StepColumns(ends, array("q", batch), phases))
        rows += [
            (end, duration, duration, duration + 1 if number % 2 else 0)
            for end, duration in zip(ends, batch, strict=True)
        ]
    newest = history.newest(wanted)
    columns = [
        newest.end_unix_ns,
        newest.duration_ns,
        *(newest.phases.get(name) for name in ("data", "augment")),
    ]
    kept = rows[-capacity:][len(rows[-capacity:]) - min(wanted, len(rows[-capacity:])) :]
    for place, column in enumerate(columns):
        expected = [row[place] for row in kept]
        assert (list(column) if column is not None else [0] * len(kept)) == expected


@with_daemon
async def test_steps_are_columns_with_the_index_of_the_first(
    served: Served, channel: grpc.aio.Channel
) -> None:
    train(served.store, "one straggler")
    reported = (await control(channel).GetSteps(control_pb2.GetStepsRequest(ranks=[1, 2]))).ranks
    assert [each.status.identity.rank for each in reported] == [1, 2]
    for each in reported:
        assert (each.count, each.first_step) == (STEPS, 1000 - STEPS)
        assert [pauses.calls for pauses in each.gc] == [2000, 0, 10]
        columns = [each.duration_ns, *(phase.ns for phase in each.phases)]
        whole, *parts = (memoryview(column).cast("q").tolist() for column in columns)
        assert list(map(sum, zip(*parts, strict=True))) == whole
    few = (await control(channel).GetSteps(control_pb2.GetStepsRequest(newest=3, ranks=[2]))).ranks[0]
    assert (few.count, few.first_step) == (3, 997)
    assert few.duration_ns == reported[1].duration_ns[-24:]
    many = await control(channel).GetSteps(control_pb2.GetStepsRequest(newest=HISTORY_STEPS + 1))
    assert [each.count for each in many.ranks] == [STEPS] * 4


@with_daemon
async def test_what_is_not_there_is_not_found(served: Served, channel: grpc.aio.Channel) -> None:
    train(served.store, "healthy")
    for request in ({"run": "gone"}, {"ranks": [1, 9]}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control(channel).GetSteps(control_pb2.GetStepsRequest(**request))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await control(channel).GetReadings(control_pb2.GetReadingsRequest())).readings == []


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Run a command on a terminal of its own; yield it and our end."""
    ours, theirs = os.openpty()
    try:
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
            os.close(theirs)
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(ours)


@pytest.mark.parametrize("way", ["q", "Ctrl-C"])
def test_top_draws_on_a_terminal_until_it_is_ended(way: str) -> None:
    with serving_from_a_thread() as served:
        train(served.store, "one straggler")
        command = (sys.executable, "-m", "torchperfd", "top", "--socket", served.socket)
        with terminal(*command) as (process, ours):
            seen = b""
            while "╰".encode() not in seen:
                seen += os.read(ours, 65536)
            if way == "q":
                os.write(ours, b"xq")
            else:
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):
                while more := os.read(ours, 65536):
                    seen += more
            assert process.wait(GIVE_UP_S) == 0, seen
    assert b"bert-17" in seen
    assert b"\x1b[?1049h" in seen
    assert b"\x1b[?1049l" in seen, "the terminal is as it was"


class Watched:
    """Sessions of some runs, and what was sent to them since the last look."""

    def __init__(self, *runs: str) -> None:
        self.now = 50.0
        self.sessions = {run: [self.session(run)] for run in runs}
        self.reports = FrequentReports(lambda run: self.sessions.get(run, []), lambda: self.now)

    def session(self, run: str) -> Session:
        return Session(Rank(RankIdentity(run, 0), self.now), [contract.FREQUENT_REPORTS])

    def watch(self, *runs: str) -> dict[str, list[int]]:
        self.reports.watch(frozenset(runs))
        return {
            run: [session.outgoing.get_nowait().report_frequently.seconds]
            for run, sessions in self.sessions.items()
            for session in sessions
            if not session.outgoing.empty()
        }


def test_frequent_reports_begin_renew_and_end() -> None:
    watched = Watched("a", "b")
    assert watched.watch() == {}
    assert watched.watch("a") == {"a": [LEASE_S]}
    assert watched.watch("a") == {}
    assert watched.watch("a", "b") == {"b": [LEASE_S]}
    watched.now += RENEW_S
    assert watched.watch("a", "b") == {"a": [LEASE_S], "b": [LEASE_S]}
    assert watched.watch("b") == {"a": [0]}
    assert watched.watch() == {"b": [0]}
    watched.now += 100
    assert watched.watch() == {}
    assert 2 * RENEW_S < LEASE_S, "one renewal may be lost"


def test_frequent_reports_of_a_late_rank_begin_too() -> None:
    watched = Watched("a")
    watched.watch("a")
    watched.sessions["a"] = [watched.session("a")]
    watched.now += RENEW_S
    assert watched.watch("a") == {"a": [LEASE_S]}


def test_stopped_process_requests_do_not_pile_up() -> None:
    session = Watched("a").sessions["a"][0]
    for _ in range(100):
        session.report_frequently(LEASE_S)
    assert session.outgoing.qsize() < 10


@with_daemon
async def test_rank_is_requested_over_grpc_if_it_can(served: Served, channel: grpc.aio.Channel) -> None:
    old, new = RankStream(channel), RankStream(channel)
    await old.join(rank=0)
    identity = session_pb2.RankIdentity(run="bert-17", rank=1, world_size=2, pid=70)
    api = session_pb2.ApiRange(min=1, max=1)
    hello = session_pb2.Hello(api=api, features=[contract.FREQUENT_REPORTS], identity=identity)
    await new.say(session_pb2.ClientMessage(hello=hello))
    assert (await new.receive()).HasField("welcome")
    served.sessions.frequent_reports.watch(frozenset(["bert-17"]))
    async with asyncio.timeout(GIVE_UP_S):
        assert (await new.receive()).report_frequently.seconds == LEASE_S
    assert all(session.outgoing.empty() for session in served.sessions.of_run("bert-17"))
    for rank in (old, new):
        await rank.leave()
