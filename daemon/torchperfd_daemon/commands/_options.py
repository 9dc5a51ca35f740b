"""Options that several commands share."""

import math
from typing import Any

import click

socket_option = click.option(
    "--socket", envvar="TORCHPERFD_SOCKET", help="Socket of the daemon; the usual places by default."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


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
