"""Decodes the events of a trace file: into types, or field by field where the typed decoder refuses them.

`Event` is for a sound Kineto trace and decodes fastest. The other types hold additional data: times for which
a double is too coarse, and the data from which the kind of an event without a category is inferred. The
lenient functions are the slow path: they read single events and headers field by field, so that a bad field
costs only itself, and are never used for a whole sound file.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, TypeVar

import msgspec

from torchperfd.model.loader_facts import LoaderFacts

_Decoded = TypeVar("_Decoded")

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


class ForeignArgs(Args, gc=False):
    """The arguments that show where an event without a category ran, and the names in metadata events.

    The names are those of torch_npu and of Kineto's metadata events.
    """

    stream: int | str | None = None
    task_type: str | None = msgspec.field(name="Task Type", default=None)
    connection: int | str | None = msgspec.field(name="connection_id", default=None)
    label: str | None = msgspec.field(name="name", default=None)
    labels: str | None = None


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


class ForeignEvent(ExactEvent, gc=False):
    """An event of a trace whose events lack categories."""

    args: ForeignArgs | None = None


AnyEvent = Event | ExactEvent


class Distributed(msgspec.Struct):
    """The rank that wrote the trace, in a distributed run."""

    rank: int | None = None
    world_size: int | None = None


class Device(msgspec.Struct):
    """One accelerator; 0 for what the trace does not contain.

    Attributes:
        generation: The first number of its CUDA compute capability.
    """

    name: str = ""
    memory: int = msgspec.field(name="totalGlobalMem", default=0)
    generation: int = msgspec.field(name="computeMajor", default=0)


class Capture(msgspec.Struct):
    """Data from torchperfd's client at the time of the capture: the unrecorded steps and their loader."""

    unrecorded_step_ns: int = 0
    unrecorded_phase_ns: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    loader: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def phases(self) -> dict[str, float]:
        """Return the phases; none if the file has another type there."""
        found = _decoded(self.unrecorded_phase_ns, dict[str, float]) or {}
        return {name: ns for name, ns in found.items() if 0 <= ns < math.inf}

    def loader_facts(self) -> LoaderFacts | None:
        """Return the data on the loader; None if the file has none, or another type there."""
        facts = _decoded(self.loader, LoaderFacts)
        return facts if facts is not None and facts.is_sound() else None


def _decoded(text: msgspec.Raw, kind: type[_Decoded]) -> _Decoded | None:
    """Return a part of the header; None if it is absent or of another type, which costs only this part."""
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Header(msgspec.Struct):
    """The fields of a trace besides its events.

    Attributes:
        base_ns: The origin of all times, in ns since 1970; 0 if they are absolute.
        capture: The data from torchperfd's client; None for a trace of another origin.
    """

    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[Device] = msgspec.field(name="deviceProperties", default_factory=list)
    capture: Capture | None = msgspec.field(name="torchperfd", default=None)
    warnings: list[str] = msgspec.field(name="WARNING", default_factory=list)
    errors: list[str] = msgspec.field(name="ERROR", default_factory=list)


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
    is_list = getattr(field.type, "__origin__", None) is list
    if isinstance(value, dict) and not is_list and (nested := _struct_in(field.type)):
        return convert(value, nested)
    if isinstance(value, list) and is_list and (nested := _struct_in(field.type)):
        return [made for each in value if isinstance(each, dict) and (made := convert(each, nested))]
    if isinstance(value, list) and field.type == list[str]:
        return [str(each).encode(errors="replace").decode() for each in value]
    if field.name == "name" and value is not None:
        return str(value)
    try:
        return msgspec.convert(value, field.type, strict=False)
    except (msgspec.ValidationError, OverflowError):
        return msgspec.UNSET


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
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
