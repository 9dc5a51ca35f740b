"""Kinds of configured values, such as sizes and spans of time: read from text and files, and shown."""

import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.errors import BadValueError, shown_value

_SIZE_FACTORS: Final = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
SIZE_UNITS: Final = (
    ("TiB", 2**40), ("TB", 10**12), ("GiB", 2**30), ("GB", 10**9),
    ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10), ("kB", 10**3),
)  # fmt: skip
_SIZE_PATTERN: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt]?i?)b?", re.IGNORECASE)
SPAN_UNITS: Final = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_SPAN_PATTERN: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([smhdw])")


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``10GiB``.

    Raises:
        BadValueError: It is none.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    unit = _SIZE_FACTORS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BadValueError(f"{shown_value(text)} is no size", "write it like 10GiB or 500MB")
    return int(float(match[1]) * unit)


def parse_span(text: str) -> float:
    """Return the seconds of a span of time such as ``7d``; those of ``0`` are 0.

    Raises:
        BadValueError: It is none.
    """
    match = _SPAN_PATTERN.fullmatch(text)
    if match is None and text != "0":
        raise BadValueError(f"{shown_value(text)} is no span of time", "write it like 7d, 12h or 30m")
    return float(match[1]) * SPAN_UNITS[match[2]] if match else 0.0


_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")
_MAX_SIZE_BYTES: Final = 2**63 - 1


class Kind:
    """The kind of an option's values. A value in a file has a type; a flag's or variable's is text.

    Attributes:
        metavar: The placeholder of a value in help texts.
    """

    metavar = "TEXT"

    def read(self, value: object, base: Path) -> Any:
        """Return a value out of a TOML file.

        Args:
            base: The directory that relative paths start from.

        Raises:
            BadValueError: It is of another type, or out of range.
        """
        raise NotImplementedError

    def parse(self, text: str, base: Path) -> Any:
        """Return the value of a flag's or an environment variable's text.

        Raises:
            BadValueError: The text is invalid.
        """
        return self.read(text, base)

    def show(self, value: Any) -> Any:
        """Return the value as ``read`` takes it."""
        return value


class Text(Kind):
    """Any text of one line."""

    def read(self, value: object, base: Path) -> str:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise BadValueError(f"{shown_value(value)} is no text of one line", "put it in quotes")
        return value


@dataclass(frozen=True)
class Name(Kind):
    """A word of lower-case letters, digits, - and _.

    Args:
        reserved: Words with another meaning.
    """

    reserved: tuple[str, ...] = ()
    metavar = "NAME"
    _PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,39}")

    def read(self, value: object, base: Path) -> str:
        if not isinstance(value, str) or not self._PATTERN.fullmatch(value) or value in self.reserved:
            raise BadValueError(
                f"{shown_value(value)} cannot be a name", "use up to 40 lower-case letters, digits, - and _"
            )
        return value


class File(Kind):
    """A path; in a file relative to that file, else to the working directory."""

    metavar = "PATH"

    def read(self, value: object, base: Path) -> Path:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise BadValueError(f"{shown_value(value)} is no path", 'write it like "/var/lib/torchperfd"')
        return (base / value).absolute()

    def show(self, value: Path) -> str:
        return str(value)


class Address(Kind):
    """HOST:PORT, as (host, port)."""

    metavar = "HOST:PORT"

    def read(self, value: object, base: Path) -> tuple[str, int]:
        text = value if isinstance(value, str) else ""
        host, _, port = text.rpartition(":")
        if not host or not text.isprintable() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
            raise BadValueError(f"{shown_value(value)} is not HOST:PORT", "write it like 127.0.0.1:9407")
        return host.strip("[]"), int(port)

    def show(self, value: tuple[str, int]) -> str:
        host, port = value
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Mode(Kind):
    """Permission bits, written in octal. Text only: a number could be meant in either base."""

    metavar = "MODE"

    def read(self, value: object, base: Path) -> int:
        try:
            mode = int(value, 8) if isinstance(value, str) else -1
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o777:
            raise BadValueError(f"{shown_value(value)} is no file mode", 'write it like "600" or "666"')
        return mode

    def show(self, value: int) -> str:
        return f"{value:03o}"


