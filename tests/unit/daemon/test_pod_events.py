"""Events on pods: which verdicts are written, once each, to an API server over TLS with a token."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.web_tls import make_certificate
from tests.support.clock import Clock
from tests.support.node import eventually
from tests.support.scripted_server import Reply, ScriptedServer

from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.ownership import Pod
from torchperfd_daemon.push.cluster import find_cluster
from torchperfd_daemon.push.pod_events import FIRST_DELAY_S, MAX_PER_HOUR, STANDING_S, PodEvents
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store

pytestmark = pytest.mark.needs("openssl")
START = 1_800_000_000.0
UID = "0d2cd4a6-5d7b-4b7e-9c1b-0123456789ab"
SLOW = Verdict(Cause.INPUT_BOUND, "bert", evidence="52 ms of each 100 ms step", window_seconds=60)
LATE = replace(SLOW, cause=Cause.SLOW_RANK, rank=1, node="node-a")
CREATED = Reply(201)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    """An API server that takes each Event; its service account is in the folder of the test."""
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "ca.crt").write_bytes(certificate.read_bytes())
    (tmp_path / "token").write_text("first\n")
    with ScriptedServer([CREATED], (certificate, key)) as server:
        yield server


class Daemon:
    """A daemon's events, with ranks 0 and 1 of a run in two pods.

    Attributes:
        verdicts: The published ones.
        has_pods: Whether the pods are known.
        name: Of all pods; by default, each has its own.
    """

    def __init__(self, server: ScriptedServer, folder: Path) -> None:
        self.clock = Clock(START)
        self.verdicts: list[Verdict] = []
        self.has_pods = True
        self.name = ""
        self.store = Store(clock=self.clock)
        for rank in (1, 0):
            self.store.join(RankIdentity("bert", rank, pid=rank + 1))
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        self.events = PodEvents(
            find_cluster(environ, folder),
            self.store.runs,
            lambda run: [verdict for verdict in self.verdicts if verdict.run == run],
            self.pod_of,
            "node-a",
            clock=self.clock,
            wall=self.clock,
        )

    def pod_of(self, identity: RankIdentity) -> Pod | None:
        return Pod("team-a", self.name or f"bert-{identity.rank}", UID) if self.has_pods else None

    def check(self, *verdicts: Verdict, after: float = 0.0) -> None:
        """Move the clock on, look at these verdicts once, and wait until nothing more is written."""
        self.clock.now += after
        self.verdicts = list(verdicts)
        self.events.check()
        self.events.close()

    @property
    def counts(self) -> dict[str, int]:
        return {result: count for result, count in self.events.counts.events.items() if count}


@pytest.fixture
def daemon(server: ScriptedServer, tmp_path: Path) -> Daemon:
    return Daemon(server, tmp_path)


def events(server: ScriptedServer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in server.received]


def test_event_is_written_after_ten_minutes(daemon: Daemon, server: ScriptedServer) -> None:
    daemon.check(SLOW)
    daemon.check(SLOW, after=STANDING_S - 1)
    assert server.received == []
    # Other figures are the same verdict.
    daemon.check(replace(SLOW, evidence="60 ms of each 110 ms step"), after=1)
    [request], [event] = server.received, events(server)
    assert request.path == "/api/v1/namespaces/team-a/events"
    assert request.headers["authorization"] == "Bearer first"
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "team-a",
        "name": "bert-0",
        "uid": UID,
    }
    assert (event["type"], event["reason"]) == ("Warning", "InputBound")
    assert event["message"] == (
        "run bert: input-bound · 60 ms of each 110 ms step (last 60 s); torchperfd explain input-bound"
    )
    assert (event["firstTimestamp"], event["lastTimestamp"]) == (
        "2027-01-15T08:00:00Z",
        "2027-01-15T08:10:00Z",
    )
    assert event["source"] == {"component": "torchperfd", "host": "node-a"}
    assert daemon.counts == {"created": 1}


def test_event_of_a_verdict_is_written_once(daemon: Daemon, server: ScriptedServer) -> None:
    for _ in range(20):
        daemon.check(SLOW, after=STANDING_S)
    assert len(server.received) == 1


def test_event_of_a_verdict_with_gaps_is_not_written(daemon: Daemon, server: ScriptedServer) -> None:
    for _ in range(4):
        daemon.check(SLOW, after=STANDING_S / 2)
        daemon.check(after=STANDING_S / 2)
    assert server.received == []


@pytest.mark.parametrize("cause", [Cause.NONE, Cause.UNKNOWN])
def test_event_is_not_written_without_a_cause(daemon: Daemon, server: ScriptedServer, cause: Cause) -> None:
    for _ in range(3):
        daemon.check(replace(SLOW, cause=cause), after=STANDING_S)
    assert server.received == []


def test_event_is_on_the_pod_of_the_rank_it_names(daemon: Daemon, server: ScriptedServer) -> None:
    daemon.check(SLOW, LATE)
    daemon.check(SLOW, LATE, after=STANDING_S)
    found = {event["reason"]: event["involvedObject"]["name"] for event in events(server)}
    assert found == {"InputBound": "bert-0", "SlowRank": "bert-1"}


def test_event_waits_until_the_pod_is_known(daemon: Daemon, server: ScriptedServer) -> None:
    daemon.has_pods = False
    daemon.check(SLOW)
    daemon.check(SLOW, after=2 * STANDING_S)
    assert server.received == []
    daemon.has_pods = True
    daemon.check(SLOW, after=10)
    assert len(server.received) == 1


def test_event_keeps_its_name_over_restarts(server: ScriptedServer, tmp_path: Path) -> None:
    """The API server has it already, and answers 409."""
    server.replies = [CREATED, Reply(409)]
    for result in ("created", "exists"):
        daemon = Daemon(server, tmp_path)
        for _ in range(4):
            daemon.check(SLOW, after=STANDING_S)
        assert daemon.counts == {result: 1}
    first, second = (event["metadata"]["name"] for event in events(server))
    assert first == second
    assert first.startswith("bert-0.torchperfd-")


def test_event_of_a_long_pod_name_has_a_valid_name(daemon: Daemon, server: ScriptedServer) -> None:
    daemon.name = "a" * 199 + "." + "b" * 53
    daemon.check(SLOW)
    daemon.check(SLOW, after=STANDING_S)
    (event,) = events(server)
    assert len(event["metadata"]["name"]) <= 253
    assert "..torchperfd" not in event["metadata"]["name"]


@pytest.mark.parametrize("reply", [Reply(403), Reply(404), Reply(429), Reply(500), Reply(302)])
def test_event_that_fails_costs_a_line_and_a_count(
    daemon: Daemon, server: ScriptedServer, reply: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again after a minute, then two, and so on."""
    server.replies = [reply, reply, CREATED]
    daemon.check(SLOW)
    daemon.check(SLOW, after=STANDING_S)
    daemon.check(SLOW, after=FIRST_DELAY_S - 1)
    assert daemon.counts == {"failed": 1}
    daemon.check(SLOW, after=1)
    daemon.check(SLOW, after=2 * FIRST_DELAY_S - 1)
    assert daemon.counts == {"failed": 2}
    assert daemon.events.health.is_failing
    daemon.check(SLOW, after=1)
    assert daemon.counts == {"failed": 2, "created": 1}
    assert not daemon.events.health.is_failing
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"HTTP {reply.status}" in caplog.text
    assert "first" not in caplog.text


