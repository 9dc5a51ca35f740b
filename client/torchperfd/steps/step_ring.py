"""The ring of recorded steps: one row of integers per step, made once and reused.

The recorder fills the live row, the flusher drains those before it. Both sides are plain assignments under
the GIL. When the ring is full, new steps are dropped.
"""

from array import array
from operator import mul
from typing import Final

from torchperfd.steps.phases import AFTER_EVALUATION, LOSS, OTHER, PHASE_SLOTS
from torchperfd.steps.step_batch import TRAIN, PhaseColumns, StepBatch

# Columns of a row: a header, then per slot exclusive nanoseconds, calls, and squares of the calls'
# nanoseconds, which outgrow 64 bits.
_SLOTS: Final = PHASE_SLOTS + 1
INDEX, KIND, START, DURATION, SAMPLES, NS = range(6)
CALLS: Final = NS + _SLOTS
SQUARES: Final = CALLS + _SLOTS
ZERO_ROW: Final = (0,) * (SQUARES + _SLOTS)


def slot_after_evaluation(kind: int) -> int:
    """Return the phase of what follows a forward without gradients, in steps of a kind."""
    return OTHER if kind == TRAIN else LOSS


class StepRing:
    """Holds the rows of so many steps, and the live one.

    Args:
        capacity: Steps that may be recorded until they are drained; about 1.5 kB each.
    """

    __slots__ = ("_bound", "_read", "_rows", "_taken", "_written", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Lists, not arrays: adding to an element is three times as fast. The live row is the one that comes
        # next, so nothing is copied when a step ends.
        self._rows = [list(ZERO_ROW) for _ in range(capacity + 1)]
        self._written = 0
        self._read = 0
        # Steps that may be written until the next drain.
        self._bound = capacity
        self._taken: list[StepBatch] = []

    @property
    def live_row(self) -> list[int]:
        """The row of the step that is recorded."""
        return self._rows[self._written % (self.capacity + 1)]

    def advance(self, kind: int, index: int, start: int, duration: int, samples: int) -> list[int]:
        """Keep the live row as a step's; return the next one, or the same, cleared, if the ring is full."""
        row = self._rows[self._written % (self.capacity + 1)]
        if self._written >= self._bound:
            row[:] = ZERO_ROW
            return row
        row[INDEX], row[KIND], row[START], row[DURATION], row[SAMPLES] = index, kind, start, duration, samples
        _complete(row)
        self._written = following = self._written + 1
        return self._rows[following % (self.capacity + 1)]

    def insert(self, row: list[int], kind: int, index: int) -> list[int]:
        """Keep a row as a step's, ahead of the live one; return another, or the same if the ring is full."""
        if self._written >= self._bound:
            return row
        row[INDEX], row[KIND] = index, kind
        _complete(row)
        rows, here = self._rows, self._written % (self.capacity + 1)
        following = (here + 1) % (self.capacity + 1)
        spare, rows[following], rows[here] = rows[following], rows[here], row
        self._written += 1
        return spare

    def append(self, batch: StepBatch) -> None:
        """Add steps that no row was used for, after all that were recorded."""
        self.make_room()
        self._taken.append(batch)

    def make_room(self) -> None:
        """Put aside what was recorded so far, to be drained; under the same lock as that."""
        self._taken += self._take()
        self._bound = self._read + self.capacity

    def drain(self) -> list[StepBatch]:
        """Take the recorded steps, oldest first."""
        self.make_room()
        taken, self._taken = self._taken, []
        return taken

    def _take(self) -> list[StepBatch]:
        read, written = self._read, self._written
        rows = [self._rows[number % (self.capacity + 1)] for number in range(read, written)]
        batches, start = [], 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or not _follows(rows[stop - 1], rows[stop]):
                batches.append(_batch(rows[start:stop]))
                start = stop
        for row in rows:
            row[:] = ZERO_ROW
        # Only now may these rows be used again.
        self._read = written
        return batches


def _complete(row: list[int]) -> None:
    """Assign what no phase has yet, once the kind of the step is known."""
    if row[CALLS + AFTER_EVALUATION]:
        slot = slot_after_evaluation(row[KIND])
        for column in (NS, CALLS, SQUARES):
            row[column + slot] += row[column + AFTER_EVALUATION]
            row[column + AFTER_EVALUATION] = 0
    other = row[NS + OTHER]
    row[CALLS + OTHER] = 1
    row[SQUARES + OTHER] = other * other


def _follows(row: list[int], following: list[int]) -> bool:
    """Return whether two rows belong to one batch."""
    kind, index = row[KIND], row[INDEX]
    if (following[KIND], following[INDEX]) != (kind, index + 1):
        return False
    return index > 0 or kind != TRAIN


def _batch(rows: list[list[int]]) -> StepBatch:
    columns = [*zip(*rows, strict=True)]
    duration = columns[DURATION]
    phases = {}
    for slot in range(PHASE_SLOTS):
        calls = columns[CALLS + slot]
        if any(calls):
            ns = columns[NS + slot]
            phases[slot] = PhaseColumns(
                ns=_column(ns),
                calls=_column(calls),
                total_ns=sum(ns),
                total_calls=sum(calls),
                squares=float(sum(columns[SQUARES + slot])),
            )
    return StepBatch(
        index=_column(columns[INDEX]),
        kind=_column(columns[KIND]),
        start=_column(columns[START]),
        duration=_column(duration),
        samples=_column(columns[SAMPLES]),
        phases=phases,
        total_ns=sum(duration),
        squares=float(sum(map(mul, duration, duration))),
        total_samples=sum(columns[SAMPLES]),
    )


def split(row: list[int], count: int) -> list[StepBatch]:
    """Return the row of a step that was several as so many steps, alike as far as whole numbers allow.

    Its samples were drawn for the first of them.
    """
    _complete(row)
    rows = [list(ZERO_ROW) for _ in range(count)]
    begins = row[START]
    for number, part in enumerate(rows):
        part[INDEX], part[KIND] = row[INDEX] + number, row[KIND]
        for column in range(NS, len(row)):
            part[column] = _share(row[column], number, count)
        part[SAMPLES] = 0 if number else row[SAMPLES]
        part[START] = begins
        part[DURATION] = sum(part[NS:CALLS])
        begins += part[DURATION]
        _complete(part)
    first = 1 if row[INDEX] == 0 and row[KIND] == TRAIN else count
    return [_batch(part) for part in (rows[:first], rows[first:]) if part]


def _share(total: int, number: int, count: int) -> int:
    return total * (number + 1) // count - total * number // count


def _column(values: tuple[int, ...]) -> "memoryview[int]":
    return memoryview(array("q", values))
