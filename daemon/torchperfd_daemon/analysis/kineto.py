"""Decodes the sound events of a Kineto Chrome trace, batch by batch.

The format is the one that ``torch.profiler`` exports: a JSON object whose ``traceEvents`` are
Chrome trace events, times in microseconds. A trace is decoded while it is read, so that memory
holds one batch of it, never the whole text. A regular expression guesses where events begin,
and batches end there. If that guess, or the JSON, is wrong, an exact tokenizer goes over the batch
event by event. Real files break (unescaped quotes, cut ends, fields of another type), so one bad
event costs itself and never the file, and a bad field not even its event's times (`decoding`).

A bare list of events is a trace too: other exporters write it, and viewers take it.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchperfd_daemon.analysis import decoding
from torchperfd_daemon.analysis.decoding import (
    EXACT_BELOW_US,
    AnyEvent,
    Event,
    ExactEvent,
    ForeignEvent,
    Header,
)
from torchperfd_daemon.analysis.native_batches import NATIVE
from torchperfd_daemon.errors import TorchperfdError

if TYPE_CHECKING:
    from torchperfd_daemon.analysis._native import Batch


_Decoders = tuple[msgspec.json.Decoder[Any], ...]


def _decoders(kind: type[AnyEvent], *, strict: bool) -> _Decoders:
    """Return the decoders of a list of events, and of one."""
    return tuple(msgspec.json.Decoder[Any](each, strict=strict) for each in (list[kind], kind))  # type: ignore[valid-type]


_PLAIN: Final = _decoders(Event, strict=True)
_EXACT: Final = _decoders(ExactEvent, strict=False)
_FOREIGN: Final = _decoders(ForeignEvent, strict=False)
_HEADER: Final = msgspec.json.Decoder(Header)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# The exact tokenizer reads latin-1, in which every byte is one character, so that its positions are bytes.
_TOKENIZER: Final = json.JSONDecoder(strict=False)

_FIRST_EVENT: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[(?=\s*\{)")
# An event's object follows "," and another object, or opens the list. A well-formed string never
# matches: a quote within it is escaped, and after its closing quote comes no word.
_BEFORE_EVENT: Final = re.compile(rb'[\[,](?=\s*\{\s*"\w)')
_BEFORE_NEXT: Final = re.compile(r'[\[,](?=\s*\{\s*"\w)')
_BETWEEN: Final = re.compile(r"[\s,]*")
# Where a batch may end is looked for in this many bytes of its tail; few events are longer.
_SHORT_TAIL: Final = 1 << 11
_TAIL: Final = 1 << 14
# An event that is still incomplete after this many bytes is taken for a broken one.
_MAX_EVENT: Final = 1 << 20
# An event is repaired if it ends before one of so many places where another may begin.
_MAX_ENDS: Final = 64
# So many bytes of the text before and after the events are kept.
_MARGIN: Final = 1 << 20
_KEY: Final = 1 << 12


class Events:
    """Decodes the pieces of one trace; iterate to get its events in batches.

    Args:
        foreign: Whether to yield `ForeignEvent`, for a trace whose events lack categories.

    Attributes:
        skipped: Events left out so far because they were unparsable or ill-typed.
        repaired: Events that were kept without fields that could not be read.
        read: Bytes of text read so far.
        damaged_at: At which of them the JSON was first broken, or ended early; None while it is whole. Known
            once the last batch is out.
        more_exports: Another trace follows in the same file, unread; known once the last batch is out.
    """

    def __init__(self, pieces: Iterable[bytes], *, foreign: bool = False) -> None:
        self.skipped = 0
        self.repaired = 0
        self.read = 0
        self.damaged_at: int | None = None
        self.more_exports = False
        self.header = Header()
        self._foreign = foreign
        self._bare = False
        self._pieces = self._counted(pieces)
        self._exact = False
        self._ended = False
        self._lost = False

    def __iter__(self) -> "Iterator[list[Any] | Batch]":
        """Yield lists of `Event`, or of `ExactEvent` from where a trace turns out to need them.

        A batch of sound events is yielded as the C module has parsed it, if there is one.

        Raises:
            TorchperfdError: The text has no ``traceEvents`` and is no list of events.
        """
        head, begun = self._find_events()
        if not self._bare:
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
            batch, rest = self._last(text)
            yield batch
        self._read_tail(rest)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.read += len(piece)
            yield piece

    def _note_damage(self, behind: int = 0) -> None:
        """Note that the JSON is broken so many bytes before the end of what was read."""
        if self.damaged_at is None:
            self.damaged_at = self.read - behind

    def _find_events(self) -> tuple[bytes, bytes]:
        """Return the text before the events, and the beginning of their own text."""
        text = b""
        for piece in self._pieces:
            text += piece
            if match := _BARE_LIST.match(text):
                self._bare = True
                return b"", text[match.end() :]
            if match := _FIRST_EVENT.search(text):
                return text[: match.start()][:_MARGIN], text[match.end() :]
            # Kept is the file's beginning, and enough of its end to find a key that was cut in two.
            text = text if len(text) <= _MARGIN else text[: _MARGIN - _KEY] + text[-_KEY:]
        raise TorchperfdError(
            'it is not a PyTorch trace: it has no list of "traceEvents"',
            "give a file that torch.profiler or torchperfd capture exported",
        )

    def _batch(self, text: bytearray) -> "tuple[list[Any] | Batch, bytes]":
        """Return the events of ``text`` that are complete, and the text after them.

        Args:
            text: A "[", and then text from where an event may begin.
        """
        if self._lost:
            return self._tokenize(bytes(text), last=False)
        if cuts := _cuts(text, _SHORT_TAIL) or _cuts(text, _TAIL):
            # Closed in place: a copy of every batch would cost a tenth of the whole reading.
            replaced, text[cuts[-1]] = text[cuts[-1]], ord("]")
            with memoryview(text) as view:
                batch = self._parsed(view[: cuts[-1] + 1]) or self._decode(view[: cuts[-1] + 1])
            if isinstance(batch, list) or (batch is not None and batch.closed_at == cuts[-1]):
                return batch, bytes(text[cuts[-1] + 1 :])
            text[cuts[-1]] = replaced
            if batch is not None:
                return batch, self._rest(text, batch)
        return self._tokenize(bytes(text), last=False)

    def _last(self, text: bytearray) -> "tuple[list[Any] | Batch, bytes]":
        """Return the same of the end of the file."""
        if not self._lost and (batch := self._parsed(text)):
            return batch, self._rest(text, batch)
        return self._tokenize(bytes(text), last=True)

    def _rest(self, text: bytearray, batch: "Batch") -> bytes:
        self._ended = True
        return bytes(text[batch.closed_at :])

    def _parsed(self, text: bytearray | memoryview) -> "Batch | None":
        """Parse a list of sound events in C; None for any other, and without the C module."""
        return NATIVE.parse(text) if NATIVE is not None and not self._foreign else None

    def _decode(self, text: memoryview) -> list[Any] | None:
        """Decode a list of events, all of them or none; None when one is broken."""
        is_exact, events = _decoded(text, 0, self._ways((_EXACT,) if self._exact else (_PLAIN, _EXACT)))
        self._exact |= is_exact
        found: list[Any] | None = events
        return found

    def _decode_one(self, text: bytes) -> AnyEvent | None:
        found: AnyEvent | None = _decoded(text, 1, self._ways((_PLAIN, _EXACT)))[1]
        return found

    def _ways(self, ways: tuple[_Decoders, ...]) -> tuple[_Decoders, ...]:
        return (_FOREIGN,) if self._foreign else ways

    def _tokenize(self, text: bytes, *, last: bool) -> tuple[list[Any], bytes]:
        """Decode event by event, skipping the broken ones.

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
                if last:
                    self._note_damage()
                return batch, b""
            if characters[at] == "]":
                self._ended = True
                return batch, text[at:]
            if (following := _BEFORE_EVENT.search(text, at + 1)) and self._take_alone(
                text[at : following.start()], batch
            ):
                at = following.start()
                continue
            try:
                _, end = _TOKENIZER.raw_decode(characters, at)
            except (ValueError, RecursionError) as error:
                mended = self._repair(characters, at, last=last)
                if mended is not None:
                    self._take(mended, batch, mended=True)
                    at += len(mended)
                    continue
                if not last and len(characters) - at < _MAX_EVENT:
                    return batch, text[at:]
                self._note_damage(len(text) - getattr(error, "pos", at))
                self.skipped += 1
                following = _BEFORE_EVENT.search(text, at + 1)
                if following is None and not last:
                    self._lost = True
                    return batch, text[-_KEY:]
                at = following.start() + 1 if following else len(characters)
                continue
            self._take(text[at:end], batch)
            at = end

    def _take_alone(self, text: bytes, batch: list[Any]) -> bool:
        """Append the event that ``text`` is, if it is one and nothing else; the tokenizer is far slower."""
        event = self._decode_one(text)
        if event is not None:
            batch.append(event)
            return True
        found = decoding.repaired(text.decode("latin-1"))
        if found is None or found[0][found[1] :].strip():
            return False
        mended = found[0].encode("latin-1")
        self._take(mended, batch, mended=mended != text)
        return True

    def _repair(self, characters: str, at: int, *, last: bool) -> bytes | None:
        """Return the event that begins at ``at`` as JSON, of the same length; None where it cannot be."""
        until = at
        for _ in range(_MAX_ENDS):
            following = _BEFORE_NEXT.search(characters, until + 1)
            if following is None and not last:
                return None
            until = following.start() if following else len(characters)
            if found := decoding.repaired(characters[at:until]):
                text, end = found
                return text[:end].encode("latin-1")
            if following is None or until - at > _MAX_EVENT:
                return None
        return None

    def _take(self, text: bytes, batch: list[Any], *, mended: bool = False) -> None:
        event: Any = self._decode_one(text)
        if event is None:
            mended = True
            event = decoding.struct_from(text, ForeignEvent if self._foreign else ExactEvent)
        if event is None:
            self.skipped += 1
            return
        self.repaired += mended
        batch.append(event)

    def _read_tail(self, text: bytes) -> None:
        """Read to the end, which shows whether the file is complete, and keep the beginning of the rest."""
        final = text.rstrip()[-1:]
        window = text
        self.more_exports = _FIRST_EVENT.search(window) is not None
        for piece in self._pieces:
            text = (text + piece)[:_MARGIN] if len(text) < _MARGIN else text
            final = piece.rstrip()[-1:] or final
            window = window[-_KEY:] + piece
            self.more_exports |= _FIRST_EVENT.search(window) is not None
        if final != (b"]" if self._bare else b"}"):
            self._note_damage()
        rest = text[1:].strip()
        if self._bare:
            self.more_exports |= rest[:1] in (b"[", b"{")
        elif rest.startswith(b","):
            self._read_header(b"{" + rest[1:])

    def _read_header(self, text: bytes) -> None:
        """Take the known fields from ``text``; a field that cannot be read costs only itself."""
        try:
            found = _HEADER.decode(text)
        except _UNREADABLE:
            found = _salvaged_header(text)
        self.header.base_ns = found.base_ns or self.header.base_ns
        self.header.distributed = found.distributed or self.header.distributed
        self.header.devices = found.devices or self.header.devices
        self.header.capture = found.capture or self.header.capture
        self.header.warnings = found.warnings or self.header.warnings
        self.header.errors = found.errors or self.header.errors


