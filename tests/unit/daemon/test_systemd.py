"""systemd's readiness protocol, against real datagram sockets."""

import asyncio
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.clock import Clock
from tests.support.served import short_directory

from torchperfd_daemon.background import StoppedWorkers, WorkerHealth
from torchperfd_daemon.server.lifecycle import keep_watchdog_quiet, notify_systemd, watchdog_seconds


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    """What the service manager listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(20)
        yield listener


def test_a_state_is_one_datagram(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as directory:
        path = str(directory / "notify")
        manager.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        assert notify_systemd("READY=1")
        assert notify_systemd("STOPPING=1")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_an_at_sign_names_an_abstract_socket(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"torchperfd-test-{secrets.token_hex(8)}"
    manager.bind(f"\0{name}")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    assert notify_systemd("READY=1")
    assert manager.recv(100) == b"READY=1"


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify_systemd("READY=1")


@pytest.mark.parametrize("address", ["", "relative/path", "/no/such/socket", "@", "/" + "x" * 200])
def test_a_manager_that_is_not_there_is_no_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify_systemd("READY=1")


def test_socket_without_a_reader_is_no_error(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as directory:
        path: Path = directory / "notify"
        manager.bind(str(path))
        manager.close()
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert not notify_systemd("READY=1")


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_period_is_read_from_the_environment(
    variables: dict[str, str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert watchdog_seconds() == seconds


async def test_watchdog_gets_signs_of_life_while_the_loop_runs(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"torchperfd-test-{secrets.token_hex(8)}"
    manager.bind(f"\0{name}")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    task = asyncio.create_task(keep_watchdog_quiet())
    received = [await asyncio.to_thread(manager.recv, 100) for _ in range(3)]
    task.cancel()
    assert received == [b"WATCHDOG=1"] * 3


def test_watchdog_that_expects_nothing_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    asyncio.run(asyncio.wait_for(keep_watchdog_quiet(), 20))


async def test_watchdog_of_a_stopped_worker_gets_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"torchperfd-test-{secrets.token_hex(8)}"
    manager.bind(f"\0{name}")
    manager.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    asked = iter([["diagnosis"]] * 3)
    with pytest.raises(RuntimeError):  # what the end of an iterator becomes in a coroutine
        await keep_watchdog_quiet(lambda: next(asked))
    with pytest.raises(BlockingIOError):
        manager.recv(100)
    assert caplog.messages == ["diagnosis has stopped: systemd's watchdog is not notified"] * 3


def test_workers_without_a_round_for_long_have_stopped() -> None:
    clock = Clock()
    diagnosis, collectors = WorkerHealth("diagnosis"), WorkerHealth("collectors")
    workers = StoppedWorkers(diagnosis, collectors, clock=clock)
    assert workers.names() == []
    for _ in range(10):
        clock.now += 15
        diagnosis.succeeded(clock.now)
        collectors.failed()
        assert workers.names() == []
    clock.now += 15
    collectors.succeeded(clock.now)
    assert workers.names() == []
    clock.now += 10
    assert workers.names() == ["diagnosis"]
    diagnosis.succeeded(clock.now)
    assert workers.names() == []


def test_worker_of_long_period_stops_after_three_of_them() -> None:
    clock = Clock()
    sampler = WorkerHealth("sampler", period_seconds=60)
    workers = StoppedWorkers(sampler, clock=clock)
    assert workers.names() == []
    clock.now += 180
    assert workers.names() == []
    clock.now += 1
    assert workers.names() == ["sampler"]
