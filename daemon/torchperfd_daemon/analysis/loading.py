"""Reads a trace file into the columns of a `Trace`."""

from array import array
from collections import Counter
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.analysis import decoding, kineto, trace_repair
from torchperfd_daemon.analysis.categories import (
    DEVICE,
    KERNEL,
    OPERATOR,
    WAIT,
    Foreign,
    category,
    pair_by_name,
    waits,
)
from torchperfd_daemon.analysis.trace import (
    CollectiveColumns,
    Int32,
    Int64,
    Memory,
    Reading,
    Table,
    Trace,
    append,
    doubles,
    identifiers,
    numbers,
)
from torchperfd_daemon.analysis.trace_files import MAX_BYTES, TraceFile
from torchperfd_daemon.analysis.trace_repair import chosen_rows, end_unfinished, host_processes
from torchperfd_daemon.errors import TorchperfdError

# The exporter's event for the whole recording window, which is not an activity.
_WINDOW: Final = ("Trace", "trace")
_MEMORY: Final = "[memory]"
# Beyond these a start or an end would leave int64 nanoseconds.
_LATEST_START_US: Final = float(1 << 53)
_MAX_US: Final = float(1 << 43)
# The limit of a trace's memory, at about 70 bytes per event.
_MAX_EVENTS: Final = 1 << 26
_NO_ARGS: Final = decoding.Args()
_NO_FOREIGN_ARGS: Final = decoding.ForeignArgs()
_UNNAMED: Final = "(no name)"
# This much of the exporter's own messages is kept.
_MAX_WARNINGS: Final = 5
_MAX_WARNING: Final = 200
_MAX_RANKS: Final = 1 << 31
# Device events at impossible times are kept under this name, as moments that nothing counts.
_IMPOSSIBLE: Final = "impossible_device_time"
_WHERE: Final = attrgetter("pid", "tid")


