"""The events of a Kineto Chrome trace, decoded as far as each of them is sound.

The format is the one that ``torch.profiler`` exports: a JSON object whose ``traceEvents`` are
Chrome trace events, times in microseconds. Real files break (unescaped quotes, cut ends, fields
of another type), so one bad event costs itself and never the file.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from torchperfd_daemon.errors import TorchperfdError


class Args(msgspec.Struct, gc=False):
    """The arguments the analyser reads; ``External id`` links a kernel to its operator."""

    external_id: int | str | None = msgspec.field(name="External id", default=None)


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` in microseconds, NaN when absent."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = math.nan
    dur: float = math.nan
    args: Args | None = None


class _Document(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")


class _RawDocument(msgspec.Struct):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")


@dataclass(frozen=True, slots=True)
class Decoded:
    """The sound events of a file, how many were not, and whether the JSON itself was broken."""

    events: list[Event]
    skipped: int
    damaged: bool


_DOCUMENT: Final = msgspec.json.Decoder(_Document)
_RAW_DOCUMENT: Final = msgspec.json.Decoder(_RawDocument)
_EVENT: Final = msgspec.json.Decoder(Event)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# An event's object follows "[" or ","; the object of its args follows ":". A well-formed string
# never matches: a quote within it is escaped, and after its closing quote comes no word.
_BEFORE_EVENT: Final = re.compile(rb'[\[,](?=\s*\{\s*"\w)')
# Closing braces to try as the end of an event that has something after it, such as the file's end.
_END_TRIES: Final = 8


def decode(data: bytearray) -> Decoded:
    """Decode a trace: whole when it is sound, event by event when one is not.

    Raises:
        TorchperfdError: The data has no ``traceEvents``.
    """
    try:
        return Decoded(_DOCUMENT.decode(data).events, skipped=0, damaged=False)
    except _UNREADABLE:
        pass
    try:
        pieces = _RAW_DOCUMENT.decode(data).events
    except msgspec.ValidationError:
        raise _no_events() from None
    except _UNREADABLE:
        return _salvage(data)
    return _decode_each(pieces, damaged=False)


def _salvage(data: bytearray) -> Decoded:
    """Cut broken JSON where events begin, so that each is sound or broken for itself."""
    begin = data.find(b'"traceEvents"')
    if begin < 0:
        raise _no_events()
    cuts = [match.start() for match in _BEFORE_EVENT.finditer(data, begin)]
    ends = [*cuts[1:], len(data)]
    return _decode_each((data[cut + 1 : end] for cut, end in zip(cuts, ends, strict=False)), damaged=True)


def _decode_each(pieces: Iterable[msgspec.Raw | bytearray], *, damaged: bool) -> Decoded:
    events: list[Event] = []
    skipped = 0
    for piece in pieces:
        event = _decode_one(piece)
        if event is None and damaged:
            event = _decode_start(bytes(piece))
        if event is None:
            skipped += 1
        else:
            events.append(event)
    return Decoded(events, skipped, damaged)


def _decode_one(piece: msgspec.Raw | bytearray | bytes) -> Event | None:
    try:
        return _EVENT.decode(piece)
    except _UNREADABLE:
        return None


def _decode_start(piece: bytes) -> Event | None:
    """Return the event that ``piece`` begins with, whatever stands after it."""
    end = 0
    for _ in range(_END_TRIES):
        end = piece.find(b"}", end) + 1
        if end == 0:
            return None
        if (event := _decode_one(piece[:end])) is not None:
            return event
    return None


def _no_events() -> TorchperfdError:
    return TorchperfdError(
        'it is not a PyTorch trace: it has no list of "traceEvents"',
        "give a file that torch.profiler or torchperfd capture exported",
    )
