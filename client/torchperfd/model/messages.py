"""Packs dataclasses into messages of the protocol and parts of JSON documents, as their fields declare it.

A measurement is declared once, as a field of a dataclass. Its annotation has what the wire needs::

    ns: Annotated[int, Wire("step_ns"), nanoseconds]

``Wire`` is the name of the message's field, if that is another one. A function brings what was received
within its limits: a client may send any 64 bits, and one number that is out of range must not break a sum, a
message or a page that other ranks share. A field that may be None is None where the message lacks it.

A field has its own name in a document, which anyone may have written. Nanoseconds are written there as
seconds: ``ns`` is ``seconds_total``.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from operator import attrgetter, call, le
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from torchperfd.model.formatting import MAX_INT, MAX_LARGE, MAX_TEXT, count, number, one_line, text

MAX_COUNT: Final = 2**53  # of steps, samples, bytes: what a double still holds exactly
MAX_NS: Final = 2**58  # nine years; the sum over all phases of a rank still fits 64 bits
LAST_UNIX_NS: Final = 2**62  # in the year 2116
LAST_STEP: Final = 2**62
MAX_QUANTITY: Final = 1e300

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wire:
    """The name of a message's field, where it differs from the dataclass's."""

    name: str


@dataclass(frozen=True, slots=True)
class AtMost:
    """How many items of a repeated field are read."""

    items: int


@dataclass(frozen=True, slots=True)
class KeyedBy:
    """The field of a repeated message that is the key of a dictionary."""

    name: str


@dataclass(frozen=True, slots=True)
class Text:
    """Limits a text to one line of so many characters, also before it is sent."""

    characters: int

    def __call__(self, value: str) -> str:
        return one_line(value, self.characters)


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits a quantity to ``most``; one that is none (negative, NaN) is 0."""

    most: float

    def __call__(self, value: float) -> float:
        return min(value, self.most) if value >= 0 else 0


def seconds(value: float) -> float:
    """Return a duration; 0 for what is none (negative, infinite, NaN)."""
    return value if 0 <= value < math.inf else 0.0


def known(value: float) -> float | None:
    """Return a quantity; None for what is none."""
    return value if 0 <= value < math.inf else None


def share(value: float) -> float:
    """Return a part of a whole, 0 to 1; 0 for what is none."""
    return value if 0 <= value <= 1 else 0.0


Count = Annotated[int, Limit(MAX_COUNT)]
Nanoseconds = Annotated[int, Limit(MAX_NS)]
UnixNanoseconds = Annotated[int, Limit(LAST_UNIX_NS)]
StepIndex = Annotated[int, Limit(LAST_STEP)]
LineNumber = Annotated[int, Limit(MAX_INT)]
Quantity = Annotated[float, Limit(MAX_QUANTITY)]
Seconds = Annotated[float, seconds]
Known = Annotated[float, known]
Share = Annotated[float, share]
Name = Annotated[str, Text(64)]
Label = Annotated[str, Text(200)]
Reason = Annotated[str, Text(256)]
Sentence = Annotated[str, Text(500)]
Evidence = Annotated[str, Text(1000)]
FilePath = Annotated[str, Text(1000)]


