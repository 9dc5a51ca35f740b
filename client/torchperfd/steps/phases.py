"""The slots of phases, batches of steps in columns, and the ring of recorded steps.

The ring has one row of integers per step, made once and reused. The recorder fills the live row, the flusher
drains those before it. Both sides are plain assignments under the GIL. When the ring is full, new steps are
dropped. The recorder writes to a held step and a clock of the device as well.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Final, Protocol

from torchperfd.v1.contract import MAX_USER_PHASES, PHASES

PHASE_SLOTS: Final = len(PHASES) + MAX_USER_PHASES
DATA: Final = PHASES.index("data")
FORWARD: Final = PHASES.index("forward")
LOSS: Final = PHASES.index("loss")
BACKWARD: Final = PHASES.index("backward")
OPTIMIZER: Final = PHASES.index("optimizer")
ZERO_GRAD: Final = PHASES.index("zero_grad")
COLLECTIVE_WAIT: Final = PHASES.index("collective_wait")
CHECKPOINT: Final = PHASES.index("checkpoint")
OTHER: Final = PHASES.index("other")
AFTER_EVALUATION: Final = PHASE_SLOTS
"""Between two slots: what follows a forward without gradients. Of a training step it is ``other``, of a
validation step ``loss``; a slot of its own until the step ends, and none of the slots of a finished step."""


class PhaseNames:
    """Hands out slots to user phases; past the limit they share ``other``'s."""

    def __init__(self) -> None:
        self._names: list[str] = list(PHASES)
        self._slots: dict[str, int] = {name: slot for slot, name in enumerate(PHASES)}
        self.overflowed: set[str] = set()

    def slot(self, name: str) -> int:
        """Return the slot of ``name``, taking a new one when there is room.

        Raises:
            ValueError: ``name`` is empty, longer than 64 characters, or has control characters.
        """
        slot = self._slots.get(name)
        if slot is not None:
            return slot
        if not name or len(name) > 64 or not name.isprintable():
            raise ValueError(f"a phase name is 1 to 64 printable characters, not {name!r}")
        if len(self._names) >= PHASE_SLOTS:
            if len(self.overflowed) < MAX_USER_PHASES:
                self.overflowed.add(name)
            return self._slots["other"]
        self._names.append(name)
        self._slots[name] = len(self._names) - 1
        return self._slots[name]

    def name(self, slot: int) -> str:
        return self._names[slot]

    def __len__(self) -> int:
        return len(self._names)


TRAIN: Final = 1
VALIDATE: Final = 2


@dataclass(frozen=True, slots=True)
class PhaseColumns:
    """What one phase took in the steps of a batch.

    Attributes:
        ns: Exclusive nanoseconds, by step.
        calls: Calls, by step.
        total_ns: Sum of ``ns``.
        squares: Sum over all calls of squared nanoseconds.
    """

    ns: "memoryview[int]"
    calls: "memoryview[int]"
    total_ns: int
    total_calls: int
    squares: float


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Finished steps, at least one. Columns are of int64. The first training step of all is one of its own.

    Attributes:
        index: Each one's number within its kind, one after the other.
        kind: ``TRAIN`` or ``VALIDATE``, the same for all.
        start: When each began, Unix nanoseconds.
        duration: How long each took, nanoseconds.
        samples: What each trained or validated on.
        phases: By slot, those that occurred.
        total_ns: Sum of ``duration``.
        squares: Sum of squared ``duration``.
        total_samples: Sum of ``samples``.
    """

    index: "memoryview[int]"
    kind: "memoryview[int]"
    start: "memoryview[int]"
    duration: "memoryview[int]"
    samples: "memoryview[int]"
    phases: Mapping[int, PhaseColumns]
    total_ns: int
    squares: float
    total_samples: int

    @property
    def count(self) -> int:
        return len(self.duration)


NO_CUDA_EVENT: Final = -1
"""In place of an event's id where none was recorded."""


class DeviceClock(Protocol):
    """Times the same phases on a device; its methods match those of the recorder."""

    def boundary(self, phase: int, cuda_event_id: int) -> None:
        """Since the last boundary ``phase`` was the innermost; -1 for no step, or for no event id."""

    def call(self, phase: int) -> None:
        """A call of ``phase`` has ended."""

    def close(self, kind: int) -> None:
        """The step has ended; 0 when it is to be forgotten."""

    def pass_over(self, kind: int, count: int) -> None:
        """Steps of this kind have ended of which nothing else is reported."""

    def hold(self) -> None:
        """The step may have ended."""

    def rejoin(self) -> None:
        """It had not."""

    def release(self, kind: int) -> None:
        """It had; 0 when it is to be forgotten."""


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
        return self._rows[self._written % (self.capacity + 1)]

    def advance(self, kind: int, index: int, start: int, duration: int, samples: int) -> list[int]:
        """Keep the live row as a step's; return the next one, or the same, cleared, if the ring is full."""
        row = self._rows[self._written % (self.capacity + 1)]
        if self._written >= self._bound:
            row[:] = ZERO_ROW
            return row
        row[INDEX], row[KIND], row[START], row[DURATION], row[SAMPLES] = index, kind, start, duration, samples
        _complete_row(row)
        self._written = following = self._written + 1
        return self._rows[following % (self.capacity + 1)]

    def insert(self, row: list[int], kind: int, index: int) -> list[int]:
        """Keep a row as a step's, ahead of the live one; return another, or the same if the ring is full."""
        if self._written >= self._bound:
            return row
        row[INDEX], row[KIND] = index, kind
        _complete_row(row)
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
                batches.append(_batch_of(rows[start:stop]))
                start = stop
        for row in rows:
            row[:] = ZERO_ROW
        # Only now may these rows be used again.
        self._read = written
        return batches