def load(path: Path | str, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a Kineto trace, ``.json`` or ``.json.gz``; bad events are skipped and counted.

    A file whose events lack categories is read a second time, with the data from which these are inferred.

    The text is never in memory as a whole; about 60 bytes per event remain.

    Args:
        max_bytes: The most uncompressed bytes to read.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: The file cannot be read, is no trace, is too big, or holds nothing that ran.
    """
    try:
        found = _read(Path(path), max_bytes, None) or _read(Path(path), max_bytes, Foreign())
    except TorchperfdError as error:
        if error.problem.startswith("it "):
            raise TorchperfdError(f"cannot analyse {path}: {error.problem}", error.remedy) from None
        raise
    if found is None:
        raise TorchperfdError(f"{path} holds no event with a duration", "capture at least one whole step")
    return found


def _read(path: Path, max_bytes: int, foreign: Foreign | None) -> Trace | None:
    """Read a trace; return None where events lack a category, unless ``foreign`` is there to infer it."""
    file = TraceFile(path, max_bytes)
    events = kineto.Events(file.pieces(), foreign=foreign is not None)
    columns = _Columns(foreign)
    for batch in events:
        columns.add(batch)
        if columns.uncategorised and foreign is None:
            return None
        if len(columns.start) > _MAX_EVENTS:
            raise TorchperfdError(f"it holds more than {_MAX_EVENTS:,} events", "capture fewer steps")
    if not columns.start:
        raise TorchperfdError("it holds no event with a duration", "capture at least one whole step")
    return columns.trace(str(path), file, events)


def nanoseconds(microseconds: npt.NDArray[np.float64]) -> Int64:
    """Convert microseconds below 2^43, written with at most three decimals, to exact ns.

    A double still distinguishes neighbouring nanoseconds there, so each time alone is exact. The whole
    part is set aside because a double cannot hold its product with 1000 as finely; and times are not
    subtracted as doubles, because that adds their errors and is 1 ns off now and then.
    """
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)


class _Columns:
    """The columns while they grow."""

    def __init__(self, foreign: Foreign | None) -> None:
        self.events = 0
        self.skipped = Counter[str]()
        self.uncategorised = False
        self.start = array("q")
        self._foreign = foreign
        self._no_args = _NO_ARGS if foreign is None else _NO_FOREIGN_ARGS
        # Absent entries have number 0.
        self._names = Table[str]({"": 0})
        self._written_categories = Table[str]({"": 0} | {name: 1 + at for at, name in enumerate(_WINDOW)})
        self._threads = Table[tuple[int | str, int | str]]()
        self._shapes = Table[bytes]({b"": 0})
        self._types = Table[bytes]({b"": 0})
        self._name = array("i")
        self._category = array("i")
        self._thread = array("i")
        self._end = array("q")
        self._external = array("q")
        self._correlation = array("q")
        self._shape = array("i")
        self._type = array("i")
        self._sequence = array("q")
        self._backward = array("b")
        self._in_group = array("b")
        self._unfinished = array("b")
        self._recorded_until = 0
        self._memory_time = array("q")
        self._allocated = array("q")
        self._device_type = array("i")
        self._memory_process = array("i")
        self._memory_processes = Table[int | str]()
        self._collectives = CollectiveColumns()
        self._reserved = array("q")

    def add(self, batch: list[Any]) -> None:
        """Append the complete events of a batch and its events of memory."""
        complete = [event for event in batch if event.ph == "X"]
        if len(complete) < len(batch):
            self.events += len(batch) - len(complete)
            self._add_memory([event for event in batch if event.name == _MEMORY and event.ph == "i"])
            if self._foreign is not None:
                self._foreign.note_metadata([event for event in batch if event.ph == "M"])
        if not complete:
            return
        starts = doubles([event.ts for event in complete])
        durations = doubles([event.dur for event in complete])
        names = numbers(map(self._names.__getitem__, [event.name for event in complete]))
        categories = numbers(map(self._written_categories.__getitem__, [event.cat for event in complete]))
        # An absent time is encoded as a negative number.
        timed = (starts >= 0) & (durations >= 0)
        sound = timed & (starts < _LATEST_START_US) & (durations < _MAX_US)
        self.events += int(sound.sum())
        if not sound.all():
            self._skip("no start or duration", int((~timed).sum()))
            self._skip("an impossible time", int((timed & ~sound).sum()))
        if not names.all():
            names[names == 0] = self._names[_UNNAMED]
        uncategorised = categories == 0
        self.uncategorised |= bool((sound & uncategorised).any())
        wanted = sound & (uncategorised | (categories > len(_WINDOW)))
        if not wanted.all():
            windows = np.flatnonzero(sound & ~wanted)
            ends = _exact_nanoseconds([complete[row] for row in windows.tolist()], starts[windows])
            ends += nanoseconds(durations[windows])
            self._recorded_until = max([self._recorded_until, *ends.tolist()])
            complete = [event for event, good in zip(complete, wanted.tolist(), strict=True) if good]
            starts, durations = starts[wanted], durations[wanted]
            names, categories = names[wanted], categories[wanted]
        start_ns = _exact_nanoseconds(complete, starts)
        args: list[Any] = [event.args or self._no_args for event in complete]
        self._collectives.add(len(self._name), args)
        external = identifiers([each.external_id for each in args], 0)
        if not external.all():
            legacy = identifiers([each.legacy_external_id for each in args], 0)
            external = np.where(external == 0, legacy, external)
        dims = map(bytes, [each.dims for each in args])
        types = map(bytes, [each.types for each in args])
        append(self._name, names)
        append(self._category, categories)
        append(self._thread, numbers(map(self._threads.__getitem__, map(_WHERE, complete))))
        append(self._external, external)
        correlation = identifiers([each.correlation for each in args], -1)
        if self._foreign is not None:
            connected = identifiers([each.connection for each in args], -1)
            correlation = np.where(correlation < 0, connected, correlation)
            for row in np.flatnonzero(categories == 0).tolist():
                on_stream = args[row].stream is not None or args[row].task_type is not None
                self._foreign.add(len(self.start) + row, on_stream=on_stream)
        append(self._correlation, correlation)
        append(self.start, start_ns)
        append(self._end, start_ns + nanoseconds(durations))
        append(self._shape, numbers(map(self._shapes.__getitem__, dims)))
        append(self._type, numbers(map(self._types.__getitem__, types)))
        append(self._sequence, identifiers([each.sequence for each in args], -1))
        self._backward.extend([each.forward_thread > 0 for each in args])
        self._in_group.extend([each.process_group not in (None, "") for each in args])
        self._unfinished.extend([each.finished is False for each in args])

    def _add_memory(self, instants: list[Any]) -> None:
        times = doubles([event.ts for event in instants])
        sound = (times >= 0) & (times < _LATEST_START_US)
        self._skip("no start or duration", len(instants) - int(sound.sum()))
        self.events -= len(instants) - int(sound.sum())
        instants = [event for event, good in zip(instants, sound.tolist(), strict=True) if good]
        args = [event.args or _NO_ARGS for event in instants]
        append(self._memory_time, _exact_nanoseconds(instants, times[sound]))
        append(self._allocated, np.array([each.allocated for each in args], dtype=np.int64))
        append(self._device_type, np.array([each.device_type for each in args], dtype=np.int32))
        self._memory_process.extend([self._memory_processes[event.pid] for event in instants])
        append(self._reserved, np.array([each.reserved for each in args], dtype=np.int64))

    def _skip(self, why: str, events: int) -> None:
        if events:
            self.skipped[f"with {why}"] += events

    def trace(self, path: str, file: TraceFile, events: kineto.Events) -> Trace:
        """Return the finished columns, without the recording window, on a clock that starts at zero."""
        kinds, categories = self._kinds()
        thread, threads = np.frombuffer(self._thread, np.int32), list(self._threads)
        if self._foreign is not None:
            merged, threads = self._foreign.merged(threads)
            thread = np.array(merged, np.int32)[thread]
        start, end = np.frombuffer(self.start, np.int64), np.frombuffer(self._end, np.int64)
        on_device = np.isin(kinds, [number for name, number in categories.items() if name in DEVICE])
        external = np.frombuffer(self._external, np.int64)
        if self._foreign is not None and self._foreign.is_legacy(threads):
            names = np.frombuffer(self._name, np.int32)
            external = pair_by_name(names, start, kinds == categories[OPERATOR], on_device)
        timeless = trace_repair.timeless(start, end)
        if timeless.any():
            self._skip("time 0, long before all others", int(timeless.sum()))
            self.events -= int(timeless.sum())
            # They are removed at the end; until then they are where they move nothing.
            start[timeless] = end[timeless] = start[~timeless].min()
            on_device[timeless] = False
        outliers = trace_repair.far_away(start, end, on_device)
        kinds[outliers.rows] = categories[_IMPOSSIBLE]
        on_device[outliers.rows] = False
        origin = int(np.delete(start, outliers.rows).min() if len(outliers.rows) else start.min())
        start[outliers.rows] = end[outliers.rows] = origin
        start -= origin
        end -= origin
        shortened, endless = trace_repair.shorten(start, end, thread, on_device)
        self._skip_unreadable(events.skipped)
        said = (*events.header.errors, *events.header.warnings)
        reading = Reading(
            skipped_why=dict(self.skipped),
            repaired=events.repaired,
            more_exports=events.more_exports,
            uncategorised=len(self._foreign.rows) if self._foreign else 0,
            warnings=tuple(text[:_MAX_WARNING] for text in said[:_MAX_WARNINGS]),
            far_away=len(outliers.rows),
            shortened=shortened,
            endless=endless,
            clock_apart=outliers.clock_apart,
        )
        distributed = events.header.distributed or decoding.Distributed()
        capture = events.header.capture or decoding.Capture()
        trace = Trace(
            path=path,
            size=file.size,
            events=self.events,
            skipped=self.skipped.total(),
            damaged=file.broken or events.damaged,
            rank=_plausible(distributed.rank),
            world_size=_plausible(distributed.world_size),
            origin_ns=events.header.base_ns + origin,
            names=list(self._names),
            categories=list(categories),
            threads=threads,
            shapes=[text.decode(errors="replace") for text in self._shapes],
            types=[text.decode(errors="replace") for text in self._types],
            name=np.frombuffer(self._name, np.int32),
            category=kinds,
            thread=thread,
            start=start,
            end=end,
            external=external,
            correlation=np.frombuffer(self._correlation, np.int64),
            shape=np.frombuffer(self._shape, np.int32),
            type=np.frombuffer(self._type, np.int32),
            sequence=np.frombuffer(self._sequence, np.int64),
            backward=np.frombuffer(self._backward, np.bool_),
            in_group=np.frombuffer(self._in_group, np.bool_),
            unfinished=np.frombuffer(self._unfinished, np.bool_),
            collective_args=self._collectives.columns(),
            memory=Memory(
                np.frombuffer(self._memory_time, np.int64) - origin,
                np.frombuffer(self._allocated, np.int64),
                np.frombuffer(self._device_type, np.int32),
                np.frombuffer(self._reserved, np.int64),
                np.frombuffer(self._memory_process, np.int32),
                list(self._memory_processes),
            ),
            device_memory=min((each.memory for each in events.header.devices if each.memory > 0), default=0),
            unrecorded_step_ns=max(capture.unrecorded_step_ns, 0),
            reading=reading,
            unrecorded_phase_ns=capture.phases(),
            loader=capture.loader_facts(),
            device_names=tuple(dict.fromkeys(each.name for each in events.header.devices if each.name)),
            device_generation=min((max(each.generation, 0) for each in events.header.devices), default=0),
        )
        if timeless.any():
            trace = chosen_rows(trace, ~timeless)
        trace.processes = host_processes(trace)
        end_unfinished(trace, self._recorded_until - origin if self._recorded_until else None)
        return trace

    def _skip_unreadable(self, events: int) -> None:
        if events:
            self.skipped["that are no event or no JSON"] += events

    def _kinds(self) -> tuple[Int32, "Table[str]"]:
        """Return each event's category, inferred where the file gives none, and the table of categories."""
        categories = Table[str]()
        renumbered = np.array([categories[category(each)] for each in self._written_categories], np.int32)
        kinds = renumbered[np.frombuffer(self._category, np.int32)]
        if self._foreign is not None:
            names, threads = list(self._names), list(self._threads)
            for row, on_stream in zip(self._foreign.rows, self._foreign.on_stream, strict=True):
                thread = self._thread[row]
                kind = self._foreign.category(
                    names[self._name[row]], thread, threads[thread], on_stream=on_stream
                )
                kinds[row] = categories[kind]
        if categories[KERNEL] in kinds:
            waiting = np.fromiter(map(waits, self._names), np.bool_)[np.frombuffer(self._name, np.int32)]
            kinds[waiting & (kinds == categories[KERNEL])] = categories[WAIT]
        return kinds, categories


def _exact_nanoseconds(events: list[Any], microseconds: npt.NDArray[np.float64]) -> Int64:
    """Convert the events' starts, given as doubles too, where those are too coarse from the decimals."""
    coarse = microseconds >= decoding.EXACT_BELOW_US
    if not coarse.any():
        return nanoseconds(microseconds)
    converted = nanoseconds(np.where(coarse, 0.0, microseconds))
    for row in np.flatnonzero(coarse).tolist():
        converted[row] = round(Decimal(events[row].ts) * 1000)
    return converted


def _plausible(rank: int | None) -> int | None:
    return rank if rank is not None and 0 <= rank < _MAX_RANKS else None
