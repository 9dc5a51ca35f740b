"""Dataclasses as parts of JSON documents, and back out of documents that anyone may have written.

A field has its own name in a document. Nanoseconds are written as seconds: ``ns`` is ``seconds_total``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from torchperfd.model.formatting import MAX_LARGE, MAX_TEXT, count, number, text
from torchperfd.model.messages import AtMost, Text, split_hint

_NS: Final = "ns"
_SECONDS: Final = "seconds_total"

T = TypeVar("T")


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
