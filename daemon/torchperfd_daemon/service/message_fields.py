"""Fields of messages: copied to and from dataclasses, with numbers and texts kept within limits.

A client may send any 64 bits. One number that is out of range must not break a sum, a message or a page that
other ranks share, so each is limited where it enters. A command cleans the texts of the daemon's messages, so
that none can control the terminal.
"""

from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from torchperfd_daemon.text import one_line

M = TypeVar("M", bound=Message)


def pack(kind: type[M], own: Any, /, **others: Any) -> M:
    """Return a message with the fields of a dataclass that it has too; ``others`` come before these."""
    shared = (each.name for each in fields(own) if each.name in kind.DESCRIPTOR.fields_by_name)
    return kind(**{**{name: getattr(own, name) for name in shared if name not in others}, **others})


def unpack(message: Message, kind: type) -> dict[str, Any]:
    """Return the values of the fields of a dataclass that a message has too."""
    known = message.DESCRIPTOR.fields_by_name
    return {each.name: getattr(message, each.name) for each in fields(kind) if each.name in known}


MAX_COUNT: Final = 2**53
"""Of steps, samples, bytes: what a double still holds exactly."""
MAX_NS: Final = 2**58
"""Nine years; the sum over all phases of a rank still fits 64 bits."""
LAST_UNIX_NS: Final = 2**62
"""In the year 2116."""
MAX_SUM: Final = 2**63 - 1
MAX_QUANTITY: Final = 1e300


def count(value: int) -> int:
    """Return a counter, at most :data:`MAX_COUNT`."""
    return min(value, MAX_COUNT)


def nanoseconds(value: int) -> int:
    """Return a duration, at most :data:`MAX_NS`."""
    return min(value, MAX_NS)


def moment(value: int) -> int:
    """Return a Unix time in nanoseconds, at most :data:`LAST_UNIX_NS`."""
    return min(value, LAST_UNIX_NS)


def total(*values: int) -> int:
    """Return a sum that a 64-bit field of a message can hold."""
    return min(sum(values), MAX_SUM)


def quantity(value: float, most: float = MAX_QUANTITY) -> float:
    """Return a quantity from 0 to ``most``; 0 for what is none (negative, NaN)."""
    return min(value, most) if value >= 0 else 0.0


def within(columns: "list[array[int]]", most: int) -> "list[array[int]]":
    """Return columns of int64 with every value from 0 to ``most``; the same ones where all are already."""
    blob = b"".join(map(memoryview, columns))
    # As unsigned numbers those below 0 are the largest, so that one pass over the columns is enough.
    if not blob or int(np.frombuffer(blob, np.uint64).max()) <= most:
        return columns
    return [array("q", np.clip(np.asarray(column), 0, most).tobytes()) for column in columns]


_MAX_CHARACTERS: Final = 4096


def clean(message: M) -> M:
    """Make every text in a message, and in those that it holds, one line; return the message."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _clean_map(value)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                if not value.isprintable() or len(value) > _MAX_CHARACTERS:
                    setattr(message, field.name, one_line(value, _MAX_CHARACTERS))
            else:
                value[:] = [one_line(each, _MAX_CHARACTERS) for each in value]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in (value,) if isinstance(value, Message) else value:
                clean(each)
    return message


def _clean_map(entries: Any) -> None:
    for key in list(entries):
        value = entries[key]
        if isinstance(value, Message):
            clean(value)
            continue
        cleaned = one_line(value, _MAX_CHARACTERS) if isinstance(value, str) else value
        name = one_line(key, _MAX_CHARACTERS) if isinstance(key, str) else key
        if (name, cleaned) != (key, value):
            del entries[key]
            entries[name] = cleaned


class CleanChannel:
    """A channel whose answers are cleaned as they are read, for stubs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Return a call of one request and one answer."""
        return self._channel.unary_unary(*arguments, **_cleaning(named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Return a call of one request and many answers."""
        return self._channel.unary_stream(*arguments, **_cleaning(named))


def _cleaning(named: dict[str, Any]) -> dict[str, Any]:
    read: Callable[[bytes], Message] = named["response_deserializer"]
    return {**named, "response_deserializer": lambda data: clean(read(data))}
