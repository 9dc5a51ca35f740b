"""Messages whose texts cannot control a terminal."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from torchperfd.model.formatting import one_line

M = TypeVar("M", bound=Message)


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
