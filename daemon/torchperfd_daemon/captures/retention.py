"""Retention: which captures to remove to stay within the quota, and how a directory tree is deleted.

A tree may be thousands of directories deep. It is deleted with few open descriptors, no recursion and a bound
on the work: directories are moved to its top before they are read, and no path has more than two names.
"""

import contextlib
import itertools
import os
import secrets
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final


@dataclass(frozen=True, slots=True)
class Quota:
    """How much the captures directory may hold; 0 means no limit.

    Attributes:
        bytes: On the disk, all captures together.
        age_seconds: Since a capture was asked for.
        capture_bytes: Of the traces of one capture; each of its ranks has an equal share of it.
        free_bytes: Bytes that must stay free on the disk; no capture begins with less.
    """

    bytes: int = 0
    age_seconds: float = 0.0
    count: int = 0
    capture_bytes: int = 0
    free_bytes: int = 0


class Reason(Enum):
    """The limit of the quota that a capture was removed for."""

    AGE = "age"
    COUNT = "count"
    BYTES = "bytes"
    RESERVE = "reserve"
    """The disk was too full: the capture was removed although it had not been uploaded."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A capture in the directory.

    Attributes:
        capture_id: Which.
        requested_at: Unix seconds.
        bytes: On the disk.
        protected: It is pinned or in progress.
        unconfirmed: Its upload is pending.
        owner: The user whose bytes these are.
    """

    capture_id: str
    requested_at: float
    bytes: int
    protected: bool
    unconfirmed: bool = False
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Removal:
    """A capture to remove, and why."""

    capture_id: str
    reason: Reason


def plan(kept: Iterable[Kept], quota: Quota, now: float, lacking: int = 0) -> list[Removal]:
    """Return what to remove, oldest first, and no more than the quota asks for.

    Protected captures count towards the quota, but are never chosen. So afterwards the quota holds,
    unless only protected captures are left. Unconfirmed captures are removed last, and only while the
    disk lacks space: the quota alone removes none of them.

    Every user has an equal share of the quota, plus what other users leave unused. A capture is removed only
    while its owner exceeds that. So one user's captures, pinned ones too, never displace another user's.

    Args:
        kept: All captures that there are.
        now: Unix seconds.
        lacking: Bytes of free disk space that are missing.
    """
    by_age = sorted(kept, key=lambda each: (each.requested_at, each.capture_id))
    free = [each for each in by_age if not each.protected]
    total = _Usage()
    by_owner: dict[int, _Usage] = defaultdict(_Usage)
    for each in by_age:
        for usage in (total, by_owner[each.owner]):
            usage.add(each)
    share = Quota(
        bytes=_share([usage.bytes for usage in by_owner.values()], quota.bytes),
        count=_share([usage.count for usage in by_owner.values()], quota.count),
    )
    removals = []
    for each in sorted(free, key=lambda each: each.unconfirmed):
        own = by_owner[each.owner]
        reason = _reason(each, total, own, quota, share, now)
        if each.unconfirmed:
            if reason is None or lacking <= 0:
                break
            reason = Reason.RESERVE
        if reason is not None:
            removals.append(Removal(each.capture_id, reason))
            total.subtract(each)
            own.subtract(each)
            lacking -= each.bytes
    return removals


@dataclass(slots=True)
class _Usage:
    """How many captures, and the bytes that they take."""

    count: int = 0
    bytes: int = 0

    def add(self, kept: Kept) -> None:
        self.count += 1
        self.bytes += kept.bytes

    def subtract(self, kept: Kept) -> None:
        self.count -= 1
        self.bytes -= kept.bytes


def _share(uses: list[int], limit: int) -> int:
    """Return the most that each user may hold, so that all together hold no more than ``limit``."""
    left = limit
    for number, use in enumerate(sorted(uses)):
        equal = left // (len(uses) - number)
        if use > equal:
            return equal
        left -= use
    return limit


def _reason(each: Kept, total: _Usage, own: _Usage, quota: Quota, share: Quota, now: float) -> Reason | None:
    """Return why a capture must be removed, given the usage in total and that of its owner."""
    if quota.age_seconds and now - each.requested_at > quota.age_seconds:
        return Reason.AGE
    if quota.count and total.count > quota.count and own.count > share.count:
        return Reason.COUNT
    if quota.bytes and total.bytes > quota.bytes and own.bytes > share.bytes:
        return Reason.BYTES
    return None


_REMOVED: Final = ".removed-"
MAX_ENTRIES: Final = 100_000
"""Entries that one call deletes or moves at most. The next call continues with the rest."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def delete_tree(name: str, parent: int, most: int = MAX_ENTRIES) -> bool:
    """Delete a directory and all in it; return whether all of it is gone.

    Args:
        name: The directory, below ``parent``. A link is not followed.
        parent: Descriptor of the directory that holds it.
        most: Entries to delete or move before giving up for this time.

    Raises:
        OSError: Something in it cannot be deleted. The rest may be gone already.
    """
    top = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        left = most
        while left > 0:
            entries = _entries(top, left)
            if not entries:
                break
            for entry, is_directory in entries:
                left -= _delete_directory(top, entry, left) if is_directory else _delete_file(top, entry)
                if left <= 0:
                    return False
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)
    return True


def discard(name: str, held: int) -> None:
    """Delete a directory in an open one; listings no longer show it at once.

    Raises:
        OSError: It cannot be deleted, and stays.
    """
    # Renamed to a name that no capture has, so that a listing never sees half of it.
    trash = f"{_REMOVED}{secrets.token_hex(8)}"
    os.rename(name, trash, src_dir_fd=held, dst_dir_fd=held)
    try:
        delete_tree(trash, held)
    except FileNotFoundError:
        # The retention worker purged the trash at this moment.
        return
    except OSError:
        with contextlib.suppress(OSError):
            os.rename(trash, name, src_dir_fd=held, dst_dir_fd=held)
        raise


def purge(held: int, trusted: Container[int]) -> None:
    """Delete the remains in an open directory that belong to trusted users, as far as one round allows.

    Raises:
        OSError: Some of them cannot be deleted; the others are gone.
    """
    failed: OSError | None = None
    with os.scandir(held) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(_REMOVED)]
    for name in names:
        if owner_of(name, held) in trusted:
            try:
                delete_tree(name, held)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = error
    if failed is not None:
        raise failed


def owner_of(name: str, parent: int) -> int | None:
    """Return the user that a directory below ``parent`` belongs to; None where there is no such directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
    return None


def _entries(directory: int, most: int) -> list[tuple[str, bool]]:
    with os.scandir(directory) as found:
        # Read before the directory is changed, which may make the kernel skip entries.
        some = itertools.islice(found, most)
        return [(each.name, each.is_dir(follow_symlinks=False)) for each in some]


def _delete_file(directory: int, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return 1


def _delete_directory(top: int, name: str, most: int) -> int:
    """Delete a directory in ``top`` with its files; move directories in it to ``top``.

    Returns:
        How many entries that took, at least 1.
    """
    handled = 1
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=top)
    except (FileNotFoundError, NotADirectoryError):
        return handled
    try:
        for entry, is_directory in _entries(directory, most):
            handled += 1
            if is_directory:
                os.rename(entry, secrets.token_hex(16), src_dir_fd=directory, dst_dir_fd=top)
            else:
                _delete_file(directory, entry)
    finally:
        os.close(directory)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(name, dir_fd=top)
        except OSError:
            # Not empty: it has more entries than one call may handle, or a process adds to it.
            if handled == 1:
                raise
    return handled