@dataclass(frozen=True, slots=True)
class _Value:
    """One value, by its annotation.

    Attributes:
        kind: The dataclass or the enumeration of its values; None for plain ones.
        limits: Applied to what was received, in this order.
        texts: Applied before it is sent as well.
    """

    kind: type | None
    limits: tuple[Callable[[Any], Any], ...]
    texts: tuple[Callable[[Any], Any], ...]
    is_nested: bool

    def read(self, received: Any) -> Any:
        if self.is_nested:
            received = unpack(received, self.kind)  # type: ignore[arg-type]
        for each in self.limits:
            received = each(received)
        return received

    def write(self, own: Any) -> Any:
        for each in self.texts:
            own = each(own)
        return own.value if isinstance(own, Enum) else own


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a dataclass and of a message.

    Attributes:
        item: What its value is or, of a repeated field, each of its items.
        most: How many items are read; None for all.
        key: The key's field in each message of a dictionary; empty for other fields.
        is_repeated: It is a tuple or a dictionary.
        may_lack: It is None if the message lacks it.
        has_presence: The message knows whether it has it. If not, 0 and an empty text stand for None.
        empty: What need not be sent; MISSING for what always is.
        limits: Applied to a tuple as a whole.
    """

    name: str
    wire: str
    item: _Value
    most: int | None
    key: str
    is_repeated: bool
    may_lack: bool
    has_presence: bool
    empty: Any
    limits: tuple[Callable[[Any], Any], ...]

    @property
    def is_plain(self) -> bool:
        """Whether its value is one number or text, and has one limit."""
        item = self.item
        return not (self.is_repeated or self.may_lack or item.is_nested) and len(item.limits) == 1

    def read(self, message: Any) -> Any:
        if self.may_lack and self.has_presence and not message.HasField(self.wire):
            return None
        received = getattr(message, self.wire)
        is_lacking = self.may_lack and not self.has_presence and not self.is_repeated and not received
        return None if is_lacking else self.take(received)

    def take(self, received: Any) -> Any:
        """Return the value of what a message has."""
        read = self.item.read
        if not self.is_repeated:
            return read(received)
        items = received[: self.most]
        if self.key:
            return {one_line(getattr(each, self.key), 64): read(each) for each in items}
        found: Any = tuple(map(read, items))
        for each in self.limits:
            found = each(found)
        return found

    def write(self, own: Any, message: Any) -> None:
        item = self.item
        if not self.is_repeated:
            if not item.is_nested:
                setattr(message, self.wire, item.write(own))
            elif own != self.empty:
                packed = getattr(message, self.wire)
                packed.SetInParent()
                fill(packed, own)
        elif not item.is_nested:
            getattr(message, self.wire).extend(map(item.write, own))
        else:
            target = getattr(message, self.wire)
            keyed = own.items() if self.key else ((None, each) for each in own)
            for key, each in keyed:
                fill(target.add(**({self.key: key} if self.key else {})), each)


def pack(kind: Callable[..., T], own: Any, /, **others: Any) -> T:
    """Return a message with the fields of a dataclass that it has too; ``others`` come before these."""
    message = kind(**others)
    fill(message, own, others)
    return message


def fill(message: Any, own: Any, others: Collection[str] = ()) -> None:
    """Write the fields of a dataclass into a new message, without those that ``others`` names."""
    kind: Any = type(own)
    for each in _fields(kind, message.DESCRIPTOR):
        if each.wire not in others:
            value = getattr(own, each.name)
            # What is 0 or empty is not sent in any case, unless that differs from None.
            if value or (value is not None and each.may_lack):
                each.write(value, message)


def unpack(message: Any, kind: Callable[..., T], /, **others: Any) -> T:
    """Return the dataclass of a message, each value within its limits; ``others`` come before these."""
    readers = _readers(kind, message.__class__)
    if readers.get_all is not None and not others:
        found = readers.get_all(message)
        # Nearly all are within their limits, and one comparison costs less than a call of each limit.
        if readers.most and min(found) >= 0 and all(map(le, found, readers.most)):
            return kind(*found)
        return kind(*map(call, readers.limits, found))
    values = {name: read(message) for name, read in readers.always if name not in others}
    for descriptor, received in message.ListFields():
        reader = readers.present.get(descriptor.number)
        if reader is not None and reader[0] not in others:
            values[reader[0]] = reader[1](received)
    return kind(**values, **others)


@dataclass(slots=True)
class _Readers:
    """How the fields of a dataclass are read. An account has a hundred of them, of which most are empty.

    Attributes:
        always: Those read of every message.
        present: By number, those read where a message has them: what is empty is the dataclass's default.
        get_all: Returns all fields of a message, if each is one number or text; else None.
        limits: Theirs.
        most: The largest value of each, if all are quantities; else empty.
    """

    always: list[tuple[str, Callable[[Any], Any]]] = field(default_factory=list)
    present: dict[int, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)
    get_all: Callable[[Any], tuple[Any, ...]] | None = None
    limits: tuple[Callable[[Any], Any], ...] = ()
    most: tuple[float, ...] = ()


@lru_cache(maxsize=256)
def _readers(kind: Any, message: Any) -> _Readers:
    readers = _Readers()
    own = {each.name: each for each in fields(kind)}
    known_fields = _fields(kind, message.DESCRIPTOR)
    for each in known_fields:
        if each.read(message()) == _default(own[each.name]):
            number = message.DESCRIPTOR.fields_by_name[each.wire].number
            readers.present[number] = each.name, each.item.limits[0] if each.is_plain else each.take
        else:
            readers.always.append((each.name, each.read))
    in_order = len(known_fields) == len(own) > 1 and not any(each.kw_only for each in own.values())
    if in_order and all(each.is_plain for each in known_fields):
        readers.get_all = attrgetter(*(each.wire for each in known_fields))
        readers.limits = tuple(each.item.limits[0] for each in known_fields)
        most = tuple(each.most for each in readers.limits if isinstance(each, Limit))
        readers.most = most if len(most) == len(readers.limits) else ()
    return readers


def _default(own: Any) -> Any:
    return own.default_factory() if own.default_factory is not MISSING else own.default


@lru_cache(maxsize=256)
def _fields(kind: Any, descriptor: Any) -> tuple[_Field, ...]:
    known_fields = descriptor.fields_by_name
    hints = get_type_hints(kind, include_extras=True)
    made = (_field(each, hints[each.name], known_fields) for each in fields(kind))
    return tuple(each for each in made if each is not None)


def _field(own: Any, hint: Any, known_fields: Any) -> _Field | None:
    hint, notes = split_hint(hint)
    may_lack = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if may_lack:
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
        hint, more = split_hint(hint)
        notes += more
    wire = next((each.name for each in notes if isinstance(each, Wire)), own.name)
    if wire not in known_fields:
        return None
    limits = tuple(each for each in notes if callable(each))
    is_repeated = get_origin(hint) in (tuple, dict)
    if is_repeated:
        inner = get_args(hint)[1 if get_origin(hint) is dict else 0]
        item = _value(*split_hint(inner), outer=())
    else:
        item = _value(hint, (), outer=limits)
    return _Field(
        name=own.name,
        wire=wire,
        item=item,
        most=next((each.items for each in notes if isinstance(each, AtMost)), None),
        key=next((each.name for each in notes if isinstance(each, KeyedBy)), ""),
        is_repeated=is_repeated,
        may_lack=may_lack,
        has_presence=known_fields[wire].has_presence,
        empty=MISSING if may_lack else _default(own),
        limits=limits if is_repeated else (),
    )


def _value(kind: Any, notes: tuple[Any, ...], *, outer: tuple[Any, ...]) -> _Value:
    limits = (*(each for each in notes if callable(each)), *outer)
    is_nested = is_dataclass(kind)
    texts = tuple(each for each in limits if isinstance(each, Text))
    return _Value(kind if is_nested else None, limits, texts, is_nested)


def split_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is not Annotated:
        return hint, ()
    plain, *notes = get_args(hint)
    return plain, tuple(notes)


_NS: Final = "ns"
_SECONDS: Final = "seconds_total"


def to_document(own: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Return a dataclass as documents have it, less some of its fields."""
    return {
        _SECONDS if name == _NS else name: value / 1e9 if name == _NS else value
        for name, value in asdict(own).items()
        if name not in without
    }


