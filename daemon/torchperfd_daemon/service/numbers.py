"""Numbers from the wire, kept within what later sums and messages can hold.

A client may send any 64 bits. One number that is out of range must not break a sum, a message or a
page that other ranks share, so each is limited where it enters.
"""

from array import array
from typing import Final

import numpy as np

MAX_COUNT: Final = 2**53
"""Of steps, samples, bytes: what a double still holds exactly."""
MAX_NS: Final = 2**58
"""Nine years; the sum over all phases of a rank still fits 64 bits."""
LAST_UNIX_NS: Final = 2**62
"""In the year 2116."""
MAX_SUM: Final = 2**63 - 1
MAX_QUANTITY: Final = 1e300


def count(value: int) -> int:
    """Return a counter, at most :data:`MAX_COUNT`."""
    return min(value, MAX_COUNT)


def nanoseconds(value: int) -> int:
    """Return a duration, at most :data:`MAX_NS`."""
    return min(value, MAX_NS)


def moment(value: int) -> int:
    """Return a Unix time in nanoseconds, at most :data:`LAST_UNIX_NS`."""
    return min(value, LAST_UNIX_NS)


def total(*values: int) -> int:
    """Return a sum that a 64-bit field of a message can hold."""
    return min(sum(values), MAX_SUM)


def quantity(value: float, most: float = MAX_QUANTITY) -> float:
    """Return a quantity from 0 to ``most``; 0 for what is none (negative, NaN)."""
    return min(value, most) if value >= 0 else 0.0


def within(columns: "list[array[int]]", most: int) -> "list[array[int]]":
    """Return columns of int64 with every value from 0 to ``most``; the same ones where all are already."""
    blob = b"".join(map(memoryview, columns))
    # As unsigned numbers those below 0 are the largest, so that one pass over the columns is enough.
    if not blob or int(np.frombuffer(blob, np.uint64).max()) <= most:
        return columns
    return [array("q", np.clip(np.asarray(column), 0, most).tobytes()) for column in columns]
