"""What gRPC opens while the script closes descriptors, on threads of its own, stays open."""

import ctypes
import errno
import fcntl
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchperfd.safety.descriptors import DescriptorGuard, target_of

_Guarding = Callable[[Callable[[], None]], DescriptorGuard]

_close = os.close
_RANGE = (700, 764)
"""Numbers that nothing else of the test's process has."""


def _open(descriptor: int) -> int:
    """Move a descriptor into the range."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _RANGE[0])
    _close(descriptor)
    return moved


def _open_of_script() -> int:
    return _open(os.open(os.devnull, os.O_RDONLY))


class _Grpc:
    """Opens what gRPC opens, when a test calls for it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(8)
        self.opened: list[int] = []
        self._thread: threading.Thread | None = None

    def open_event(self) -> None:
        self.opened.append(_open(os.eventfd(0)))

    def open_poller(self) -> int:
        # select.epoll closes its own when it is collected.
        with select.epoll() as poller:
            self.opened.append(fcntl.fcntl(poller.fileno(), fcntl.F_DUPFD_CLOEXEC, _RANGE[0]))
        return self.opened[-1]

    def open_socket(self) -> None:
        """Open one now; it is connected a little later."""
        connection = socket.socket(socket.AF_UNIX)
        self.opened.append(connection.detach())
        self._thread = threading.Thread(target=self._connect, args=(self.opened[-1],))
        self._thread.start()

    def _connect(self, descriptor: int) -> None:
        time.sleep(0.01)
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.connect(self.path)

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.listener.close()
        for descriptor in self.opened:
            if target_of(descriptor):
                os.close(descriptor)


@pytest.fixture
def grpc(tmp_path: Path) -> Iterator[_Grpc]:
    made = _Grpc(tmp_path / "socket")
    yield made
    made.end()


@pytest.fixture
def guarding(grpc: _Grpc) -> Iterator[_Guarding]:
    guards: list[DescriptorGuard] = []

    def begin(give_up: Callable[[], None]) -> DescriptorGuard:
        guard = DescriptorGuard(give_up)
        guard.install()
        guards.append(guard)
        guard.begin_connecting(grpc.path)
        return guard

    yield begin
    for guard in guards:
        guard.uninstall()


def test_what_grpc_opens_during_a_close_stays_open(grpc: _Grpc, guarding: _Guarding) -> None:
    guarding(grpc.open_event)
    grpc.open_event()
    scripts = _open_of_script()
    os.closerange(*_RANGE)
    assert len(grpc.opened) == 2
    assert [target_of(each) for each in grpc.opened] == ["anon_inode:[eventfd]"] * 2
    assert not target_of(scripts)


def test_number_that_grpc_has_got_meanwhile_stays_open(grpc: _Grpc, guarding: _Guarding) -> None:
    """The script's other threads close one in between, and gRPC opens one of the same number."""
    scripts = _open_of_script()
    grpcs = _open(os.eventfd(0))

    def give_up() -> None:
        os.dup2(grpcs, scripts)

    guarding(give_up)
    grpc.open_event()
    grpc.opened += [grpcs, scripts]
    os.closerange(*_RANGE)
    assert target_of(scripts) == "anon_inode:[eventfd]"


def test_close_waits_while_a_connection_is_opened(grpc: _Grpc, guarding: _Guarding) -> None:
    """A number that only the thread of the stream has had becomes gRPC's."""
    guard, began, found = guarding(lambda: None), threading.Event(), []

    def connect() -> None:
        with guard.opening():
            probe = _open_of_script()
            began.set()
            time.sleep(0.05)
            found.append((probe, target_of(probe)))
            _close(probe)
            grpc.open_event()

    thread = threading.Thread(target=connect)
    thread.start()
    assert began.wait(10)
    os.closerange(*_RANGE)
    thread.join()
    assert found == [(grpc.opened[0], os.devnull)]
    assert target_of(grpc.opened[0]) == "anon_inode:[eventfd]"


