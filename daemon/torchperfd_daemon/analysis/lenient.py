"""Reads the events that the typed decoder refuses, field by field, so that a bad field costs only itself.

This is the slow path: it is taken for single events and headers, never for a whole sound file.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeVar

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)

_UNPARSABLE: Final = (ValueError, RecursionError, InvalidOperation)
_DECODER: Final = json.JSONDecoder(strict=False, parse_float=Decimal)
# The output of C and C++ for infinities and NaN. A time of -1 counts as absent.
_NO_NUMBER: Final = re.compile(
    r"[-+]?(?:inf(?:inity)?|nan(?:\([a-z0-9_]*\))?|\d\.#(?:inf|ind|qnan|snan)\d*)(?![\w.])", re.IGNORECASE
)
# A comma for a decimal point: within an object, a number and a comma are followed by a name.
_DECIMAL_COMMA: Final = re.compile(r"(?<=\d),(?=\d)")
_MAX_REPAIRS: Final = 64
_TIMES: Final = ("ts", "dur")


def repaired(text: str) -> tuple[str, int] | None:
    """Return one event's text as JSON, of the same length, and where the event ends in it.

    Returns:
        None if it cannot be repaired: infinities and NaN become -1, decimal commas become points.
    """
    for _ in range(_MAX_REPAIRS):
        try:
            return text, _DECODER.raw_decode(text)[1]
        except json.JSONDecodeError as error:
            at = error.pos
        except _UNPARSABLE:
            return None
        # Of "1.#INF" the parser takes the 1.
        begin = at - 1 if text[at : at + 2] == ".#" else at
        if found := _NO_NUMBER.match(text, begin):
            text = text[:begin] + "-1".ljust(found.end() - begin) + text[found.end() :]
        elif at and _DECIMAL_COMMA.match(text, at - 1):
            text = text[: at - 1] + "." + text[at:]
        else:
            return None
    return None


def struct_from(text: bytes, kind: type[Struct]) -> Struct | None:
    """Return as much of a JSON object as fits the fields of ``kind``; None where it is no JSON object."""
    try:
        found = _DECODER.decode(text.decode(errors="replace"))
    except _UNPARSABLE:
        return None
    return convert(found, kind) if isinstance(found, dict) else None


def convert(found: Mapping[str, Any], kind: type[Struct]) -> Struct | None:
    """Return a struct with those of its fields that can be read; None where one that it needs is missing.

    Numbers may be text, and have a decimal comma. A value that does not fit its field leaves the default.
    """
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.encode_name in found:
            value = _field(found[field.encode_name], field)
            if value is not msgspec.UNSET:
                values[field.name] = value
    try:
        return kind(**values)
    except TypeError:
        return None


def objects_in(text: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of some keys of a JSON object; of a broken one, those that are whole."""
    written = text.decode(errors="replace")
    try:
        found = _DECODER.raw_decode(written)[0]
    except _UNPARSABLE:
        found = None
    if isinstance(found, dict):
        return {key: found[key] for key in keys if key in found}
    values = {}
    for key in keys:
        if at := re.search(rf'"{key}"\s*:\s*', written):
            try:
                values[key] = _DECODER.raw_decode(written, at.end())[0]
            except _UNPARSABLE:
                continue
    return values


def whole_number(value: Any) -> int | None:
    """Return a whole number, also from text or a decimal without fraction; None for anything else."""
    number = _number(value)
    return int(number) if number is not None and number == number.to_integral_value() else None


def _field(value: Any, field: msgspec.structs.FieldInfo) -> Any:
    """Return a field's value, or ``UNSET`` where there is none for it."""
    if field.type is msgspec.Raw:
        return msgspec.Raw(json.dumps(value, default=str).encode()) if value is not None else msgspec.UNSET
    if isinstance(value, str):
        # Half of a surrogate pair is no text: it cannot be shown or sent.
        value = value.encode(errors="replace").decode()
    if field.name in _TIMES:
        number = _number(value)
        if number is None:
            return msgspec.UNSET
        return float(number) if field.type is float else number
    if isinstance(value, Decimal):
        value = float(value) if math.isfinite(value) else None
    if isinstance(value, dict) and (nested := _struct_in(field.type)):
        return convert(value, nested)
    if field.name == "name" and value is not None:
        return str(value)
    try:
        return msgspec.convert(value, field.type, strict=False)
    except (msgspec.ValidationError, OverflowError):
        return msgspec.UNSET


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct among the kinds that a field may be of."""
    kinds = getattr(kind, "__args__", (kind,))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)), None)


def _number(value: Any) -> Decimal | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.strip()
        value = value.replace(",", ".") if value.count(",") == 1 and "." not in value else value
    elif not isinstance(value, (int, Decimal)):
        return None
    try:
        number = Decimal(value)
    except _UNPARSABLE:
        return None
    return number if number.is_finite() else None
