"""Which directories, files and processes are trusted, and which are refused with a remedy."""

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchperfd.v1 import access, contract

OTHER = 61_184
"""A user id that is unused on this machine."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name, and which has this user's runtime directory."""
    path = Path(tempfile.mkdtemp(prefix="tpd-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.delenv(access.SERVICE_USER, raising=False)
    yield path
    shutil.rmtree(path)


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_directory_that_is_missing_is_made_private(directory: Path) -> None:
    os.close(access.open_directory(str(directory / "new" / "torchperfd"), create=True))
    assert stat.S_IMODE((directory / "new" / "torchperfd").stat().st_mode) == 0o700
    with pytest.raises(FileNotFoundError):
        access.open_directory(str(directory / "none"))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_directory_of_the_user_open_to_others_is_refused(directory: Path, mode: int) -> None:
    path = Path(contract.user_runtime_dir())
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(access.UntrustedError, match=r"other users may write to .*; `chmod 700"):
        access.open_directory(str(path), create=True)
    path.chmod(0o755)
    os.close(access.open_directory(str(path), create=True))


def test_directory_that_is_a_link_is_refused(directory: Path) -> None:
    (directory / "real").mkdir()
    (directory / "torchperfd").symlink_to(directory / "real")
    for create in (False, True):
        with pytest.raises(access.UntrustedError, match="is a link; set XDG_RUNTIME_DIR"):
            access.open_directory(contract.user_runtime_dir(), create=create)


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_directory_of_another_user_is_refused(directory: Path, mode: int) -> None:
    path = Path(contract.user_runtime_dir())
    path.mkdir()
    path.chmod(mode)
    os.chown(path, OTHER, OTHER)
    with pytest.raises(access.UntrustedError, match=f"belongs to user {OTHER}; set XDG_RUNTIME_DIR"):
        access.open_directory(str(path), create=True)


@needs_root
def test_directory_below_another_users_is_refused(directory: Path) -> None:
    os.chown(directory, OTHER, OTHER)
    with pytest.raises(access.UntrustedError, match=f"{directory} belongs to user {OTHER}"):
        access.open_directory(contract.user_runtime_dir(), create=True)
    assert not (directory / "torchperfd").exists()


def test_file_below_a_directory_is_opened_without_following(directory: Path) -> None:
    victim = directory / "victim"
    victim.write_text("precious")
    path = directory / "torchperfd"
    held = access.open_directory(str(path), create=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        (path / "link").symlink_to(victim)
        os.link(victim, path / "second name")
        os.mkfifo(path / "pipe")
        (path / "directory").mkdir()
        for name in ("link", "second name", "pipe", "directory"):
            with pytest.raises(access.UntrustedError, match="remove it"):
                access.open_file(held, name, flags)
        os.close(access.open_file(held, "new", flags))
        assert stat.S_IMODE((path / "new").stat().st_mode) == 0o600
        os.close(access.open_file(held, "new", flags))
    finally:
        os.close(held)
    assert victim.read_text() == "precious"


def test_socket_of_this_user_is_trusted(directory: Path) -> None:
    Path(contract.user_runtime_dir()).mkdir()
    path = Path(contract.user_socket())
    with listen(path):
        assert access.find_listener(str(path)).uid == os.geteuid()
    with pytest.raises(ConnectionRefusedError):
        access.find_listener(str(path))
    path.unlink()
    path.write_text("no socket")
    with pytest.raises(FileNotFoundError):
        access.find_listener(str(path))


@needs_root
def test_socket_of_another_user_needs_a_service_user(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "d.sock"
    with listen(path):
        monkeypatch.setattr(access, "peer_uid", lambda _: OTHER)
        with pytest.raises(access.UntrustedError, match=f"user {OTHER} listens at .*{access.SERVICE_USER}"):
            access.find_listener(str(path))
        monkeypatch.setenv(access.SERVICE_USER, "no such user")
        with pytest.raises(access.UntrustedError):
            access.find_listener(str(path))
        monkeypatch.setenv(access.SERVICE_USER, str(OTHER))
        assert access.find_listener(str(path)).uid == OTHER


@needs_root
def test_socket_in_a_directory_that_root_gave_away_is_trusted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd gives ``/run/torchperfd`` to the service's user."""
    path = directory / "run" / "torchperfd" / "daemon.sock"
    monkeypatch.setattr(contract, "SYSTEM_SOCKET", str(path))
    path.parent.mkdir(parents=True)
    os.chown(path.parent, OTHER, OTHER)
    monkeypatch.setattr(access, "peer_uid", lambda _: OTHER)
    with listen(path):
        assert access.find_listener(str(path)).uid == OTHER
        path.parent.chmod(0o777)
        with pytest.raises(access.UntrustedError):
            access.find_listener(str(path))
        path.parent.chmod(0o755)
        path.parent.parent.chmod(0o1777)
        with pytest.raises(access.UntrustedError):
            access.find_listener(str(path))
