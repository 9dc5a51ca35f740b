"""Ranks report more often while a live page shows their run, and only then."""

import asyncio

import grpc
from tests.support.served import GIVE_UP_S, RankStream, Served, play

from torchperfd.v1 import contract, session_pb2
from torchperfd_daemon.service.rank_session import LEASE_S, RENEW_S, FrequentReports, Session
from torchperfd_daemon.store import Rank, RankIdentity


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


def test_rank_is_requested_over_grpc_if_it_can() -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
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

    play(scenario)
