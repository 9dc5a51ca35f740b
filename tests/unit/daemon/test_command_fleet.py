"""``ps``, ``ranks``, ``diagnose``, ``top`` and ``capture`` over two nodes, one of which may be gone."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]
from tests.support.commands import Run, runner, with_socket
from tests.support.golden import check_golden
from tests.support.node import free_port
from tests.support.served import GIVE_UP_S, from_a_thread
from tests.unit.daemon.fleet_nodes import PlayedSessions
from tests.unit.daemon.live_runs import train

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.credentials import Credentials
from torchperfd_daemon.fleet.peers import Peers, Static
from torchperfd_daemon.fleet.service import FleetService
from torchperfd_daemon.fleet.transport import AuthInterceptor, FanOut, listen
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.server import RpcServer, caller_directory
from torchperfd_daemon.service.control import ControlService
from torchperfd_daemon.service.permissions import Permissions
from torchperfd_daemon.service.session import Node, SessionService
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store


@dataclass
class Pair:
    """A daemon with ranks 0 and 1 behind a socket, and one with ranks 2 and 3 that it knows as a peer."""

    socket: str
    stores: tuple[Store, Store]
    peer: Address
    stop_peer: Callable[[], None]

    def train(self, case: str, run: str = "bert-17") -> None:
        """Have the run's ranks on the two nodes; the second node's are named so."""
        for number, store in enumerate(self.stores):
            train(store, case, run)
            for record in list(store.ranks()):
                if record.identity.rank // 2 != number:
                    store.forget(record)


@contextlib.asynccontextmanager
async def serving(directory: Path, *, knows: bool) -> AsyncIterator[Pair]:
    here, there = Store(), Store()
    catalog = Catalog(directory / "there")
    played = cast("SessionService", PlayedSessions([]))
    server, peer = await listen(
        Address("127.0.0.1", 0),
        AuthInterceptor(Credentials),
        FleetService(there, played, Coordinator(catalog), catalog, "i-b", "node-b"),
        CallCounts(),
    )
    settings = ServeSettings(socket=str(directory / "d.sock"), captures_dir=directory / "captures")
    coordinator = Coordinator(Catalog(settings.captures_dir))
    node = Node("node-a", "http://127.0.0.1:9407/metrics", settings.captures_dir)
    sessions = SessionService(here, coordinator, node, lambda: None)
    fan_out = FanOut(Credentials)
    fleet = FleetView(Peers(Static((peer,))) if knows else None, fan_out, coordinator, "i-a", node.name)
    callers = caller_directory(settings)
    catalog = Catalog(settings.captures_dir)
    permissions = Permissions(callers)
    control = ControlService(here, sessions, coordinator, catalog, node, fleet, permissions=permissions)
    rpc = RpcServer(settings, callers, sessions, control, health.HealthServicer(), CallCounts())
    await rpc.start()
    loop, running = asyncio.get_running_loop(), [server]

    def stop_peer() -> None:
        asyncio.run_coroutine_threadsafe(running[0].stop(None), loop).result(GIVE_UP_S)

    try:
        yield Pair(settings.socket, (here, there), peer, stop_peer)
    finally:
        await rpc.stop(None)
        await fan_out.close()
        await server.stop(None)
        running.clear()  # gRPC's poller thread ends with its last object, and tests keep the pair


def pair_of(*, knows: bool) -> AbstractContextManager[Pair]:
    """Serve from another thread, for commands, whose calls block this one."""
    return from_a_thread(lambda directory: serving(directory, knows=knows))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of(knows=True) as pair:
        yield pair


@pytest.fixture
def command(pair: Pair, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command against the first daemon."""
    return commanding(pair, capfd)


def commanding(pair: Pair, capfd: pytest.CaptureFixture[str]) -> Run:
    return with_socket(runner(capfd), pair.socket)


def timeless(frame: str) -> str:
    """Return a frame without the time of day and the age of the last step, which was long ago."""
    frame = re.sub(r" · last step .* d .* h ago ─+", " ", frame)
    return "\n".join(re.sub(r" +\d\d:\d\d:\d\d$", "", line.rstrip()) for line in frame.splitlines())


