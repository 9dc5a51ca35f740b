"""Columns while they grow: tables that number their entries, and the arguments of collectives."""

from array import array
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.analysis.event_types import Args
from torchperfd_daemon.analysis.trace import CollectiveArgs, Int32, Int64

_Key = TypeVar("_Key")


class Table(dict[_Key, int], Generic[_Key]):
    """Numbers things in order of first sight."""

    def __missing__(self, key: _Key) -> int:
        self[key] = number = len(self)
        return number


class CollectiveColumns:
    """The arguments of collectives while they are gathered, separate since few events have any."""

    def __init__(self) -> None:
        self._words = Table[str]({"": 0})
        self._row = array("q")
        self._name = array("i")
        self._group = array("i")
        self._ranks = array("i")
        self._dtype = array("i")
        self._elements = array("q")
        self._sequence = array("q")

    def add(self, first_row: int, args: list[Args]) -> None:
        """Append the arguments of a batch, whose first event has row ``first_row``."""
        rows = [row for row, each in enumerate(args) if each.collective]
        if not rows:
            return
        those = [args[row] for row in rows]
        self._row.extend([first_row + row for row in rows])
        self._name.extend([self._words[str(each.collective)] for each in those])
        self._group.extend([self._words[_word(each.process_group)] for each in those])
        ranks = [bytes(each.group_ranks).decode(errors="replace").strip('"') for each in those]
        self._ranks.extend([self._words[text] for text in ranks])
        self._dtype.extend([self._words[_word(each.dtype)] for each in those])
        received = identifiers([each.output_elements for each in those], -1)
        sent = identifiers([each.input_elements for each in those], -1)
        append(self._elements, np.maximum(received, sent))
        append(self._sequence, identifiers([each.group_sequence for each in those], -1))

    def columns(self) -> CollectiveArgs:
        """Return the finished columns."""
        return CollectiveArgs(
            words=list(self._words),
            row=np.frombuffer(self._row, np.int64),
            name=np.frombuffer(self._name, np.int32),
            group=np.frombuffer(self._group, np.int32),
            ranks=np.frombuffer(self._ranks, np.int32),
            dtype=np.frombuffer(self._dtype, np.int32),
            elements=np.frombuffer(self._elements, np.int64),
            sequence=np.frombuffer(self._sequence, np.int64),
        )


def _word(value: int | str | None) -> str:
    return "" if value is None else str(value)


def doubles(values: Iterable[float | Decimal]) -> npt.NDArray[np.float64]:
    """Return a column of doubles."""
    return np.fromiter(values, np.float64)


def numbers(values: Iterable[int]) -> Int32:
    """Return a column of numbers in a table."""
    return np.fromiter(values, np.int32)


def identifiers(values: list[int | str | None], none: int) -> Int64:
    """Return numbers, also if a trace writes them as strings; ``none`` for anything else."""
    try:
        found = np.fromiter(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        found = np.fromiter((_identifier(value, none) for value in values), np.int64)
    return np.where(found < 0, none, found)


def _identifier(value: int | str | None, none: int) -> int:
    try:
        number = none if value is None else int(value)
    except ValueError:
        return none
    return number if abs(number) < 1 << 63 else none


def append(column: "array[int]", values: npt.NDArray[np.integer[Any]]) -> None:
    """Append values, which must have the column's own type."""
    column.frombytes(values.tobytes())
