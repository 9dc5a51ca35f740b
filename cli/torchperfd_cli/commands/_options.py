"""Options that several commands share, the types of their values, and what shells complete for them.

``torchperfd completion`` is here, too.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from torchperfd.v1 import contract, control_pb2
from torchperfd_daemon.config.kinds import parse_span
from torchperfd_daemon.errors import BadValueError, TorchperfdError, UsageError, explained

_Command = TypeVar("_Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    from torchperfd.report.store import RunStore


class Parsed(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """A kind of value that a function reads from its text.

    Args:
        name: Of the kind, in help.
        parse: Raises ValueError or BadValueError with what is wrong.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; one that is no text is read already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except (ValueError, BadValueError) as error:
            self.fail(f"{error}.", param, ctx)


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{text!r} is no list of numbers such as 32,64,128")
    return tuple(dict.fromkeys(map(int, words)))


def _share(text: str) -> float:
    word = text.strip()
    with contextlib.suppress(ValueError):
        share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        if math.isfinite(share) and share >= 0:
            return share
    raise ValueError(f"{text!r} is no share such as 5% or 0.05")


def _moment(text: str) -> float:
    with contextlib.suppress(BadValueError):
        return time.time() - parse_span(text)
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise ValueError(f"{text[:40]!r} is no moment; write it like 2d or 2026-07-01T12:00")


NUMBERS: Final = Parsed("numbers", _numbers)
"""Whole numbers above 0, separated by commas; each once."""
SHARE: Final = Parsed("share", _share)
"""A share of something, as a number or in percent with a percent sign: 0.05 for 5 %."""
AGE: Final = Parsed("age", parse_span)
"""A span of time such as ``7d`` or ``12h``, in seconds; 0 stands for no limit."""
MOMENT: Final = Parsed("moment", _moment)
"""A date of this time zone, or how long ago it was; in Unix seconds."""


socket_option = click.option(
    "--socket", envvar="TORCHPERFD_SOCKET", help="Socket of the daemon; by default the standard paths."
)
fleet_option = click.option(
    "--fleet", is_flag=True, help="All nodes that the daemon knows, not only this one."
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


runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_RUNS_DIR",
    help="Directory of the kept runs; this user's own by default.",
)


def open_runs(named: Path | None) -> "RunStore":
    """Return the kept runs of a directory; of this user's own without one."""
    from torchperfd.report.store import RunStore

    return RunStore(str(named) if named is not None else contract.user_runs_dir())


def whole_kept_run(context: click.Context, _: click.Parameter, given: Any) -> Any:
    """Complete the ids of kept runs on a command line; the command's object is their store."""
    with explained(f"cannot read {context.obj.directory}"):
        if isinstance(given, tuple):
            return tuple(context.obj.whole_id(each) for each in given)
        return context.obj.whole_id(given)


_ANSWER_S: Final = 1.0


def complete_runs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _items((run.run for run in _runs(context)), incomplete)


def complete_jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _items((run.job_name for run in _runs(context)), incomplete)


def complete_past_runs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs of which the daemon knows the goodput, also those that have ended."""
    answer = _ask(
        context, lambda daemon: daemon.GetGoodput(control_pb2.GetGoodputRequest(), timeout=_ANSWER_S)
    )
    return _items((run.run for run in answer.runs), incomplete) if answer is not None else []


def complete_captures(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids of captures."""
    from torchperfd_cli.commands._capture_catalog import open_catalog

    named = _directory(context, "captures_dir")
    return _items(open_catalog(Path(named) if named else None).ids(), incomplete)


def complete_kept_runs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return kept_run_items(_directory(context, "runs_dir"), incomplete)


def complete_traces(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the ids of captures; files where none begins so."""
    return [*complete_file(incomplete), *complete_captures(context, parameter, incomplete)]


def complete_sides(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the ids of kept runs and of captures; files where none begins so."""
    runs = complete_kept_runs(context, parameter, incomplete)
    return [*complete_traces(context, parameter, incomplete), *runs]


def complete_file(incomplete: str, *, only_directories: bool = False) -> list[CompletionItem]:
    """Return the request that the shell completes files itself; comes before any names."""
    return [CompletionItem(incomplete, type="dir" if only_directories else "file")]


def kept_run_items(directory: str, incomplete: str) -> list[CompletionItem]:
    """Return the ids of the runs kept in a directory; in this user's own where it is empty."""
    from torchperfd.report.store import RunStore

    with contextlib.suppress(OSError):
        return _items(
            (run.run_id for run in RunStore(directory or contract.user_runs_dir()).list()), incomplete
        )
    return []


def _runs(context: click.Context) -> Iterable[control_pb2.Run]:
    fleet = bool(context.params.get("fleet"))
    request = control_pb2.ListRunsRequest(fleet=fleet)
    answer = _ask(context, lambda daemon: daemon.ListRuns(request, timeout=_ANSWER_S))
    return answer.runs if answer is not None else ()


def _ask(context: click.Context, ask: Callable[[Any], Any]) -> Any:
    """Return the answer of the daemon that the command line names; None without one."""
    from torchperfd_cli.commands._daemon import connect

    socket = context.params.get("socket")
    with contextlib.suppress(TorchperfdError, OSError), connect(socket, answer_seconds=_ANSWER_S) as daemon:
        return ask(daemon)
    return None


def _directory(context: click.Context, name: str) -> str:
    """Return the directory that an option of the command or of its group names; empty without one."""
    given = context.params.get(name) or (context.parent.params.get(name) if context.parent else None)
    return str(given or "")


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(set(names)) if name and name.startswith(incomplete)]


one_run_option = click.option(
    "--run", default="", shell_complete=complete_runs, help="The run; may be omitted when there is only one."
)


def limit_option(rows: int) -> Callable[[_Command], _Command]:
    """Return the option for the number of rows; without it, ``rows`` in a table and all of them as JSON."""
    return click.option(
        "--limit",
        type=click.IntRange(0),
        help=f"At most so many, the newest; 0 is all. By default {rows} in the table, all as JSON.",
    )


def refuse_given(
    context: click.Context, names: Collection[str], why: str, remedy: str = "leave it out"
) -> None:
    """Refuse options of the command line that mean nothing for what it names.

    Args:
        names: Of their parameters.
        why: What is wrong, in words that follow the option.

    Raises:
        UsageError: One of them is given.
    """
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if is_given and parameter.name in names:
            raise UsageError(f"{parameter.opts[0]} {why}", remedy)


_VARIABLE = "_TORCHPERFD_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, options, names of runs and ids of captures."""
    from torchperfd_cli.commands._output import emit, plain

    kind = get_completion_class(shell)
    if kind is None:
        raise click.BadParameter(f"{shell} is not known to click", context)
    root = context.find_root()
    emit(plain(kind(root.command, {}, "torchperfd", _VARIABLE).source()))
