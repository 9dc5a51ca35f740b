"""The events of a Kineto Chrome trace, decoded batch by batch, as far as each of them is sound.

The format is the one that ``torch.profiler`` exports: a JSON object whose ``traceEvents`` are
Chrome trace events, times in microseconds. A trace is decoded while it is read, so that memory
holds one batch of it, never the whole text. Batches end where events begin, as far as a regular
expression can tell; where that guess, or the JSON, is wrong, an exact tokenizer goes over the batch
event by event. Real files break (unescaped quotes, cut ends, fields of another type), so one bad
event costs itself and never the file.
"""

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Annotated, Any, Final

import msgspec

from torchperfd_daemon.errors import TorchperfdError

# A start below this many µs, written with three decimals, is exact to the ns as a double.
EXACT_BELOW_US: Final = float(1 << 43)
NOTHING: Final = msgspec.Raw(b"")


_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Args(msgspec.Struct, gc=False):
    """The arguments the analyser reads; lists of the inputs stay JSON text, `NOTHING` when absent."""

    external_id: int | str | None = msgspec.field(name="External id", default=0)
    legacy_external_id: int | str | None = msgspec.field(name="external id", default=0)
    correlation: int | str | None = -1
    process_group: int | str | None = msgspec.field(name="Process Group Name", default=None)
    collective: int | str | None = msgspec.field(name="Collective name", default=None)
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=NOTHING)
    input_elements: int | str | None = msgspec.field(name="In msg nelems", default=-1)
    output_elements: int | str | None = msgspec.field(name="Out msg nelems", default=-1)
    dtype: int | str | None = None
    group_sequence: int | str | None = msgspec.field(name="Seq", default=-1)
    sequence: int | None = msgspec.field(name="Sequence number", default=-1)
    finished: bool | int | str | None = True
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NOTHING)
    types: msgspec.Raw = msgspec.field(name="Input type", default=NOTHING)
    allocated: _Int64 = msgspec.field(name="Bytes", default=0)
    device_type: _Int32 = msgspec.field(name="Device Type", default=0)
    reserved: _Int64 = msgspec.field(name="Total Reserved", default=0)


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` in microseconds, negative when absent."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = -1.0
    dur: float = -1.0
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """An event of a clock that a double is too coarse for, or that writes numbers as strings."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Decimal = Decimal(-1)
    dur: float = -1.0
    args: Args | None = None


AnyEvent = Event | ExactEvent


class Distributed(msgspec.Struct):
    """Who wrote the trace, in a distributed run."""

    rank: int | None = None
    world_size: int | None = None


class Device(msgspec.Struct):
    """What is known of one accelerator: its whole memory in bytes, 0 when the trace does not say."""

    memory: int = msgspec.field(name="totalGlobalMem", default=0)


class Capture(msgspec.Struct):
    """What torchperfd's client knew when it captured the trace."""

    unrecorded_step_ns: int = 0


class Header(msgspec.Struct):
    """What stands around the events.

    Attributes:
        base_ns: What all times are counted from, in ns since 1970; 0 when they are absolute.
        distributed: Rank and world size; None for a run of one process.
        devices: The accelerators of the machine.
        capture: What the client wrote into it; None for a trace of another origin.
    """

    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[Device] = msgspec.field(name="deviceProperties", default_factory=list)
    capture: Capture | None = msgspec.field(name="torchperfd", default=None)


_EVENTS: Final = msgspec.json.Decoder(list[Event])
_EXACT_EVENTS: Final = msgspec.json.Decoder(list[ExactEvent], strict=False)
_EVENT: Final = msgspec.json.Decoder(Event)
_EXACT_EVENT: Final = msgspec.json.Decoder(ExactEvent, strict=False)
_HEADER: Final = msgspec.json.Decoder(Header)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The exact tokenizer reads latin-1, in which every byte is one character, so that its positions are bytes.
_TOKENIZER: Final = json.JSONDecoder(strict=False)

_FIRST_EVENT: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
# An event's object follows "," and another object, or opens the list. A well-formed string never
# matches: a quote within it is escaped, and after its closing quote comes no word.
_BEFORE_EVENT: Final = re.compile(rb'[\[,](?=\s*\{\s*"\w)')
_BETWEEN: Final = re.compile(r"[\s,]*")
# Where a batch may end is looked for in this many bytes of its tail; few events are longer.
_TAIL: Final = 1 << 14
# An event that is still incomplete after this many bytes is taken for a broken one.
_LONGEST_EVENT: Final = 1 << 20
# Of what stands before and after the events, this much is kept.
_MARGIN: Final = 1 << 20
_KEY: Final = 1 << 12


class Events:
    """Decodes the pieces of one trace; iterate to get its events in batches.

    Args:
        pieces: The text of the trace, cut anywhere.

    Attributes:
        skipped: Events left out so far because they were unparsable or ill-typed.
        damaged: The JSON was broken, or ended early; known once the last batch is out.
        header: What stood around the events; complete once the last batch is out.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.skipped = 0
        self.damaged = False
        self.header = Header()
        self._pieces = iter(pieces)
        self._exact = False
        self._ended = False
        self._lost = False

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of `Event`, or of `ExactEvent` from where a trace turns out to need them.

        Raises:
            TorchperfdError: The text has no ``traceEvents``.
        """
        head, begun = self._find_events()
        self._read_header(head.rstrip().rstrip(b",") + b"}")
        text = bytearray(b"[" + begun)
        for piece in self._pieces:
            text += piece
            batch, rest = self._batch(text)
            yield batch
            if self._ended:
                break
            text = bytearray(b"[" + rest)
        else:
            batch, rest = self._tokenize(bytes(text), last=True)
            yield batch
        self._read_tail(rest)

    def _find_events(self) -> tuple[bytes, bytes]:
        """Return what stands before the events, and the beginning of their text."""
        text = b""
        for piece in self._pieces:
            text += piece
            if match := _FIRST_EVENT.search(text):
                return text[: match.start()][:_MARGIN], text[match.end() :]
            # Kept is the file's beginning, and enough of its end to find a key that was cut in two.
            text = text if len(text) <= _MARGIN else text[: _MARGIN - _KEY] + text[-_KEY:]
        raise TorchperfdError(
            'it is not a PyTorch trace: it has no list of "traceEvents"',
            "give a file that torch.profiler or torchperfd capture exported",
        )

    def _batch(self, text: bytearray) -> tuple[list[Any], bytes]:
        """Return the events of ``text`` that are complete, and the text after them.

        Args:
            text: A "[", and then text from where an event may begin.
        """
        if self._lost:
            return self._tokenize(bytes(text), last=False)
        cuts = [match.start() for match in _BEFORE_EVENT.finditer(text, max(1, len(text) - _TAIL))]
        if cuts:
            # Closed in place: a copy of every batch would cost a tenth of the whole reading.
            replaced, text[cuts[-1]] = text[cuts[-1]], ord("]")
            with memoryview(text) as view:
                batch = self._decode(view[: cuts[-1] + 1])
            if batch is not None:
                return batch, bytes(text[cuts[-1] + 1 :])
            text[cuts[-1]] = replaced
        return self._tokenize(bytes(text), last=False)

    def _decode(self, text: memoryview) -> list[Any] | None:
        """Decode a list of events, all of them or none; None when one is broken."""
        if not self._exact:
            try:
                events = _EVENTS.decode(text)
            except _UNREADABLE:
                pass
            else:
                if max([event.ts for event in events], default=0.0) < EXACT_BELOW_US:
                    return events
        try:
            exact = _EXACT_EVENTS.decode(text)
        except _UNREADABLE:
            return None
        self._exact = True
        return exact

    def _tokenize(self, text: bytes, *, last: bool) -> tuple[list[Any], bytes]:
        """Decode event by event, skipping the broken ones.

        Args:
            text: A "[", and then text from where an event may begin.
            last: No more text will come.

        An event that was given up on may go on in the next text: there it is skipped without counting again.
        """
        batch: list[Any] = []
        characters = text.decode("latin-1")
        at = 1
        if self._lost:
            following = _BEFORE_EVENT.search(text, at)
            if following is None and not last:
                return batch, text[1:][-_KEY:]
            self._lost = False
            at = following.start() + 1 if following else len(characters)
        while True:
            between = _BETWEEN.match(characters, at)
            at = between.end() if between else at
            if at == len(characters):
                self._ended = last
                self.damaged |= last
                return batch, b""
            if characters[at] == "]":
                self._ended = True
                return batch, text[at:]
            try:
                _, end = _TOKENIZER.raw_decode(characters, at)
            except (ValueError, RecursionError):
                if not last and len(characters) - at < _LONGEST_EVENT:
                    return batch, text[at:]
                self.damaged = True
                self.skipped += 1
                following = _BEFORE_EVENT.search(text, at + 1)
                if following is None and not last:
                    self._lost = True
                    return batch, text[-_KEY:]
                at = following.start() + 1 if following else len(characters)
                continue
            event = self._decode_one(text[at:end])
            if event is None:
                self.skipped += 1
            else:
                batch.append(event)
            at = end

    def _decode_one(self, text: bytes) -> AnyEvent | None:
        try:
            event = _EVENT.decode(text)
        except _UNREADABLE:
            pass
        else:
            if event.ts < EXACT_BELOW_US:
                return event
        try:
            return _EXACT_EVENT.decode(text)
        except _UNREADABLE:
            return None

    def _read_tail(self, text: bytes) -> None:
        """Read on to the end, which tells whether the file is whole, and keep the beginning of it."""
        final = text.rstrip()[-1:]
        for piece in self._pieces:
            text = (text + piece)[:_MARGIN] if len(text) < _MARGIN else text
            final = piece.rstrip()[-1:] or final
        self.damaged |= final != b"}"
        rest = text[1:].strip()
        if rest.startswith(b","):
            self._read_header(b"{" + rest[1:])

    def _read_header(self, text: bytes) -> None:
        """Take what is known from ``text``; around damaged events nothing is."""
        try:
            found = _HEADER.decode(text)
        except _UNREADABLE:
            return
        self.header.base_ns = found.base_ns or self.header.base_ns
        self.header.distributed = found.distributed or self.header.distributed
        self.header.devices = found.devices or self.header.devices
        self.header.capture = found.capture or self.header.capture
