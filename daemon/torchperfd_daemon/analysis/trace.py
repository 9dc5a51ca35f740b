"""One trace as columns: what ran where, from when to when, in integer nanoseconds."""

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchperfd_daemon.analysis import kineto, tracefile
from torchperfd_daemon.errors import TorchperfdError

# Names that older exporters gave to categories, in lower case.
_CATEGORY_ALIASES: Final = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
}
# The recording window that the exporter draws around everything: not something that ran.
_WINDOW: Final = "trace"
# Beyond these a start or an end would leave int64 nanoseconds.
_LATEST_START_US: Final = float(1 << 53)
_LONGEST_US: Final = float(1 << 43)


@dataclass(slots=True)
class Trace:
    """The complete (``ph: X``) events of one trace as parallel columns, in file order.

    Attributes:
        path: The file as it was named by the caller.
        size: Bytes on disk.
        events: Sound events of every kind in the file.
        skipped: Events left out because a field was missing, ill-typed or unparsable.
        damaged: The file ended early or its JSON was broken; these are the events that could be read.
        names: What ran.
        categories: Kineto's category (``cpu_op``, ``kernel``, ``user_annotation`` …) in lower case.
        threads: The (process, thread) it ran on.
        starts: Start in ns since the earliest start in the trace.
        ends: End in ns on the same clock.
        externals: Kineto's ``External id``; equal on a kernel and the operator that launched it; 0 for none.
    """

    path: str
    size: int
    events: int = 0
    skipped: int = 0
    damaged: bool = False
    names: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    threads: list[tuple[int | str, int | str]] = field(default_factory=list)
    starts: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    externals: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def duration_ns(self) -> int:
        """From the earliest start to the latest end."""
        return max(self.ends)


def load(path: Path | str, max_bytes: int = tracefile.MAX_BYTES) -> Trace:
    """Read a Kineto trace, ``.json`` or ``.json.gz``; bad events are skipped and counted.

    Args:
        path: The trace file.
        max_bytes: The most uncompressed bytes to hold in memory.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: The file cannot be read, is no trace, is too big, or holds nothing that ran.
    """
    path = Path(path)
    contents = tracefile.read(path, max_bytes)
    try:
        decoded = kineto.decode(contents.data)
    except TorchperfdError as error:
        raise TorchperfdError(f"cannot analyse {path}: {error.problem}", error.remedy) from None
    damaged = contents.broken or decoded.damaged
    trace = Trace(str(path), contents.size, skipped=decoded.skipped, damaged=damaged)
    _fill(trace, decoded.events)
    if not trace.names:
        raise TorchperfdError(f"{path} holds no event with a duration", "capture at least one whole step")
    return trace


def nanoseconds(microseconds: float) -> int:
    """Convert a trace's microseconds, written with at most three decimals, to exact ns.

    A trace counts from a base at most three months back, where a double still tells neighbouring
    nanoseconds apart, so each time is exact by itself. The whole part is set aside because a double
    cannot hold its product with 1000 as finely; and times are not subtracted as doubles, because that
    adds their errors and is 1 ns off now and then. Times since 1970, as older exporters wrote, keep
    what the double kept: a quarter of a microsecond.
    """
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def _fill(trace: Trace, events: list[kineto.Event]) -> None:
    """Append the complete events to the columns and move their clock to zero."""
    shared: dict[str, str] = {}
    categories: dict[str, str] = {}
    threads: dict[tuple[int | str, int | str], tuple[int | str, int | str]] = {}
    starts: list[int] = []
    for event in events:
        if event.ph == "X" and not _is_sound(event):
            trace.skipped += 1
            continue
        trace.events += 1
        if event.ph != "X":
            continue
        category = categories.get(event.cat) or categories.setdefault(event.cat, _category(event.cat))
        if category == _WINDOW:
            continue
        thread = (event.pid, event.tid)
        start = nanoseconds(event.ts)
        trace.names.append(shared.setdefault(event.name, event.name))
        trace.categories.append(category)
        trace.threads.append(threads.setdefault(thread, thread))
        starts.append(start)
        trace.ends.append(start + nanoseconds(event.dur))
        trace.externals.append(_external(event.args))
    origin = min(starts, default=0)
    trace.starts = array("q", (start - origin for start in starts))
    trace.ends = array("q", (end - origin for end in trace.ends))


def _is_sound(event: kineto.Event) -> bool:
    named = event.name != "" and event.cat != ""
    # NaN, which stands for an absent time, fails both comparisons.
    return named and 0 <= event.ts < _LATEST_START_US and 0 <= event.dur < _LONGEST_US


def _category(written: str) -> str:
    lowered = written.lower()
    return _CATEGORY_ALIASES.get(lowered, lowered)


def _external(args: kineto.Args | None) -> int:
    if args is None or args.external_id is None:
        return 0
    try:
        number = int(args.external_id)
    except ValueError:
        return 0
    return number if 0 <= number < 1 << 63 else 0