def test_the_tables_of_two_nodes_are_the_golden_file(
    pair: Pair, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    pair.train("one straggler")
    reported = []
    for name in ("ranks", "diagnose", "top"):
        for scope in (("--fleet",), ("--job", "bert")):
            code, out, err = command(name, *scope)
            assert (code, err) == (0, "")
        reported.append(f"# {name}\n{timeless(out) if name == 'top' else out.rstrip()}")
    text = "\n\n".join(reported) + "\n"
    check_golden("fleet.txt", text)


def test_documents_cover_all_nodes(pair: Pair, command: Run) -> None:
    pair.train("one straggler")
    for name, field in (("ps", "runs"), ("ranks", "runs"), ("diagnose", "verdicts")):
        code, out, err = command(name, "--fleet", "--json")
        document = json.loads(out)
        assert (code, err) == (0, "")
        assert [(each["node"], each["connected_ranks"]) for each in document["nodes"]] == [
            ("node-a", 2),
            ("node-b", 2),
        ]
        assert document["unreachable"] == []
        assert [each["run"] for each in document[field]] == ["bert-17"]
        assert "nodes" not in json.loads(command(name, "--json")[1])
    [run] = json.loads(command("ranks", "--fleet", "--json")[1])["runs"]
    assert [(rank["rank"], rank["node"]) for rank in run["ranks"]] == [
        (0, "node-a"),
        (1, "node-a"),
        (2, "node-b"),
        (3, "node-b"),
    ]
    assert [rank["slow"] is not None for rank in run["ranks"]] == [False, False, True, False]
    assert {rank["window_steps"] for rank in run["ranks"]} == {60}, "of 64, whole blocks of five"


def test_diagnose_of_the_fleet_advises_no_tune(pair: Pair, command: Run) -> None:
    """It measures scripts of one process."""
    pair.train("input-bound")
    _, out, _ = command("diagnose", "--fleet")
    assert "fix" in out
    assert "torchperfd tune" not in out
    assert "SCRIPT" not in out


@pytest.mark.parametrize("name", ["ps", "ranks", "diagnose", "top"])
@pytest.mark.parametrize("scope", [("--fleet",), ("--job", "bert")])
def test_a_daemon_that_is_gone_is_named(pair: Pair, command: Run, name: str, scope: tuple[str, ...]) -> None:
    pair.train("one straggler")
    pair.stop_peer()
    code, out, err = command(name, *scope)
    assert code == 5
    assert err.startswith(f"torchperfd: 1 of the fleet's daemons did not answer: {pair.peer} (")
    assert "bert-17" in out, "and the known runs are listed"
    assert command(name)[0] == 0, "this node is complete"


@pytest.mark.parametrize("name", ["ps", "ranks", "diagnose", "top", "capture"])
def test_a_job_that_is_nowhere_is_no_target(pair: Pair, command: Run, name: str) -> None:
    pair.train("healthy")
    code, out, err = command(name, "--job", "gone")
    assert (code, out) == (3, "")
    assert err.startswith("torchperfd: no run of job gone on any node of the fleet that answers; ")


@pytest.mark.parametrize("scope", [("--job", "bert"), ("--run", "bert-17")])
def test_a_capture_of_all_runs_is_of_no_single_one(command: Run, scope: tuple[str, ...]) -> None:
    code, _, err = command("capture", "--all", *scope)
    assert (code, err) == (2, "torchperfd: --all excludes --run and --job; leave one out\n")


def test_a_job_has_its_own_runs_only(pair: Pair, command: Run) -> None:
    pair.train("healthy")
    pair.stores[1].join(RankIdentity("other", 0, 1, job_name="gpt"))
    for name in ("ps", "ranks"):
        reported = json.loads(command(name, "--job", "gpt", "--json")[1])["runs"]
        assert [each["run"] for each in reported] == ["other"]
    reported = json.loads(command("diagnose", "--fleet", "--json")[1])["verdicts"]
    assert [(each["run"], each["cause"]) for each in reported] == [("bert-17", "none"), ("other", "unknown")]


def test_a_daemon_without_peers_has_its_own_part_of_a_job(capfd: pytest.CaptureFixture[str]) -> None:
    with pair_of(knows=False) as pair:
        command = commanding(pair, capfd)
        pair.train("healthy")
        code, out, err = command("ranks", "--job", "bert")
        assert (code, err) == (0, "")
        assert out.startswith("run bert-17: 2 of 4 ranks on this node")
        assert [each["run"] for each in json.loads(command("ps", "--job", "bert", "--json")[1])["runs"]] == [
            "bert-17"
        ]
        for name in ("ps", "ranks", "diagnose", "top"):
            assert command(name, "--job", "gone") == (
                3,
                "",
                "torchperfd: no job gone on this node; `torchperfd ps` lists those there are\n",
            )
            code, _, err = command(name, "--fleet")
            assert code == 2
            assert "--fleet-peers" in err
        assert command("capture", "--job", "gone")[2].startswith("torchperfd: this node has no run of job")


def test_watching_goes_on_while_a_daemon_is_away(
    pair: Pair, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train("healthy")
    turns = iter([pair.stop_peer])

    def sleep(_: float) -> None:
        turn = next(turns, None)
        if turn is None:
            raise KeyboardInterrupt
        turn()

    monkeypatch.setattr("torchperfd_cli.commands._output.time", SimpleNamespace(sleep=sleep))
    code, out, err = command("ranks", "--fleet", "--watch", "--json")
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert [len(each["runs"][0]["ranks"]) for each in (first, second)] == [4, 2]
    assert [len(each["unreachable"]) for each in (first, second)] == [0, 1]
    assert str(pair.peer) in err


def test_a_configured_store_leaves_own_runs_to_the_daemons(
    pair: Pair, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train("one straggler")
    monkeypatch.setenv("TORCHPERFD_PROMETHEUS", f"http://127.0.0.1:{free_port()}")
    for scope in (("--run", "bert-17"), ("--run", "be"), ("--job", "bert")):
        code, out, err = command("diagnose", "--fleet", *scope)
        assert (code, err) == (0, "")
        assert "rank 2" in out
    for other in ("", "--run elsewhere", "--job nightly"):
        code, _, err = command("diagnose", "--fleet", *other.split())
        assert (code, "no answer from 127.0.0.1" in err) == (4, True)