def _cuts(text: bytearray, tail: int) -> list[int]:
    """Return where events seem to begin in so many bytes at the end of a text."""
    return [match.start() for match in _BEFORE_EVENT.finditer(text, max(1, len(text) - tail))]


def _decoded(text: bytes | memoryview, one: int, ways: tuple[_Decoders, ...]) -> tuple[bool, Any]:
    """Decode in the first of some ways that succeeds; also return whether that is the exact one."""
    for way in ways:
        try:
            found = way[one].decode(text)
        except _UNREADABLE:
            continue
        starts = [found.ts] if one else [event.ts for event in found]
        if way is not _PLAIN or max(starts, default=0.0) < EXACT_BELOW_US:
            return way is _EXACT, found
    return False, None


def decode_sound(text: bytes) -> list[Any]:
    """Decode a list of events that is known to be sound."""
    return _decoded(text, 0, (_PLAIN, _EXACT))[1] or []


def peek(pieces: Iterable[bytes]) -> Header | None:
    """Return the fields before a trace's events; None if the text does not begin like a trace."""
    text = b""
    for piece in pieces:
        text += piece
        if _BARE_LIST.match(text):
            return Header()
        if match := _FIRST_EVENT.search(text):
            head = text[: match.start()].rstrip().rstrip(b",") + b"}"
            try:
                return _HEADER.decode(head)
            except _UNREADABLE:
                return _salvaged_header(head)
        if len(text) > _MARGIN:
            break
    return None


def _salvaged_header(text: bytes) -> Header:
    keys = tuple(field.encode_name for field in msgspec.structs.fields(Header))
    return decoding.convert(decoding.objects_in(text, keys), Header) or Header()
