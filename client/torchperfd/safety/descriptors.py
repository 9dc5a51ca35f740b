"""Descriptors that must not be closed under our hands: a script may close all that it did not open itself.

gRPC ends the process when one of its descriptors is gone, and uses a core when one is another file. So
``os.closerange``, ``os.close``, ``os.dup2`` and ``socket.close`` are watched while there are any: what uses
them is ended first, and then the script closes or replaces what it likes. Those that are still in use by then
stay open, unless they are replaced. What code in C does is found within a second (:meth:`has_lost_poller`).
"""

import _socket
import errno
import os
import posix
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torchperfd.safety.interrupts import is_from_script

_DIRECTORY: Final = "/proc/self/fd"
_LEFT_TO_SCRIPT: Final = 16
_POLLER: Final = "anon_inode:[eventpoll]"
_POLLED: Final = (_POLLER, "anon_inode:[eventfd]")
"""Targets of the descriptors that gRPC opens besides sockets."""
_CONNECT_BUDGET_S: Final = 0.05
"""How long gRPC may take from opening a socket to connecting it."""
_CONNECT_POLL_S: Final = 0.001
_LEFTOVERS_S: Final = 5.0
"""How long gRPC may keep what it has opened for an earlier connection."""
_EXCLUSIVE_BUDGET_S: Final = 1.0
"""How long a script's call waits for a connection that is being opened, and the other way round."""


def open_descriptors() -> dict[int, str]:
    """Return the target of each descriptor of this process; empty where the platform does not list them."""
    found = {}
    try:
        numbers = os.listdir(_DIRECTORY)  # noqa: PTH208 - pathlib is not worth its import here
    except OSError:
        return {}
    for number in numbers:
        target = target_of(int(number))
        if target:
            found[int(number)] = target
    return found


