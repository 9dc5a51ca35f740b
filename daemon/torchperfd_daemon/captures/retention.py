"""Retention: which captures have to go so that the directory keeps within its quota. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Quota:
    """How much the captures directory may hold; 0 means no limit.

    Attributes:
        bytes: On the disk, all captures together.
        age_seconds: Since a capture was asked for.
        count: How many captures.
        capture_bytes: Of the traces of one capture; each of its ranks has an equal share of it.
        free_bytes: To be left free on the disk; no capture is begun with less.
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
    """Of the disk: it went although it had not been uploaded."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A capture in the directory.

    Attributes:
        capture_id: Which.
        requested_at: Unix seconds.
        bytes: On the disk.
        protected: It is pinned or in progress.
        unconfirmed: It is to be uploaded, and has not been.
    """

    capture_id: str
    requested_at: float
    bytes: int
    protected: bool
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """A capture that has to go, and why."""

    capture_id: str
    reason: Reason


def plan(kept: Iterable[Kept], quota: Quota, now: float, lacking: int = 0) -> list[Removal]:
    """Return what to remove, oldest first, and no more than the quota asks for.

    What is protected counts towards the quota like all else, but is never chosen. So afterwards
    the quota holds, unless only protected captures are left. What is unconfirmed goes last, and only
    as long as the disk lacks room: the quota alone removes none of it.

    Args:
        kept: All captures that there are.
        quota: The limits.
        now: Unix seconds.
        lacking: Bytes that the disk has too few free.
    """
    by_age = sorted(kept, key=lambda each: (each.requested_at, each.capture_id))
    free = [each for each in by_age if not each.protected]
    count = len(by_age)
    size = sum(each.bytes for each in by_age)
    removals = []
    for each in sorted(free, key=lambda each: each.unconfirmed):
        reason = _reason(each, count, size, quota, now)
        if each.unconfirmed:
            if reason is None or lacking <= 0:
                break
            reason = Reason.RESERVE
        if reason is not None:
            removals.append(Removal(each.capture_id, reason))
            count -= 1
            size -= each.bytes
            lacking -= each.bytes
    return removals


def _reason(each: Kept, count: int, size: int, quota: Quota, now: float) -> Reason | None:
    """Return why a capture has to go, of ``count`` with ``size`` bytes in all."""
    if quota.age_seconds and now - each.requested_at > quota.age_seconds:
        return Reason.AGE
    if quota.count and count > quota.count:
        return Reason.COUNT
    if quota.bytes and size > quota.bytes:
        return Reason.BYTES
    return None
