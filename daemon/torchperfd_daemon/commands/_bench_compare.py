"""``torchperfd bench compare``."""

import json
from typing import Any

import click

from torchperfd.bench.functions_bench import MIN_ROUNDS, bench_functions
from torchperfd.bench.functions_text import functions_text
from torchperfd_daemon.commands._fit import terminal_width
from torchperfd_daemon.commands._numbers import Numbers
from torchperfd_daemon.commands._share import Share
from torchperfd_daemon.commands._status_line import StatusLine
from torchperfd_daemon.errors import SlowerError, UsageError
from torchperfd_daemon.text import printable


class _Parameter(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A name and its values: ``batch_size=1,32``; a value is JSON, or else a text."""

    name = "parameter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name and the list of values."""
        if isinstance(value, tuple):
            return value
        name, equals, values = value.partition("=")
        if not equals or not name.isidentifier() or not values:
            self.fail(f"{value!r} is no parameter such as batch_size=1,32", param, ctx)
        return name, [_value(word) for word in values.split(",")]


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


@click.command("compare")
@click.argument("targets", nargs=-1, required=True, metavar="MODULE:FUNCTION...")
@click.option(
    "--setup",
    default="",
    metavar="MODULE:FUNCTION",
    help="Called with the parameters, outside the timing; each function is called with what it returns.",
)
@click.option(
    "-p",
    "--parameter",
    "parameters",
    type=_Parameter(),
    multiple=True,
    metavar="NAME=V1,V2",
    help="Values of a parameter; several parameters give every combination.",
)
@click.option("--threads", type=Numbers(), default=(), help="Numbers of operator threads, such as 1,4.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=0.5,
    show_default=True,
    help="To time each function for, in each round.",
)
@click.option("--rounds", type=click.IntRange(min=MIN_ROUNDS), default=5, show_default=True, help="Rounds.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 36000),
    default=300.0,
    show_default=True,
    help="Seconds for the imports, and for each function beyond --seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--fail-above",
    type=Share(),
    metavar="PERCENT",
    help="Exit with code 7 if a function is slower than the first by more than this, such as 5%.",
)
def command(
    targets: tuple[str, ...],
    setup: str,
    parameters: tuple[tuple[str, list[Any]], ...],
    threads: tuple[int, ...],
    seconds: float,
    rounds: int,
    timeout: float,
    as_json: bool,
    fail_above: float | None,
) -> None:
    """Time implementations of one thing side by side, with torch.utils.benchmark.

    The first function is what the others are compared with. All are timed in turn, round by round. A
    difference is shown only if it is more than the noise between rounds.
    """
    if len(targets) < 2:
        raise UsageError("compare needs two functions", "name a second MODULE:FUNCTION")
    by_name = dict(parameters)
    if len(by_name) < len(parameters):
        raise UsageError("a parameter is given twice", "write all its values in one: -p name=1,2")
    with StatusLine() as status:
        found = bench_functions(
            targets,
            setup=setup,
            parameters=by_name,
            threads=threads,
            seconds=seconds,
            rounds=rounds,
            timeout=timeout,
            progress=status.show,
        )
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        click.echo(printable(functions_text(found, terminal_width())))
    slower = found.slower_than(fail_above) if fail_above is not None else []
    if slower:
        raise SlowerError(f"beyond the limit of {fail_above:.1%}: {'; '.join(slower)}")