def test_event_without_a_network_costs_a_count(server: ScriptedServer, tmp_path: Path) -> None:
    daemon = Daemon(server, tmp_path)
    (tmp_path / "ca.crt").write_bytes(make_certificate(tmp_path, "other")[0].read_bytes())
    daemon.check(SLOW)
    daemon.check(SLOW, after=STANDING_S)
    (tmp_path / "token").write_text("s3cr3t\nX: y")
    daemon.check(SLOW, after=FIRST_DELAY_S)
    (tmp_path / "token").unlink()
    daemon.check(SLOW, after=2 * FIRST_DELAY_S)
    assert daemon.counts == {"failed": 3}
    assert server.received == []


def test_event_has_the_token_of_now(daemon: Daemon, server: ScriptedServer, tmp_path: Path) -> None:
    daemon.check(SLOW, LATE)
    (tmp_path / "token").write_text("second")
    daemon.check(SLOW, after=STANDING_S)
    assert [request.headers["authorization"] for request in server.received] == ["Bearer second"]


def test_events_of_an_hour_are_limited(daemon: Daemon, server: ScriptedServer) -> None:
    many = [replace(LATE, rank=rank) for rank in range(MAX_PER_HOUR + 5)]
    daemon.check(*many)
    daemon.check(*many, after=STANDING_S)
    daemon.check(*many, after=60)
    assert len(server.received) == MAX_PER_HOUR
    daemon.check(*many, after=3600)
    assert len(server.received) == MAX_PER_HOUR + 5


def test_events_are_watched_until_cancelled(
    daemon: Daemon, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        task = asyncio.create_task(daemon.events.run())
        await asyncio.to_thread(eventually, lambda: server.received, 10)
        task.cancel()

    monkeypatch.setattr("torchperfd_daemon.push.pod_events.PERIOD_S", 0.001)
    daemon.check(SLOW)
    daemon.clock.now += STANDING_S
    asyncio.run(run())
    daemon.events.close()
    assert daemon.counts == {"created": 1}


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "token", "ca.crt"])
def test_cluster_that_is_not_there_is_refused(server: ScriptedServer, tmp_path: Path, missing: str) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert find_cluster(environ, tmp_path).port == 443
    environ.pop(missing, None)
    (tmp_path / missing).unlink(missing_ok=True)
    with pytest.raises(UsageError, match="--kubernetes-events"):
        find_cluster(environ, tmp_path)
