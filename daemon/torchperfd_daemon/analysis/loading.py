"""Reads a trace file into the columns of a `Trace`."""

from collections import Counter
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

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
from torchperfd_daemon.analysis.native_batches import BatchColumns, collectives_of
from torchperfd_daemon.analysis.trace import (
    CollectiveColumns,
    Columns,
    Float64,
    Int32,
    Int64,
    Memory,
    Reading,
    Table,
    Trace,
    doubles,
    identifiers,
    numbers,
)
from torchperfd_daemon.analysis.trace_files import MAX_BYTES, TraceFile
from torchperfd_daemon.analysis.trace_repair import chosen_rows, end_unfinished, host_processes
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.object_store import AnyPath

if TYPE_CHECKING:
    from torchperfd_daemon.analysis._native import Batch

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


def load(path: AnyPath | str, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a Kineto trace, a file or an object, plain or compressed; bad events are skipped and counted.

    A file whose events lack categories is read a second time, with the data from which these are inferred.

    The text is never in memory as a whole; about 60 bytes per event remain.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: The file cannot be read, is no trace, is too big, or holds nothing that ran.
    """
    path = Path(path) if isinstance(path, str) else path
    try:
        found = _read(path, max_bytes, None) or _read(path, max_bytes, Foreign())
    except TorchperfdError as error:
        if error.problem.startswith("it "):
            raise TorchperfdError(f"cannot analyse {path}: {error.problem}", error.remedy) from None
        raise
    if found is None:
        raise TorchperfdError(f"{path} holds no event with a duration", "capture at least one whole step")
    return found


def _read(path: AnyPath, max_bytes: int, foreign: Foreign | None) -> Trace | None:
    """Read a trace; return None where events lack a category, unless ``foreign`` is there to infer it."""
    file = TraceFile(path, max_bytes)
    events = kineto.Events(file.pieces(), foreign=foreign is not None)
    columns = _Columns(foreign)
    for batch in events:
        if isinstance(batch, list):
            columns.add(batch)
        else:
            columns.add_parsed(batch)
        if columns.uncategorised and foreign is None:
            return None
        if columns.rows > _MAX_EVENTS:
            raise TorchperfdError(f"it holds more than {_MAX_EVENTS:,} events", "capture fewer steps")
    if not columns.rows and events.damaged_at is not None:
        raise TorchperfdError(
            f"it is cut off or damaged at byte {events.damaged_at:,} of its text, and has no event with a "
            "duration that can be read",
            "capture again: the export was cut off or the disk was full",
        )
    if not columns.rows:
        raise TorchperfdError("it holds no event with a duration", "capture at least one whole step")
    return columns.trace(str(path), file, events)


def nanoseconds(microseconds: Float64) -> Int64:
    """Convert microseconds below 2^43, written with at most three decimals, to exact ns.

    A double still distinguishes neighbouring nanoseconds there, so each time alone is exact. The whole
    part is set aside because a double cannot hold its product with 1000 as finely; and times are not
    subtracted as doubles, because that adds their errors and is 1 ns off now and then.
    """
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)


class _Columns:
    def __init__(self, foreign: Foreign | None) -> None:
        self.events = 0
        self.skipped = Counter[str]()
        self.uncategorised = False
        self.rows = 0
        self._foreign = foreign
        self._no_args = _NO_ARGS if foreign is None else _NO_FOREIGN_ARGS
        # Absent entries have number 0.
        self._names = Table[str]({"": 0})
        self._written_categories = Table[str]({"": 0} | {name: 1 + at for at, name in enumerate(_WINDOW)})
        self._threads = Table[tuple[int | str, int | str]]()
        self._shapes = Table[bytes]({b"": 0})
        self._types = Table[bytes]({b"": 0})
        self._columns = Columns(Trace)
        self._recorded_until = 0
        self._memory = Columns(Memory)
        self._memory_processes = Table[int | str]()
        self._collectives = CollectiveColumns()
        self._parsed = BatchColumns(
            self._names, self._written_categories, self._threads, self._shapes, self._types
        )

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
        collective = [row for row, each in enumerate(args) if each.collective]
        self._collectives.add([self.rows + row for row in collective], [args[row] for row in collective])
        external = identifiers([each.external_id for each in args], 0)
        if not external.all():
            legacy = identifiers([each.legacy_external_id for each in args], 0)
            external = np.where(external == 0, legacy, external)
        correlation = identifiers([each.correlation for each in args], -1)
        if self._foreign is not None:
            connected = identifiers([each.connection for each in args], -1)
            correlation = np.where(correlation < 0, connected, correlation)
            for row in np.flatnonzero(categories == 0).tolist():
                on_stream = args[row].stream is not None or args[row].task_type is not None
                self._foreign.add(self.rows + row, on_stream=on_stream)
        self.rows += len(complete)
        self._columns.add(
            name=names,
            category=categories,
            thread=numbers(map(self._threads.__getitem__, map(_WHERE, complete))),
            start=start_ns,
            end=start_ns + nanoseconds(durations),
            external=external,
            correlation=correlation,
            shape=numbers(map(self._shapes.__getitem__, map(bytes, [each.dims for each in args]))),
            type=numbers(map(self._types.__getitem__, map(bytes, [each.types for each in args]))),
            sequence=identifiers([each.sequence for each in args], -1),
            backward=[each.forward_thread > 0 for each in args],
            in_group=[each.process_group not in (None, "") for each in args],
            unfinished=[each.finished is False for each in args],
        )

    def add_parsed(self, batch: "Batch") -> None:
        """Append the events of a batch that the C module has parsed."""
        rows, events, untimed, impossible, recorded_until = batch.counts()
        self.events += events - untimed - impossible
        self._skip("no start or duration", untimed)
        self._skip("an impossible time", impossible)
        self._recorded_until = max(self._recorded_until, recorded_until)
        collective, args = collectives_of(batch)
        self._collectives.add([self.rows + row for row in collective], args)
        self._columns.add_bytes(self._parsed.columns(batch))
        self.rows += rows
        if memory := batch.memory():
            self._add_memory(kineto.decode_sound(b"[%b]" % b",".join(memory)))

    def _add_memory(self, instants: list[Any]) -> None:
        times = doubles([event.ts for event in instants])
        sound = (times >= 0) & (times < _LATEST_START_US)
        self._skip("no start or duration", len(instants) - int(sound.sum()))
        self.events -= len(instants) - int(sound.sum())
        instants = [event for event, good in zip(instants, sound.tolist(), strict=True) if good]
        args = [event.args or _NO_ARGS for event in instants]
        self._memory.add(
            time=_exact_nanoseconds(instants, times[sound]),
            allocated=[each.allocated for each in args],
            device_type=[each.device_type for each in args],
            reserved=[each.reserved for each in args],
            process=[self._memory_processes[event.pid] for event in instants],
        )

    def _skip(self, why: str, events: int) -> None:
        if events:
            self.skipped[f"with {why}"] += events

    def trace(self, path: str, file: TraceFile, events: kineto.Events) -> Trace:
        """Return the finished columns, without the recording window, on a clock that starts at zero."""
        columns, threads = self._columns.arrays(), list(self._threads)
        columns["category"], categories = self._kinds(columns)
        kinds, start, end = columns["category"], columns["start"], columns["end"]
        on_device = np.isin(kinds, [number for name, number in categories.items() if name in DEVICE])
        if self._foreign is not None:
            merged, threads = self._foreign.merged(threads)
            columns["thread"] = np.array(merged, np.int32)[columns["thread"]]
            if self._foreign.is_legacy(threads):
                operators = kinds == categories[OPERATOR]
                columns["external"] = pair_by_name(columns["name"], start, operators, on_device)
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
        shortened, endless = trace_repair.shorten(start, end, columns["thread"], on_device)
        self._skip_unreadable(events.skipped)
        said = (*events.header.errors, *events.header.warnings)
        reading = Reading(
            skipped_why=dict(self.skipped),
            damaged_at=events.read if file.broken and events.damaged_at is None else events.damaged_at,
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
        memory = Memory(processes=list(self._memory_processes), **self._memory.arrays())
        memory.time -= origin
        trace = Trace(
            **columns,
            path=path,
            size=file.size,
            events=self.events,
            skipped=self.skipped.total(),
            damaged=reading.damaged_at is not None,
            rank=_plausible(distributed.rank),
            world_size=_plausible(distributed.world_size),
            origin_ns=events.header.base_ns + origin,
            names=list(self._names),
            categories=list(categories),
            threads=threads,
            shapes=[text.decode(errors="replace") for text in self._shapes],
            types=[text.decode(errors="replace") for text in self._types],
            collective_args=self._collectives.columns(),
            memory=memory,
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

    def _kinds(self, columns: dict[str, Any]) -> tuple[Int32, "Table[str]"]:
        """Return each event's category, inferred where the file gives none, and the table of categories."""
        categories = Table[str]()
        renumbered = np.array([categories[category(each)] for each in self._written_categories], np.int32)
        kinds = renumbered[columns["category"]]
        if self._foreign is not None:
            names, threads = list(self._names), list(self._threads)
            for row, on_stream in zip(self._foreign.rows, self._foreign.on_stream, strict=True):
                thread, name = int(columns["thread"][row]), names[columns["name"][row]]
                kinds[row] = categories[
                    self._foreign.category(name, thread, threads[thread], on_stream=on_stream)
                ]
        if categories[KERNEL] in kinds:
            waiting = np.fromiter(map(waits, self._names), np.bool_)[columns["name"]]
            kinds[waiting & (kinds == categories[KERNEL])] = categories[WAIT]
        return kinds, categories


def _exact_nanoseconds(events: list[Any], microseconds: Float64) -> Int64:
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
