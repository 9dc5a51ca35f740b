"""The embedded daemon: started only where none answers, and never a reason to fail."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchperfd.launch import additions

# Like the daemon, these live until their stdin is closed, or for as long as others need them.
PATIENT = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
BUSY = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Started(list[tuple[list[str], dict[str, Any]]]):
    """A Popen that remembers what it was asked to start, and starts something harmless."""

    def __call__(self, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        self.append((command, options))
        return subprocess.Popen(PATIENT, stdin=subprocess.PIPE)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()

    class Fake:
        PIPE = subprocess.PIPE
        TimeoutExpired = subprocess.TimeoutExpired
        Popen = started

    monkeypatch.setattr(additions, "subprocess", Fake)
    return started


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="tpd-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("variable", "name"), [("TORCHPERFD_SOCKET", "d.sock"), ("XDG_RUNTIME_DIR", "daemon.sock")]
)
def test_nothing_is_started_where_a_socket_answers(
    variable: str, name: str, started: Started, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket that is named, or that of the user's own daemon where none is."""
    path = directory / "torchperfd" / name
    path.parent.mkdir(exist_ok=True)
    monkeypatch.delenv("TORCHPERFD_SOCKET")
    monkeypatch.setenv(variable, str(path if variable == "TORCHPERFD_SOCKET" else directory))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert additions.start_unless_one_answers() is None
    assert started == []


@pytest.mark.parametrize("left", ["nothing", "a dead socket", "a file"])
def test_one_is_started_where_none_answers(
    started: Started, directory: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    path = directory / "new" / "d.sock"
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(path))
    if left != "nothing":
        path.parent.mkdir()
    if left == "a dead socket":
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
    elif left == "a file":
        path.write_text("not a socket")
    daemon = additions.start_unless_one_answers()
    assert daemon is not None
    ((command, options),) = started
    assert command[1:] == ["-P", "-m", "torchperfd_daemon", "serve", "--embedded", "--socket", str(path)]
    # Ctrl-C is meant for the script, and the script's stdout for the script's words.
    assert options["start_new_session"] is True
    assert options["stdout"].name == options["stderr"].name == str(path.parent / "embedded.log")
    assert daemon.log_path == path.parent / "embedded.log"
    assert daemon.pid > 0
    daemon.leave(20)
    with pytest.raises(ProcessLookupError):
        os.kill(daemon.pid, 0)


def test_the_directory_it_makes_is_this_users_alone(
    started: Started, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHPERFD_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setattr("torchperfd.v1.contract.SYSTEM_SOCKET", str(directory / "no service"))
    daemon = additions.start_unless_one_answers()
    assert daemon is not None
    daemon.leave(20)
    assert (directory / "torchperfd").stat().st_mode & 0o777 == 0o700
    assert started[0][0][-1] == str(directory / "torchperfd/daemon.sock")


def test_where_none_can_be_started_the_log_says_so(
    started: Started, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "file").write_text("in the way")
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(directory / "file" / "d.sock"))
    assert additions.start_unless_one_answers() is None
    assert started == []
    (record,) = caplog.records
    assert record.getMessage().startswith("cannot start a daemon: ")


def test_leaving_a_daemon_that_others_need_does_not_wait_for_it() -> None:
    busy = subprocess.Popen(BUSY, stdin=subprocess.PIPE)
    try:
        additions.EmbeddedDaemon(busy, Path("log")).leave(0.01)
        assert busy.poll() is None
    finally:
        busy.kill()
        busy.wait()


def test_leaving_a_daemon_that_has_died_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""], stdin=subprocess.PIPE)
    gone.wait()
    daemon = additions.EmbeddedDaemon(gone, Path("log"))
    daemon.leave(20)
    daemon.leave(20)
