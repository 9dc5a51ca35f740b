"""Options that several commands share."""

import contextlib
import math
import time
from datetime import datetime
from typing import Any

import click

from torchperfd_daemon.config.kinds import parse_span
from torchperfd_daemon.errors import BadValueError

socket_option = click.option(
    "--socket", envvar="TORCHPERFD_SOCKET", help="Socket of the daemon; by default the standard paths."
)
fleet_option = click.option(
    "--fleet", is_flag=True, help="All nodes that the daemon knows, not only this one."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


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
        try:
            return parse_span(value)
        except BadValueError as error:
            self.fail(f"{error}.", param, ctx)


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
        with contextlib.suppress(BadValueError):
            return time.time() - parse_span(value)
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
