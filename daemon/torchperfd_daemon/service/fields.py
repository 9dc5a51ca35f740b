"""Copies the fields that a dataclass and a message have by the same name."""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def pack(kind: type[M], own: Any, /, **others: Any) -> M:
    """Return a message with the fields of a dataclass that it has too; ``others`` come before these."""
    shared = (each.name for each in fields(own) if each.name in kind.DESCRIPTOR.fields_by_name)
    return kind(**{**{name: getattr(own, name) for name in shared if name not in others}, **others})


def unpack(message: Message, kind: type) -> dict[str, Any]:
    """Return the values of the fields of a dataclass that a message has too."""
    known = message.DESCRIPTOR.fields_by_name
    return {each.name: getattr(message, each.name) for each in fields(kind) if each.name in known}
