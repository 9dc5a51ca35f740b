"""Options that several commands share."""

import math
import re
import time
from datetime import datetime
from typing import Any, Final

import click

socket_option = click.option(
    "--socket", envvar="TORCHPERFD_SOCKET", help="Socket of the daemon; the usual places by default."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


_UNITS: Final = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt]?i?)b?", re.IGNORECASE)
_SPANS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([smhdw])")


class Bytes(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A size such as ``10GiB`` or ``500MB``, as a number of bytes; 0 stands for no limit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes.

        Raises:
            click.BadParameter: It is no size.
        """
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            self.fail(f"{value[:40]!r} is no size; write it like 10GiB or 500MB.", param, ctx)
        return int(float(match[1]) * unit)


class Age(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A span of time such as ``7d`` or ``12h``, in seconds; 0 stands for no limit."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds.

        Raises:
            click.BadParameter: It is no span of time.
        """
        if not isinstance(value, str):
            return float(value)
        match = _AGE.fullmatch(value)
        if match is None and value != "0":
            self.fail(f"{value[:40]!r} is no span of time; write it like 7d, 12h or 30m.", param, ctx)
        return float(match[1]) * _SPANS[match[2]] if match else 0.0


class Moment(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A moment, as a date of this time zone or as how long ago it was; in Unix seconds."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the Unix time.

        Raises:
            click.BadParameter: It is neither.
        """
        if not isinstance(value, str):
            return float(value)
        match = _AGE.fullmatch(value)
        if match:
            return time.time() - float(match[1]) * _SPANS[match[2]]
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value[:40]!r} is no moment; write it like 2d or 2026-07-01T12:00.", param, ctx)


class Seconds(click.FloatRange):
    """A finite time in seconds; click's own range lets NaN through."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number.

        Raises:
            click.BadParameter: It is none, or out of range.
        """
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a time in seconds.", param, ctx)
        return seconds
