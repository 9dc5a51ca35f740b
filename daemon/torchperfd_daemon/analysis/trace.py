"""One trace as columns: name, place, start and end of each event, in integer nanoseconds.

`Trace` has the finished columns; `Table` and `Columns` are for reading a file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon.analysis.decoding import Args

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Memory:
    """The allocations (positive) and frees (negative) of one trace, as parallel columns in file order.

    Attributes:
        device_type: torch's number for the kind of device; 0 is the host.
        reserved: Bytes that the allocator of that device then reserved; 0 if unknown.
    """

    time: Int64
    allocated: Int64
    device_type: Int32
    reserved: Int64
    process: Int32
    processes: list[int | str]


@dataclass(slots=True)
class CollectiveArgs:
    """The arguments of events that describe a collective, as parallel columns in file order.

    Attributes:
        words: Table of names, groups, lists of ranks and element types; the first is empty.
        name: The collective (``allreduce``, ``_allgather_base`` …), an index into ``words``.
        elements: Of the input or the output, whichever has more; -1 if the file does not contain them.
        sequence: The group's own count of its collectives, equal on all ranks; -1 for none.
    """

    words: list[str]
    row: Int64
    name: Int32
    group: Int32
    ranks: Int32
    dtype: Int32
    elements: Int64
    sequence: Int64


@dataclass(slots=True)
class Reading:
    """The damage of a file and the exporter's messages, in addition to those in `Trace`.

    Attributes:
        skipped_why: How many events were left out for which reason; together they are ``Trace.skipped``.
        damaged_at: The byte of the uncompressed text at which the file is first broken, or where it ends too
            early; None for a whole one.
        repaired: Events that were kept without fields that could not be read.
        more_exports: The file contains another trace after this one, which is not read.
        warnings: The exporter's own messages in the file, such as lost records.
        far_away: Device events left out since they start far outside the recording.
        shortened: Device events that outlasted the recording in the file; they end with the start of the
            next event of their stream.
        endless: Device events that last longer than all else in the file, and were kept.
        clock_apart: Most device events start far outside the host's recording, and were kept.
    """

    skipped_why: dict[str, int] = field(default_factory=dict)
    damaged_at: int | None = None
    repaired: int = 0
    more_exports: bool = False
    uncategorised: int = 0
    warnings: tuple[str, ...] = ()
    far_away: int = 0
    shortened: int = 0
    endless: int = 0
    clock_apart: bool = False

    @property
    def has_impossible_times(self) -> bool:
        """Whether any device time in the file cannot be true."""
        return bool(self.far_away or self.shortened or self.endless or self.clock_apart)


@dataclass(slots=True)
class Trace:
    """The complete (``ph: X``) events of one trace as parallel columns, in file order; times in ns.

    Attributes:
        events: Sound events of every kind in the file.
        skipped: Events left out because a field was missing, ill-typed or unparsable.
        damaged: The file ended early or its JSON was broken; these are the events that could be read.
        rank: The rank in the file; None if the file does not contain it.
        origin_ns: The earliest start, from which all times count, in ns since 1970; on the trace's own
            clock if the file does not contain that clock's origin.
        categories: Table of Kineto's categories (``cpu_op``, ``kernel``, ``user_annotation`` …), lower case.
        threads: Table of (process, thread).
        shapes: Table of ``Input Dims``, as JSON text; the first is empty, for events without.
        types: Table of ``Input type``, as JSON text; the first is empty, for events without.
        end: End in ns on the same clock; of what is unfinished, as `end_unfinished` has it.
        external: Kineto's ``External id``; equal on a kernel and the operator that launched it; 0 for none.
        correlation: Equal on a kernel and the runtime call that launched it; -1 for none.
        sequence: Autograd's number, equal on an operator and its backward; -1 for none.
        in_group: Its arguments name a process group.
        unfinished: It was never closed, or not before the recording was stopped.
        memory: The allocations and frees; empty unless ``profile_memory`` was on.
        device_memory: Bytes of the smallest accelerator on record; 0 if the file does not contain them.
        unrecorded_step_ns: The step time before the recording; 0 if the file does not contain it.
        process: The one of them that these events are of; None for all.
        loader: How the process used its loader; None if the file does not contain it.
        device_generation: The first number of the oldest accelerator's CUDA compute capability; 0 if unknown.
    """

    path: str
    size: int
    events: int
    skipped: int
    damaged: bool
    rank: int | None
    world_size: int | None
    origin_ns: int
    names: list[str]
    categories: list[str]
    threads: list[tuple[int | str, int | str]]
    shapes: list[str]
    types: list[str]
    name: Int32
    category: Int32
    thread: Int32
    start: Int64
    end: Int64
    external: Int64
    correlation: Int64
    shape: Int32
    type: Int32
    sequence: Int64
    backward: Flags
    in_group: Flags
    unfinished: Flags
    memory: Memory
    collective_args: CollectiveArgs
    device_memory: int
    unrecorded_step_ns: int
    reading: Reading = field(default_factory=Reading)
    processes: list[int | str] = field(default_factory=list)
    process: int | str | None = None
    unrecorded_phase_ns: dict[str, float] = field(default_factory=dict)
    loader: LoaderFacts | None = None
    device_generation: int = 0
    device_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.name)

    @property
    def duration_ns(self) -> int:
        """From the earliest start to the latest end."""
        return int(self.end.max())

    def of_names(self, wanted: Callable[[str], object]) -> Flags:
        """Return which events have a wanted name."""
        # To take from a table is twice as fast as to index it.
        found: Flags = np.fromiter(map(bool, map(wanted, self.names)), np.bool_).take(self.name)
        return found

    def of_categories(self, wanted: Iterable[str]) -> Flags:
        """Return which events are of one of the categories."""
        wanted = frozenset(wanted)
        found: Flags = np.zeros(len(self), dtype=np.bool_)
        # Few categories are wanted, and comparing is far cheaper than looking each event's up.
        for number, category in enumerate(self.categories):
            if category in wanted:
                found |= self.category == number
        return found

    def distinct(self, *rows: Int64) -> Int64:
        """Return all rows in order, each once; faster than sorting them."""
        found = np.zeros(len(self), dtype=np.bool_)
        for each in rows:
            found[each] = True
        return np.flatnonzero(found)

    def busiest_thread(self, rows: Int64) -> int:
        """Return the thread that has most of the rows, an index into ``threads``; -1 without rows."""
        return int(np.bincount(self.thread[rows]).argmax()) if len(rows) else -1

    def are_named(self, rows: Int64, wanted: Callable[[str], object]) -> Flags:
        """Return which of the rows' events have a wanted name; each name in use is tested once."""
        names = self.name[rows]
        lookup = np.zeros(len(self.names), dtype=np.bool_)
        lookup[names] = True
        for name in np.flatnonzero(lookup).tolist():
            lookup[name] = bool(wanted(self.names[name]))
        found: Flags = lookup.take(names)
        return found

    def named(self, rows: Int64, wanted: Callable[[str], object]) -> Int64:
        return rows[self.are_named(rows, wanted)]


