"""Descriptors that must not be closed under our hands: a script may close all that it did not open itself.

gRPC ends the process when one of its descriptors is gone. So ``os.closerange`` and ``os.close`` are watched
while there are any: what uses them is ended first, and then the script closes what it likes. Those that are
still in use by then stay open.
"""

import os
import posix
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torchperfd.safety.interrupts import is_from_script

_DIRECTORY: Final = "/proc/self/fd"
GRPC_OPENS: Final = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "socket:")
"""Targets of the descriptors that gRPC opens."""


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


def opened_by_grpc(before: Mapping[int, str]) -> dict[int, str]:
    """Return what gRPC may have opened since ``open_descriptors`` returned ``before``."""
    return {
        descriptor: target
        for descriptor, target in open_descriptors().items()
        if before.get(descriptor) != target and target.startswith(GRPC_OPENS)
    }


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
        give_up: Ends all that uses them, and returns those that are in use even so, with their targets;
            called on the thread that is about to close one.
    """

    def __init__(self, give_up: Callable[[], Mapping[int, str]]) -> None:
        self._give_up = give_up
        self._guarded: set[int] = set()
        self._kept: Mapping[int, str] = {}
        self._before: Mapping[int, str] | None = None
        self._pid = os.getpid()
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Watch from now on."""
        if not self._replaced:
            close, closerange = os.close, os.closerange
            for module in (os, posix):
                self._replace(module, "close", self._watched_close(close))
                self._replace(module, "closerange", self._watched_closerange(closerange))

    def uninstall(self) -> None:
        """Watch no longer."""
        self._guarded = set()
        while self._replaced:
            module, name, original, ours = self._replaced.pop()
            if getattr(module, name) is ours:
                setattr(module, name, original)

    def guard(self, descriptors: Iterable[int]) -> None:
        """Take these for ours, besides those that are."""
        self._guarded = {*self._guarded, *descriptors}

    def release(self, descriptors: Iterable[int]) -> None:
        """These are ours no longer."""
        self._guarded = self._guarded - {*descriptors}

    def guard_opening(self, before: Mapping[int, str] | None) -> None:
        """While gRPC connects, take what it may open besides ``before`` for ours; None: it has connected."""
        self._before = before

    def _replace(self, module: Any, name: str, ours: Any) -> None:
        self._replaced.append((module, name, getattr(module, name), ours))
        setattr(module, name, ours)

    def _is_ours(self, descriptor: int) -> bool:
        if descriptor in self._guarded:
            return True
        before = self._before
        if before is None:
            return False
        target = target_of(descriptor)
        return target.startswith(GRPC_OPENS) and before.get(descriptor) != target

    def _ours_between(self, low: int, high: int) -> bool:
        ours = self._guarded if self._before is None else {*self._guarded, *opened_by_grpc(self._before)}
        return any(low <= descriptor < high and not self._is_kept(descriptor) for descriptor in ours)

    def _let_go(self) -> None:
        self._guarded = set()
        # A forked child has none of the threads that use them.
        self._kept = self._give_up() if os.getpid() == self._pid else {}

    def _is_kept(self, descriptor: int) -> bool:
        return descriptor in self._kept and target_of(descriptor) == self._kept[descriptor]

    def _watched_close(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def close(fd: int) -> None:
            if self._is_ours(fd) and not self._is_kept(fd):
                self._let_go()
            if not self._is_kept(fd):
                original(fd)

        return close

    def _watched_closerange(self, original: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def closerange(fd_low: int, fd_high: int, /) -> None:
            if self._ours_between(fd_low, fd_high):
                self._let_go()
            for descriptor in sorted(self._kept):
                if fd_low <= descriptor < fd_high and self._is_kept(descriptor):
                    original(fd_low, descriptor)
                    fd_low = descriptor + 1
            original(fd_low, fd_high)

        return closerange
