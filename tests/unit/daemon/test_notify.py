"""systemd's readiness protocol, against real datagram sockets."""

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.daemon.served import short_directory

from torchperfd_daemon.notify import notify


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
        assert notify("READY=1")
        assert notify("STOPPING=1")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_an_at_sign_names_an_abstract_socket(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"torchperfd-test-{secrets.token_hex(8)}"
    manager.bind(f"\0{name}")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    assert notify("READY=1")
    assert manager.recv(100) == b"READY=1"


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")


@pytest.mark.parametrize("address", ["", "relative/path", "/no/such/socket", "@", "/" + "x" * 200])
def test_a_manager_that_is_not_there_is_no_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")


def test_a_socket_that_nobody_reads_any_more_is_no_error(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with short_directory() as directory:
        path: Path = directory / "notify"
        manager.bind(str(path))
        manager.close()
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert not notify("READY=1")
