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


@dataclass(frozen=True, slots=True)
class Kept:
    """A capture in the directory; ``protected`` when it is pinned or in progress."""

    capture_id: str
    requested_at: float
    bytes: int
    protected: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """A capture that has to go, and why."""

    capture_id: str
    reason: Reason


def plan(kept: Iterable[Kept], quota: Quota, now: float) -> list[Removal]:
    """Return what to remove, oldest first, and no more than the quota asks for.

    What is protected counts towards the quota like all else, but is never chosen. So afterwards
    the quota holds, unless only protected captures are left.

    Args:
        kept: All captures that there are.
        quota: The limits.
        now: Unix seconds.
    """
    by_age = sorted(kept, key=lambda each: (each.requested_at, each.capture_id))
    count = len(by_age)
    size = sum(each.bytes for each in by_age)
    removals = []
    for each in by_age:
        if each.protected:
            continue
        if quota.age_seconds and now - each.requested_at > quota.age_seconds:
            reason = Reason.AGE
        elif quota.count and count > quota.count:
            reason = Reason.COUNT
        elif quota.bytes and size > quota.bytes:
            reason = Reason.BYTES
        else:
            break
        removals.append(Removal(each.capture_id, reason))
        count -= 1
        size -= each.bytes
    return removals