def _complete_row(row: list[int]) -> None:
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


def _batch_of(rows: list[list[int]]) -> StepBatch:
    columns = [*zip(*rows, strict=True)]
    duration = columns[DURATION]
    phases = {}
    for slot in range(PHASE_SLOTS):
        calls = columns[CALLS + slot]
        if any(calls):
            ns = columns[NS + slot]
            phases[slot] = PhaseColumns(
                ns=_column_of(ns),
                calls=_column_of(calls),
                total_ns=sum(ns),
                total_calls=sum(calls),
                squares=float(sum(columns[SQUARES + slot])),
            )
    return StepBatch(
        index=_column_of(columns[INDEX]),
        kind=_column_of(columns[KIND]),
        start=_column_of(columns[START]),
        duration=_column_of(duration),
        samples=_column_of(columns[SAMPLES]),
        phases=phases,
        total_ns=sum(duration),
        squares=float(sum(map(mul, duration, duration))),
        total_samples=sum(columns[SAMPLES]),
    )


def split(row: list[int], count: int) -> list[StepBatch]:
    """Return the row of a step that was several as so many steps, alike as far as whole numbers allow.

    Its samples were drawn for the first of them.
    """
    _complete_row(row)
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
        _complete_row(part)
    first = 1 if row[INDEX] == 0 and row[KIND] == TRAIN else count
    return [_batch_of(part) for part in (rows[:first], rows[first:]) if part]


def _share(total: int, number: int, count: int) -> int:
    return total * (number + 1) // count - total * number // count


def _column_of(values: tuple[int, ...]) -> "memoryview[int]":
    return memoryview(array("q", values))


class HeldStep:
    """A row beside the live one.

    Attributes:
        row: What the step had so far, in the columns of :mod:`torchperfd.steps.phases`.
        is_within: Whether the live row still contains it.
    """

    __slots__ = ("_phases", "is_within", "row")

    def __init__(self) -> None:
        self.row = list(ZERO_ROW)
        self.is_within = False
        # What was open at the edge, and its exclusive nanoseconds until then.
        self._phases: list[tuple[int, int]] = []

    def take(
        self, row: list[int], start: int, duration: int, samples: int, phases: list[tuple[int, int]]
    ) -> None:
        """Copy the live row.

        Args:
            start: When the step began, Unix nanoseconds.
            duration: How long it has taken so far, ns.
            samples: What it has trained or validated on so far.
            phases: What is open at the edge, outermost first, with its exclusive nanoseconds so far.
        """
        self.row[:] = row
        self.row[START], self.row[DURATION], self.row[SAMPLES] = start, duration, samples
        self._phases = phases
        self.is_within = True

    def add_to(self, row: list[int]) -> None:
        """Add its phases to a live row that does not contain it."""
        for column in range(NS, len(row)):
            row[column] += self.row[column]

    def take_out(self, row: list[int], exclusive: list[int], open_depth: int) -> None:
        """Take its phases out of the live row that contains it.

        A phase of the script's own around the edge is one call on either side.

        Args:
            exclusive: Exclusive nanoseconds of the open phases, by depth.
            open_depth: Down to which depth the phases that were open at the edge still are.
        """
        self.is_within = False
        held = self.row
        for column in range(NS, len(row)):
            row[column] -= held[column]
        phases = [OTHER, *(phase for phase, _ in self._phases)]
        within = ended = 0
        for depth, (phase, spent) in reversed([*enumerate(self._phases, start=1)]):
            within += spent
            ended += spent
            if depth <= open_depth:
                exclusive[depth] -= ended
                ended = 0
            if phases[depth - 1] == phase:
                continue
            row[NS + phase] -= ended
            held[NS + phase] += within
            held[CALLS + phase] += 1
            held[SQUARES + phase] += within * within
            within = ended = 0
        # A phase of the gap's own name, outermost, is part of the gap.
        row[NS + OTHER] -= ended
        held[NS + OTHER] += within
