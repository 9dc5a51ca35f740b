"""Arrivals: when a rank entered the collectives of each training step."""

from array import array
from dataclasses import dataclass
from typing import Final

_MAX_STEPS: Final = 4096
_COLUMNS: Final = 3
STEP_BYTES: Final = 8 * _COLUMNS
"""Bytes per step."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Training steps that had a collective, as columns of one length.

    Attributes:
        step: The steps' indices.
        first_ns: When the rank entered the step's first collective, Unix time.
        last_ns: When it entered the last one.
    """

    step: "array[int]"
    first_ns: "array[int]"
    last_ns: "array[int]"


class ArrivalRecorder:
    """Records arrivals, step by step, in bounded memory.

    The recorder writes, the flusher drains. Steps written during a drain come after the drained ones.
    """

    __slots__ = ("_finished", "_first", "_held_first", "_held_last", "_last")

    def __init__(self) -> None:
        self._finished = array("q")  # step after step, so that one is there as a whole or not at all
        self._first = self._last = 0
        self._held_first = self._held_last = 0

    @property
    def pending(self) -> bool:
        """Whether the open step, or what is held of it, has come to one."""
        return bool(self._first or self._held_first)

    def arrive(self, unix_ns: int) -> None:
        """The rank enters a collective."""
        self._first = self._first or unix_ns
        self._last = unix_ns

    def close(self, step: int) -> None:
        """The open step is training step number ``step``, and over."""
        self._finish(step, self._first, self._last)
        self.forget()

    def forget(self) -> None:
        """The open step is no training step."""
        self._first = self._last = 0

    def hold(self) -> None:
        """The step may end here."""
        self._held_first, self._held_last = self._first, self._last
        self.forget()

    def rejoin(self) -> None:
        """It did not end where it was held."""
        self._first = self._held_first or self._first
        self._last = self._last or self._held_last
        self._held_first = self._held_last = 0

    def release(self, step: int) -> None:
        """It did, and was training step number ``step``."""
        self._finish(step, self._held_first, self._held_last)
        self.discard()

    def discard(self) -> None:
        """What is held belongs to no step."""
        self._held_first = self._held_last = 0

    def take_in(self, steps: memoryview) -> None:
        """Write steps down that were read elsewhere: of each int64 number, first and last arrival."""
        room = _COLUMNS * _MAX_STEPS - len(self._finished)
        self._finished.frombytes(steps[: 8 * room])

    def drain(self) -> Arrivals:
        """Take what has been written down of finished steps, oldest first."""
        finished = self._finished
        taken = finished[: len(finished)]
        del finished[: len(taken)]
        return Arrivals(*(taken[column::_COLUMNS] for column in range(_COLUMNS)))

    def _finish(self, step: int, first: int, last: int) -> None:
        # Without a drain, the oldest steps are kept.
        if first and len(self._finished) < _COLUMNS * _MAX_STEPS:
            self._finished.extend((step, first, last))
