"""Options that several commands share, and the types of their values."""

import contextlib
import math
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from torchperfd.runs.store import RunStore
from torchperfd.v1 import contract
from torchperfd_daemon.config.kinds import parse_span
from torchperfd_daemon.errors import BadValueError, explained


class Numbers(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """Whole numbers above 0, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return them as a tuple."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() and int(word) for word in words):
            self.fail(f"{value!r} is no list of numbers such as 32,64,128", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


class Share(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A share of something, in percent with a percent sign, else as a number."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return it as a number, 0.05 for 5 %."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not (math.isfinite(share) and share >= 0):
            self.fail(f"{value!r} is no share such as 5% or 0.05", param, ctx)
        return share


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


runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_RUNS_DIR",
    help="Directory of the kept runs; this user's own by default.",
)


def open_runs(named: Path | None) -> RunStore:
    """Return the kept runs of a directory; of this user's own without one."""
    return RunStore(str(named) if named is not None else contract.user_runs_dir())


def whole_kept_run(context: click.Context, _: click.Parameter, given: Any) -> Any:
    """Complete the ids of kept runs on a command line; the command's object is their store."""
    with explained(f"cannot read {context.obj.directory}"):
        if isinstance(given, tuple):
            return tuple(context.obj.whole_id(each) for each in given)
        return context.obj.whole_id(given)