class Size(Kind):
    """A size such as ``10GiB`` or ``500MB``, or a number of bytes; 0 stands for no limit."""

    metavar = "SIZE"

    def read(self, value: object, base: Path) -> int:
        if isinstance(value, str):
            return parse_size(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_SIZE_BYTES:
            raise BadValueError(f"{shown_value(value)} is no size", 'write it like "10GiB" or "500MB"')
        return value

    def show(self, value: int) -> object:
        for unit, size in SIZE_UNITS:
            if value and value % size == 0:
                return f"{value // size}{unit}"
        return value


@dataclass(frozen=True)
class Span(Kind):
    """A span of time such as ``7d`` or ``30s``, in seconds.

    Args:
        least: In seconds; 0 allows the plain 0, which stands for no limit.
        most: In seconds.
    """

    least: float = 0.0
    most: float = math.inf
    metavar = "SPAN"

    def read(self, value: object, base: Path) -> float:
        if isinstance(value, str):
            seconds = parse_span(value)
        elif value == 0 and not isinstance(value, bool) and isinstance(value, int | float):
            seconds = 0.0
        else:
            raise BadValueError(
                f"{shown_value(value)} is no span of time", 'write it like "7d", "12h" or "30m"'
            )
        if not self.least <= seconds <= self.most:
            raise BadValueError(f"{shown_value(value)} is out of range", f"choose {self._range()}")
        return seconds

    def show(self, value: float) -> object:
        for unit, seconds in SPAN_UNITS.items():
            if value and value % seconds == 0:
                return f"{int(value // seconds)}{unit}"
        return f"{value:g}s" if value else 0

    def _range(self) -> str:
        most = "" if math.isinf(self.most) else f" and at most {self.show(self.most)}"
        return f"at least {self.show(self.least)}{most}"


@dataclass(frozen=True)
class Number(Kind):
    """A finite number, from ``least`` to ``most``, both allowed."""

    least: float
    most: float
    noun: str = "number"
    metavar = "NUMBER"

    def read(self, value: object, base: Path) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise BadValueError(f"{shown_value(value)} is not a {self.noun}", f"write it like {self.least:g}")
        if not self.least <= value <= self.most:
            raise BadValueError(
                f"{shown_value(value)} is out of range", f"choose {self.least:g} to {self.most:g}"
            )
        return float(value)

    def parse(self, text: str, base: Path) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise BadValueError(f"{shown_value(text)} is not a {self.noun}", "write it in digits")
        return self.read(number, base)


@dataclass(frozen=True)
class Count(Kind):
    """A whole number, from ``least`` to ``most``, both allowed."""

    least: int = 0
    most: int = 10**9
    metavar = "COUNT"

    def read(self, value: object, base: Path) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadValueError(
                f"{shown_value(value)} is no whole number", "write it in digits, without quotes"
            )
        if not self.least <= value <= self.most:
            raise BadValueError(
                f"{shown_value(value)} is out of range", f"choose {self.least} to {self.most}"
            )
        return value

    def parse(self, text: str, base: Path) -> int:
        try:
            number = int(text)
        except ValueError:
            raise BadValueError(f"{shown_value(text)} is no whole number", "write it in digits") from None
        return self.read(number, base)


class Switch(Kind):
    """On or off."""

    metavar = "BOOLEAN"

    def read(self, value: object, base: Path) -> bool:
        if not isinstance(value, bool):
            raise BadValueError(f"{shown_value(value)} is neither true nor false", "write true or false")
        return value

    def parse(self, text: str, base: Path) -> bool:
        word = text.strip().lower()
        if word not in (*_ON, *_OFF):
            raise BadValueError(f"{shown_value(text)} is neither on nor off", "write 1 or 0")
        return word in _ON


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words."""

    choices: tuple[str, ...]

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return f"[{'|'.join(self.choices)}]"

    def read(self, value: object, base: Path) -> str:
        if not isinstance(value, str) or value not in self.choices:
            near = difflib.get_close_matches(value[:80], self.choices, 1) if isinstance(value, str) else []
            remedy = f"did you mean {near[0]}?" if near else f"use {' or '.join(self.choices)}"
            raise BadValueError(f"{shown_value(value)} is none of the choices", remedy)
        return value


ALL: Final = "all"


@dataclass(frozen=True)
class Choices(Kind):
    """Some of a few words, in the order of all of them; ``all`` stands for each."""

    choices: tuple[str, ...]
    metavar = "NAME,..."

    def read(self, value: object, base: Path) -> tuple[str, ...]:
        words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
        remedy = f"use {ALL}, or some of {', '.join(self.choices)}"
        if not isinstance(words, list) or not words:
            raise BadValueError(f"{shown_value(value)} names none of the choices", remedy)
        if words == [ALL]:
            return self.choices
        for word in words:
            if word not in self.choices:
                raise BadValueError(f"{shown_value(word)} is none of the choices", remedy)
        return tuple(choice for choice in self.choices if choice in words)

    def show(self, value: tuple[str, ...]) -> object:
        return ALL if value == self.choices else list(value)


class Labels(Kind):
    """A table of label names and their values, as pairs by name."""

    metavar = "TABLE"

    def read(self, value: object, base: Path) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise BadValueError(
                f"{shown_value(value)} is no table of labels", 'write it like { phase = "backward" }'
            )
        return tuple(sorted(value.items()))

    def show(self, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
        return dict(value)


@dataclass(frozen=True)
class Counts(Kind):
    """A list of whole numbers."""

    metavar = "LIST"

    def read(self, value: object, base: Path) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            raise BadValueError(f"{shown_value(value)} is no list of numbers", "write it like [79, 95]")
        return tuple(Count().read(each, base) for each in value)

    def show(self, value: tuple[int, ...]) -> list[int]:
        return list(value)