def test_socket_that_grpc_is_about_to_connect_stays_open(grpc: _Grpc, guarding: _Guarding) -> None:
    guarding(lambda: None)
    grpc.open_socket()
    os.close(grpc.opened[0])
    assert target_of(grpc.opened[0]).startswith("socket:")


def test_scripts_own_unconnected_socket_is_closed(guarding: _Guarding) -> None:
    guarding(lambda: None)
    scripts = socket.socket(socket.AF_UNIX).detach()
    os.close(scripts)
    assert not target_of(scripts)


def test_close_of_a_closed_descriptor_fails_as_ever(guarding: _Guarding) -> None:
    guarding(lambda: None)
    scripts = _open_of_script()
    os.close(scripts)
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        os.close(scripts)
    assert raised.value.errno == errno.EBADF


def test_dup2_over_a_descriptor_of_grpc_ends_its_use_first(grpc: _Grpc, guarding: _Guarding) -> None:
    seen = []
    guarding(lambda: seen.append(target_of(grpc.opened[0])))
    grpc.open_event()
    scripts = _open_of_script()
    assert os.dup2(scripts, grpc.opened[0]) == grpc.opened[0]
    assert seen == ["anon_inode:[eventfd]"]
    assert target_of(grpc.opened[0]) == os.devnull
    os.close(scripts)


@pytest.mark.parametrize("inheritable", [True, False])
def test_dup2_over_the_scripts_own_is_as_ever(guarding: _Guarding, inheritable: bool) -> None:
    given_up: list[int] = []
    guard = guarding(lambda: given_up.append(1))
    guard.end_connecting()
    first, second = _open_of_script(), _open_of_script()
    assert os.dup2(fd=first, fd2=second, inheritable=inheritable) == second
    assert os.get_inheritable(second) is inheritable
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.dup2(_RANGE[1], second)
    assert given_up == []
    for each in (first, second):
        os.close(each)


def test_socket_close_of_a_descriptor_of_grpc_is_watched(grpc: _Grpc, guarding: _Guarding) -> None:
    given_up: list[int] = []
    guarding(lambda: given_up.append(1))
    grpc.open_event()
    socket.close(grpc.opened[0])
    assert given_up == [1]


def _replace_unseen(descriptor: int) -> None:
    """Put /dev/null in a descriptor's place as code in C does."""
    null = os.open(os.devnull, os.O_RDONLY)
    ctypes.CDLL(None).dup2(null, descriptor)
    _close(null)


_LOSE: dict[str, Callable[[int], None]] = {"close": _close, "replace": _replace_unseen}


@pytest.mark.parametrize(
    "events",
    [
        "open a; open b; connected; kept; later; kept; close b; a is open; lost",
        "open a; open b; connected; kept; later; kept; replace b; a is open; lost",
        # A poller of an earlier connection may be closed.
        "open a; open b; connected; close a; kept; later; kept; kept; close b; lost",
        # All that are lost at once are noticed at once.
        "open a; open b; connected; replace a; replace b; lost",
        # A restarted daemon: gRPC closes what was found, and its new poller came after the look.
        "open a; connected; open b; close a; kept; later; kept; close b; kept",
        # A restarted daemon: until it answers, only what the session before it had is known.
        "open a; connected; later; kept; close a; begin; kept; open b; kept; connected; kept; close b; lost",
    ],
)
def test_pollers_lost_to_native_code_are_noticed(
    events: str, grpc: _Grpc, guarding: _Guarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    guard = guarding(lambda: None)
    pollers: dict[str, int] = {}
    for event in events.split("; "):
        match event.split():
            case ["open", name]:
                pollers[name] = grpc.open_poller()
            case ["connected"]:
                guard.end_connecting()
            case ["begin"]:
                guard.begin_connecting(None)
            case ["later"]:
                now += 6
            case ["close" | "replace" as how, name]:
                _LOSE[how](pollers[name])
            case [name, "is", "open"]:
                assert target_of(pollers[name]) == "anon_inode:[eventpoll]"
            case [answer]:
                assert guard.has_lost_poller() == {"lost": True, "kept": False}[answer], event