_Key = TypeVar("_Key")


class Table(dict[_Key, int], Generic[_Key]):
    """Numbers things in order of first sight."""

    def __missing__(self, key: _Key) -> int:
        self[key] = number = len(self)
        return number


# A table of so many entries for each value is still smaller than what sorting needs.
_FEW_FOR_EACH: Final = 2
_DTYPES: Final[dict[Any, Any]] = {Int64: np.int64, Int32: np.int32, Flags: np.bool_}


class Columns:
    """The columns of a table while it is read."""

    def __init__(self, table: type[Any]) -> None:
        self._dtypes = {each.name: _DTYPES[each.type] for each in fields(table) if each.type in _DTYPES}
        self._bytes = {name: bytearray() for name in self._dtypes}

    def add(self, **values: Any) -> None:
        for name, dtype in self._dtypes.items():
            self._bytes[name] += np.asarray(values[name], dtype).tobytes()

    def add_bytes(self, values: Mapping[str, bytes]) -> None:
        """Append values to each column that are encoded as in memory."""
        for name, column in self._bytes.items():
            column += values[name]

    def arrays(self) -> dict[str, Any]:
        """Return the finished columns, which may be changed in place."""
        return {name: np.frombuffer(self._bytes[name], dtype) for name, dtype in self._dtypes.items()}


class CollectiveColumns:
    """The arguments of collectives while they are gathered, separate since few events have any."""

    def __init__(self) -> None:
        self._words = Table[str]({"": 0})
        self._columns = Columns(CollectiveArgs)

    def add(self, rows: list[int], those: list[Args]) -> None:
        """Append the arguments of some rows, all of collectives."""
        if not rows:
            return
        ranks = [bytes(each.group_ranks).decode(errors="replace").strip('"') for each in those]
        received = identifiers([each.output_elements for each in those], -1)
        sent = identifiers([each.input_elements for each in those], -1)
        self._columns.add(
            row=rows,
            name=self._numbers([each.collective for each in those]),
            group=self._numbers([each.process_group for each in those]),
            ranks=self._numbers(ranks),
            dtype=self._numbers([each.dtype for each in those]),
            elements=np.maximum(received, sent),
            sequence=identifiers([each.group_sequence for each in those], -1),
        )

    def _numbers(self, words: Iterable[int | str | None]) -> list[int]:
        return [self._words["" if word is None else str(word)] for word in words]

    def columns(self) -> CollectiveArgs:
        return CollectiveArgs(words=list(self._words), **self._columns.arrays())


def distinct(values: Int64) -> tuple[Int64, Int64]:
    """Return ``np.unique(values, return_inverse=True)`` of numbers from 0 on, without sorting small ones."""
    most = int(values.max(initial=-1)) + 1
    if most > _FEW_FOR_EACH * len(values):
        numbers, inverse = np.unique(values, return_inverse=True)
        return numbers, inverse
    is_used = np.zeros(most, dtype=np.bool_)
    is_used[values] = True
    numbers = np.flatnonzero(is_used)
    place = np.empty(most, dtype=np.int64)
    place[numbers] = np.arange(len(numbers))
    return numbers, place[values]


def doubles(values: Iterable[float | Decimal]) -> Float64:
    return np.fromiter(values, np.float64)


def numbers(values: Iterable[int]) -> Int32:
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