def are_descriptors_scarce() -> bool:
    """Return whether the script may soon be unable to open a file: then nothing of ours opens one."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        # Kernels before 6.2 do not say how many are open.
        count = os.stat(_DIRECTORY).st_size or len(os.listdir(_DIRECTORY))  # noqa: PTH116, PTH208
    except OSError as error:
        return error.errno == errno.EMFILE
    return limit != resource.RLIM_INFINITY and limit - count < _LEFT_TO_SCRIPT


def target_of(descriptor: int) -> str:
    """Return the file behind a descriptor; empty if it is closed."""
    try:
        return os.readlink(f"{_DIRECTORY}/{descriptor}")  # noqa: PTH115
    except OSError as error:
        if is_from_script(error):
            raise
        return ""


class DescriptorGuard:
    """Knows descriptors of ours, and has them given up before the script closes one.

    Args:
        give_up: Ends all that uses them, as far as that is possible in about a second; called on the thread
            that is about to close one.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._has_given_up = False
        self._guarded: set[int] = set()
        # What gRPC has for the newest session, and its targets.
        self._of_grpc: dict[int, str] = {}
        # While it connects: what was open before, and the names of the sockets that it connects to.
        self._before: Mapping[int, str] | None = None
        self._connected_at = 0.0
        # Pollers that were open before gRPC connected, less those of its earlier connections.
        self._pollers_of_script: set[int] = set()
        self._listeners: set[object] = set()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_opening = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        if not self._replaced:
            close, closerange, dup2 = os.close, os.closerange, os.dup2
            for module in (os, posix):
                self._replace(module, "close", self._watched_close(close))
                self._replace(module, "closerange", self._watched_closerange(closerange))
                self._replace(module, "dup2", self._watched_dup2(dup2))
            close_socket = _socket.close
            for module in (socket, _socket):
                self._replace(module, "close", self._watched_close(close_socket))

    def uninstall(self) -> None:
        self._guarded = set()
        self._of_grpc = {}
        self._before = None
        while self._replaced:
            module, name, original, ours = self._replaced.pop()
            if getattr(module, name) is ours:
                setattr(module, name, original)

    def guard(self, descriptors: Iterable[int]) -> None:
        """Take these for ours, besides those that are."""
        self._guarded = {*self._guarded, *descriptors}

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Keep the script from closing descriptors while some of ours are opened, and are not known yet.

        Without this, a number that the script is about to close may become gRPC's just before.
        """
        self._is_opening = True
        try:
            with self._exclusive():
                yield
        finally:
            self._is_opening = False

    def begin_connecting(self, listener: object) -> None:
        """gRPC is about to connect to a listener of this name: what it opens from now on is ours."""
        self._has_given_up = False
        # What an attempt that no daemon has answered has opened is there for seconds.
        if self._before is None:
            self._before = open_descriptors()
            self._listeners = set()
        self._listeners.add(listener)

    def end_connecting(self) -> None:
        """gRPC has connected: what it opens from now on is not looked for."""
        if self._before is not None:
            of_others = {number for number, target in self._before.items() if target == _POLLER}
            self._pollers_of_script = of_others - self._of_grpc.keys()
            # In this order: has_lost_poller(), on another thread, sees new descriptors once it looks at any.
            self._of_grpc = self.find_grpc()
            self._before = None
            self._connected_at = time.monotonic()

    def has_lost_poller(self) -> bool:
        """Return whether gRPC waits on a descriptor that has been closed or replaced, as code in C can do.

        Those found may be of an earlier connection, and gRPC closes them soon. So in the first seconds
        of a connection all have to be lost, and no other poller may be open that gRPC may have opened since.
        Until the daemon has answered, those found are of the session before, and say nothing.
        """
        if self._before is not None:
            return False
        pollers = [number for number, target in self._of_grpc.items() if target == _POLLER]
        lost = [number for number in pollers if target_of(number) != _POLLER]
        if not self._connected_at:
            return bool(lost)
        may_be_earlier = len(lost) < len(pollers) or self._has_unknown_poller()
        if time.monotonic() > self._connected_at + _LEFTOVERS_S:
            self._connected_at = 0.0
            if may_be_earlier:
                for number in lost:
                    del self._of_grpc[number]
        return bool(lost) and not may_be_earlier

    def _has_unknown_poller(self) -> bool:
        return any(
            target == _POLLER and number not in self._pollers_of_script
            for number, target in open_descriptors().items()
        )

    def find_grpc(self) -> dict[int, str]:
        """Return the descriptors that gRPC has open now, with their targets."""
        return {
            descriptor: target
            for descriptor, target in open_descriptors().items()
            if self._is_of_grpc(descriptor, target)
        }

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # Never for long: an interrupt that comes right here may leave it held.
        is_held = self._lock.acquire(timeout=_EXCLUSIVE_BUDGET_S)
        try:
            yield
        finally:
            if is_held:
                self._lock.release()

    def _replace(self, module: Any, name: str, ours: Any) -> None:
        self._replaced.append((module, name, getattr(module, name), ours))
        setattr(module, name, ours)

    def _is_of_grpc(self, descriptor: int, target: str) -> bool:
        if target and self._of_grpc.get(descriptor) == target:
            return True
        if self._before is None or self._before.get(descriptor) == target:
            return False
        if target.startswith(_POLLED):
            return True
        # The script's own sockets, such as those of a pipe between processes, have other peers.
        return (
            target.startswith("socket:") and self._peer_when_connected(descriptor, target) in self._listeners
        )

    def _peer_when_connected(self, descriptor: int, target: str) -> object:
        """Return the name of a socket's other end; of one that gRPC may be about to connect, wait for it."""
        deadline = time.monotonic() + _CONNECT_BUDGET_S
        while True:
            peer, may_connect = _ends(descriptor)
            if not may_connect or time.monotonic() > deadline or target_of(descriptor) != target:
                return peer
            time.sleep(_CONNECT_POLL_S)

    def _prepare(self, descriptors: Mapping[int, str]) -> list[int]:
        """Give up what is ours of descriptors that the script closes; return those that must stay open."""
        in_use = [number for number, target in descriptors.items() if self._is_of_grpc(number, target)]
        if not self._has_given_up and (in_use or not self._guarded.isdisjoint(descriptors)):
            self._has_given_up = True
            self._guarded = set()
            self._give_up()
        return [number for number in in_use if target_of(number) == descriptors[number]]

    def _is_ordinary(self, descriptor: int) -> bool:
        """Return whether a descriptor is not ours, or this is a forked child, without our threads."""
        may_be_ours = (
            descriptor in self._guarded
            or descriptor in self._of_grpc
            or self._before is not None
            or self._is_opening
        )
        return not may_be_ours or os.getpid() != self._pid

    def _watched_dup2(self, original: Callable[[int, int, bool], int]) -> Callable[[int, int, bool], int]:
        def dup2(fd: int, fd2: int, inheritable: bool = True) -> int:
            if fd != fd2 and not self._is_ordinary(fd2):
                with self._exclusive():
                    self._prepare({fd2: target_of(fd2)})
            return original(fd, fd2, inheritable)

        return dup2

    def _watched_close(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def close(fd: int) -> None:
            if self._is_ordinary(fd):
                original(fd)
                return
            with self._exclusive():
                target = target_of(fd)
                if not target and self._before:
                    # Closed: by the time that it is closed again, gRPC may have got the number.
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                stays_open = self._prepare({fd: target})
                if not target:
                    original(fd)
                    return
            # Other threads do not wait for it: closing a file may take long.
            if not stays_open:
                original(fd)

        return close

    def _watched_closerange(self, original: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def closerange(fd_low: int, fd_high: int, /) -> None:
            if os.getpid() != self._pid:
                original(fd_low, fd_high)
                return
            with self._exclusive():
                found = open_descriptors()
                if not found:
                    original(fd_low, fd_high)
                    return
                within = {number: target for number, target in found.items() if fd_low <= number < fd_high}
                kept = self._prepare(within)
                # One by one, for gRPC may open others meanwhile, on threads of its own.
                for number, target in within.items():
                    now = target_of(number)
                    if number not in kept and (now == target or not self._is_of_grpc(number, now)):
                        original(number, number + 1)

        return closerange


def _ends(descriptor: int) -> tuple[object, bool]:
    """Return the name of a socket's other end, and whether this is a unix socket that may get one soon.

    The name is None where it has none, or this is no socket.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                return connection.getpeername() or None, False
            except OSError as error:
                if is_from_script(error):
                    raise
                return None, connection.family == socket.AF_UNIX and not connection.getsockname()
    except OSError as error:
        if is_from_script(error):
            raise
        return None, False