def from_document(kept: Mapping[str, Any], kind: Callable[..., T], /, **others: Any) -> T:
    """Return the dataclass of a document's part; a value that is missing or null has its default.

    Args:
        others: Fields that the document does not have, or not in this form.

    Raises:
        ValueError: It is damaged, as with ``KeyError``, ``TypeError`` and ``AttributeError``.
    """
    values = dict(others)
    for name, hint, has_default in _hints(kind):
        key = _SECONDS if name == _NS else name
        if name in values or (has_default and kept.get(key) is None):
            continue
        values[name] = round(1e9 * number(kept[key])) if name == _NS else _read(kept[key], hint)
    return kind(**values)


@lru_cache(maxsize=64)
def _hints(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (each.name, hints[each.name], (each.default, each.default_factory) != (MISSING, MISSING))
        for each in fields(kind)
    )


def _read(value: Any, hint: Any) -> Any:
    plain, notes = split_hint(hint)
    if get_origin(plain) in (Union, UnionType):
        if value is None:
            return None
        (inner,) = (each for each in get_args(plain) if each is not NoneType)
        found = _read(value, inner)
    elif get_origin(plain) is tuple:
        most = next((each.items for each in notes if isinstance(each, AtMost)), len(value))
        if len(value) > most:
            raise ValueError(f"it has more than {most} parts")
        found = tuple(_read(each, get_args(plain)[0]) for each in value)
    elif is_dataclass(plain):
        found = from_document(value, plain)  # type: ignore[arg-type]
    elif plain is bool:
        found = bool(value)
    elif plain is str or issubclass(plain, Enum):
        found = text(value, next((each.characters for each in notes if isinstance(each, Text)), MAX_TEXT))
    else:
        found = count(value, MAX_LARGE) if plain is int else number(value)
    for each in notes:
        if callable(each):
            found = each(found)
    return found
