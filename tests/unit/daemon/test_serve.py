"""``torchperfd serve`` in this process: what it refuses, and one whole life of a daemon."""

import asyncio
import contextlib
import fcntl
import logging
import os
import pwd
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pynvml
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.commands import Run, runner
from tests.support.node import free_port
from tests.support.served import GIVE_UP_S, RankStream, control, short_directory

from torchperfd.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc, session_pb2
from torchperfd_daemon.config.kinds import Address, Mode
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.push.cluster import Cluster
from torchperfd_daemon.server.daemon import Daemon
from torchperfd_daemon.server.lifecycle import listen, public_host


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def serve(directory: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a daemon that is expected to refuse."""
    defaults = ["--socket", str(directory / "d.sock"), "--metrics-address", "127.0.0.1:0"]
    return runner(capfd, "serve", *defaults, "--captures-dir", str(directory))


@pytest.mark.parametrize(
    "address", ["9407", "localhost", ":9407", "host:", "host:port", "host:-1", "host:65536", "host:²", ""]
)
def test_a_wrong_address_is_a_usage_error(serve: Run, address: str) -> None:
    code, out, err = serve("--metrics-address", address)
    assert (code, out) == (2, "")
    assert err.endswith(
        f"torchperfd: invalid value for '--metrics-address': {address!r} is not HOST:PORT;"
        " write it like 127.0.0.1:9407; see `torchperfd serve --help`\n"
    )


@pytest.mark.parametrize("port", ["1" * 5000, "٣"])
def test_odd_numbers_are_no_traceback(port: str) -> None:
    try:
        assert Address().parse(f"host:{port}", Path()) == ("host", 3)
    except UsageError:
        assert len(port) > 5


def test_addresses_are_read() -> None:
    assert Address().parse("127.0.0.1:9407", Path()) == ("127.0.0.1", 9407)
    assert Address().parse("[::1]:0", Path()) == ("::1", 0)
    assert Address().parse("node.example.com:65535", Path()) == ("node.example.com", 65535)


@pytest.mark.parametrize("mode", ["rw", "888", "1777", "-1", "", "0x1ff"])
def test_a_wrong_mode_is_a_usage_error(serve: Run, mode: str) -> None:
    code, out, err = serve("--socket-mode", mode)
    assert (code, out) == (2, "")
    assert f"invalid value for '--socket-mode': {mode!r} is no file mode;" in err


def test_modes_are_octal() -> None:
    modes = [Mode().parse(text, Path()) for text in ("600", "666", "0777", "0")]
    assert modes == [0o600, 0o666, 0o777, 0]


@pytest.mark.parametrize(
    "option", [["--interval", "0"], ["--interval", "x"], ["--log-level", "loud"], ["more"]]
)
def test_a_wrong_option_is_a_usage_error(serve: Run, option: list[str]) -> None:
    code, out, err = serve(*option)
    assert (code, out) == (2, "")
    assert err.startswith("torchperfd: ")
    assert err.endswith("; see `torchperfd serve --help`\n")


@pytest.mark.parametrize("letter", ["x", "é"])
def test_socket_path_too_long_is_a_usage_error(serve: Run, directory: Path, letter: str) -> None:
    path = f"{directory}/{letter * 107}"
    size = len(os.fsencode(path))
    assert serve("--socket", path) == (
        2,
        "",
        f"torchperfd: the socket path has {size} bytes, the kernel allows 107; choose a shorter one with"
        " --socket\n",
    )
    assert list(directory.iterdir()) == []


def test_a_port_in_use_is_one_line(serve: Run, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve("--metrics-address", f"127.0.0.1:{port}") == (
            1,
            "",
            f"torchperfd: cannot serve metrics on 127.0.0.1:{port}: Address already in use; choose another"
            " address with --metrics-address\n",
        )
    assert not (directory / "d.sock").exists()


def test_a_host_that_is_not_here_is_one_line(serve: Run) -> None:
    code, out, err = serve("--metrics-address", "192.0.2.1:0")
    assert (code, out) == (1, "")
    assert err.startswith("torchperfd: cannot serve metrics on 192.0.2.1:0: ")
    assert err.count("\n") == 1


@pytest.fixture
def other_daemon(directory: Path) -> Iterator[Path]:
    """What a running daemon holds: its lock, and its socket."""
    path = directory / "d.sock"
    path.write_text("the other one's")
    with (directory / "d.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def test_second_daemon_on_a_socket_is_refused_without_harm(serve: Run, other_daemon: Path) -> None:
    assert serve() == (
        1,
        "",
        f"torchperfd: another daemon serves {other_daemon}; use it, or choose another path with --socket\n",
    )
    assert other_daemon.read_text() == "the other one's"


def test_a_second_embedded_daemon_leaves_it_to_the_first(serve: Run, other_daemon: Path) -> None:
    assert serve("--embedded") == (0, "", "")
    assert other_daemon.read_text() == "the other one's"


def test_a_socket_where_none_can_be_is_one_line(serve: Run, directory: Path) -> None:
    (directory / "file").write_text("")
    code, out, err = serve("--socket", f"{directory}/file/d.sock")
    assert (code, out) == (1, "")
    assert err.startswith(f"torchperfd: cannot create {directory}/file/d.sock.lock: ")
    assert err.endswith("; choose another path with --socket\n")
    assert err.count("\n") == 1


def test_metrics_port_accepts_before_the_daemon_is_ready(directory: Path) -> None:
    settings = ServeSettings(socket="", captures_dir=directory, metrics_port=0)
    with listen(settings) as listener, socket.create_connection(listener.getsockname()):
        pass


def test_public_host_is_an_address_that_peers_can_reach() -> None:
    assert public_host("127.0.0.1") == "127.0.0.1"
    assert public_host("::1") == "[::1]"
    assert public_host("0.0.0.0") == public_host("::") == socket.gethostname()


class Life:
    """A daemon that runs in this process, and the service manager that it reports to."""

    def __init__(self, directory: Path, manager: socket.socket) -> None:
        self.directory, self.manager = directory, manager
        self.settings: dict[str, Any] = {"metrics_port": 0, "interval_seconds": 0.05}

    async def reported(self) -> str:
        """Return what the daemon reports next."""
        loop = asyncio.get_running_loop()
        return (await asyncio.wait_for(loop.sock_recv(self.manager, 100), GIVE_UP_S)).decode()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
        """Start a daemon, connect once it is ready, and check that it ends in order with the block."""
        path = str(self.directory / "run" / "d.sock")
        settings = ServeSettings(socket=path, captures_dir=self.directory / "captures", **self.settings)
        daemon = asyncio.create_task(Daemon(settings).run())
        reported = asyncio.create_task(self.reported())
        await asyncio.wait((daemon, reported), return_when=asyncio.FIRST_COMPLETED)
        if daemon.done():
            reported.cancel()
            await daemon
        assert await reported == "READY=1"
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            info = await control(channel).GetInfo(control_pb2.GetInfoRequest())
            yield channel, info.metrics_url
        assert await self.reported() == "STOPPING=1"
        await asyncio.wait_for(daemon, GIVE_UP_S)
        assert not Path(path).exists()


@pytest.fixture
def life(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        manager.bind(str(directory / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
        yield Life(directory, manager)


async def health(channel: grpc.aio.Channel, service: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


async def test_daemon_that_pushes_shows_what_becomes_of_it(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    cluster = Cluster("127.0.0.1", 1, life.directory)
    monkeypatch.setattr("torchperfd_daemon.server.checked_settings.find_cluster", lambda: cluster)
    life.settings |= {"kubernetes_events": True, "otlp": "http://127.0.0.1:1", "otlp_interval_seconds": 0.01}
    async with life.running() as (_, metrics_url), httpx.AsyncClient() as http:
        lines = (await http.get(metrics_url)).text.splitlines()
        os.kill(os.getpid(), signal.SIGTERM)
    assert 'torchperfd_kubernetes_events_total{result="failed"} 0.0' in lines
    assert 'torchperfd_otlp_messages_total{result="sent"} 0.0' in lines
    for worker in ("otlp", "events"):
        assert any(f'background_failures_total{{worker="{worker}"}}' in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_daemon_is_ready_serves_and_drains(life: Life, number: signal.Signals) -> None:
    async with life.running() as (channel, metrics_url):
        services = ("", "torchperfd.v1.Control", "torchperfd.v1.Session")
        assert [await health(channel, service) for service in services] == ["SERVING"] * 3
        assert stat.S_IMODE((life.directory / "run" / "d.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE((life.directory / "run").stat().st_mode) == 0o700
        rank = RankStream(channel)
        assert (await rank.join()).metrics_url == metrics_url
        async with httpx.AsyncClient() as http:
            assert (await http.get(metrics_url.replace("/metrics", "/-/ready"))).status_code == 200
            page = await http.get(metrics_url)
            assert "torchperfd_clients 1.0" in page.text.splitlines()
            assert "server" not in page.headers
        os.kill(os.getpid(), number)


async def test_daemon_reads_its_credentials_again_on_sighup(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    token = life.directory / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    token.chmod(0o600)
    address = ("127.0.0.1", free_port())
    life.settings |= {"fleet_token_file": token, "fleet_address": address}
    caplog.set_level(logging.INFO)

    async def allowed(secret: str) -> bool:
        async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}") as fleet:
            stub = fleet_pb2_grpc.FleetStub(fleet)
            request = fleet_pb2.NodeRunsRequest(api=session_pb2.ApiRange(min=1, max=99))
            call: Any = stub.ListRuns(request, metadata=(("authorization", f"Bearer {secret}"),))
            code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
        return bool(code is grpc.StatusCode.OK)

    async with life.running() as (channel, metrics_url):

        async def hang_up() -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            # The loop handles signals before it answers what arrives after them.
            await control(channel).GetInfo(control_pb2.GetInfoRequest())

        assert [await allowed("a" * 32), await allowed("b" * 32)] == [True, False]
        token.write_text("b" * 32)
        await hang_up()
        assert [await allowed("a" * 32), await allowed("b" * 32)] == [False, True]
        token.write_text("short")
        await hang_up()
        assert await allowed("b" * 32), "a wrong file changes nothing"
        assert "the fleet's previous credentials stay in force" in caplog.text
        async with httpx.AsyncClient() as http:
            page = await http.get(metrics_url)
        lines = page.text.splitlines()
        assert 'torchperfd_daemon_refused_calls_total{listener="fleet"} 2.0' in lines
        assert 'torchperfd_daemon_calls_total{code="OK",method="Fleet/ListRuns"} 3.0' in lines
        os.kill(os.getpid(), signal.SIGTERM)


async def test_daemon_runs_only_the_chosen_collectors(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: asked.append("nvmlInit"))
    life.settings["collectors"] = ("memory", "self")
    async with life.running() as (channel, metrics_url), httpx.AsyncClient() as http:
        await RankStream(channel).join()
        give_up = time.monotonic() + GIVE_UP_S
        while "torchperfd_node_memory_total_bytes" not in (page := (await http.get(metrics_url)).text):
            assert time.monotonic() < give_up
            await asyncio.sleep(0.1)
        assert re.findall(r'collector_success{collector="(\w+)"}', page) == ["memory"]
        assert "torchperfd_train_" not in page
        assert 'background_failures_total{worker="goodput"}' not in page
        collecting = {each.name for each in threading.enumerate() if each.name.startswith("collect-")}
        assert (collecting, asked) == ({"collect-memory"}, [])
        goodput = await control(channel).GetGoodput(control_pb2.GetGoodputRequest())
        assert list(goodput.runs) == []
        assert len((await control(channel).ListRuns(control_pb2.ListRunsRequest())).runs) == 1
        os.kill(os.getpid(), signal.SIGTERM)


async def test_daemon_with_user_label_names_a_ranks_user(life: Life) -> None:
    life.settings["user_label"] = True
    label = f'user="{pwd.getpwuid(os.getuid()).pw_name}"'
    async with life.running() as (channel, metrics_url), httpx.AsyncClient() as http:
        await RankStream(channel).join()
        give_up = time.monotonic() + GIVE_UP_S
        while label not in (await http.get(metrics_url)).text:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("umask", [0, 0o077])
async def test_the_socket_has_the_mode_that_was_asked_for(
    life: Life, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """The umask stays as it is: files that other threads create meanwhile depend on it."""
    life.settings["socket_mode"] = 0o666
    before = os.umask(umask)
    set_umask = os.umask
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask is of all threads"))
    try:
        async with life.running():
            place = life.directory / "run"
            assert stat.S_IMODE((place / "d.sock").stat().st_mode) == 0o666
            assert stat.S_IMODE((place / ".d.sock.rpc").stat().st_mode) == 0o600
            assert [each.name for each in place.iterdir() if each.is_dir()] == []
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        set_umask(before)


async def test_embedded_daemon_takes_a_free_port_and_outlives_ranks(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes another port if its own is in use, and stays until the last rank has left."""
    reading, writing = os.pipe()
    with (
        os.fdopen(reading) as stdin,
        os.fdopen(writing, "w") as owner,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        port = taken.getsockname()[1]
        life.settings |= {"embedded": True, "metrics_port": port}
        monkeypatch.setattr(sys, "stdin", stdin)
        async with life.running() as (channel, metrics_url):
            assert f":{port}/" not in metrics_url
            rank = RankStream(channel)
            await rank.join()
            owner.close()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    asyncio.shield(reported := asyncio.ensure_future(life.reported())), 0.2
                )
            reported.cancel()
            assert (await control(channel).GetInfo(control_pb2.GetInfoRequest())).clients == 1
            await rank.leave()


async def test_an_embedded_daemon_ends_with_its_owner(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as owner:
        life.settings["embedded"] = True
        monkeypatch.setattr(sys, "stdin", stdin)
        async with life.running():
            owner.close()


async def test_what_a_dead_daemon_left_behind_does_not_matter(life: Life) -> None:
    path = life.directory / "run" / "d.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    (life.directory / "run" / "d.sock.lock").write_text("")
    async with life.running():
        os.kill(os.getpid(), signal.SIGTERM)
